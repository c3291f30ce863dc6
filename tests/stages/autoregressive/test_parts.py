"""The parts of autoregressive engines: cache, sampling, detokenization, packed layers."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.packed import pack_linears
from omni_actors.stages.autoregressive.sampling import Sampler, Sampling, choose, generator, weights
from omni_actors.stages.autoregressive.text import Detokenizer, StopFilter

HEADS, SIZE = 2, 3

# cache: against a list of lists


def cells(values: Sequence[float]) -> torch.Tensor:
    """(heads, tokens, size), every number of a token the same."""
    return torch.tensor(values)[None, :, None].expand(HEADS, -1, SIZE)


class CheckedCache:
    """A ``SlottedCache`` of two layers beside a simple model of it."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.cache = SlottedCache(max_rows, max_length, torch.float32, torch.device("cpu"))
        self.rows: list[list[float]] = []
        self.made = 0

    def add(self) -> None:
        assert self.cache.add_row() == len(self.rows)
        self.rows.append([])

    def remove(self, row: int) -> None:
        self.cache.remove_row(row)
        self.rows[row] = self.rows[-1]
        del self.rows[-1]

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], count: int, value: float | None = None) -> None:
        positions, mask = self.cache.extend(rows, count)
        brought_on = [self.rows[row] for row in rows]
        starts = [len(row) for row in brought_on]
        assert positions.tolist() == [[start + i for i in range(count)] for start in starts]
        fresh = [
            [value if value is not None else float(self.made + n * count + i) for i in range(count)]
            for n in range(len(rows))
        ]
        self.made += count * len(rows)
        for row, new in zip(brought_on, fresh, strict=True):
            row += new
        longest = max(len(row) for row in brought_on)
        assert mask.shape == (len(rows), 1, count, longest)
        for n, start in enumerate(starts):
            for i in range(count):
                seen = start + i + 1
                assert mask[n, 0, i].tolist() == [0.0] * seen + [-math.inf] * (longest - seen)
        states = torch.stack([cells(new) for new in fresh])
        for layer in range(2):
            sign = -1 if layer else 1
            keys, values = self.cache.update(sign * states, 2 * sign * states, layer)
            assert keys.shape == values.shape == (len(rows), HEADS, longest, SIZE)
            for n, row in enumerate(brought_on):
                expected = cells([*row, *[0.0] * (longest - len(row))])
                torch.testing.assert_close(keys[n], sign * expected, rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(values[n], 2 * sign * expected, rtol=0, atol=0, equal_nan=True)

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows]
        for store in (*self.cache._keys, *self.cache._values):
            for row in range(len(store)):
                length = len(self.rows[row]) if row < len(self.rows) else 0
                assert not store[row, :, length:].any(), "a cell beyond a row's end is not zero"


@given(st.data())
def test_cache_holds_what_was_written_through_any_joins_leaves_and_growth(data: st.DataObject) -> None:
    checked = CheckedCache(max_rows=5, max_length=40)
    for _ in range(data.draw(st.integers(1, 25))):
        rows = len(checked.rows)
        act = data.draw(st.sampled_from(["add", "extend", "remove"]))
        if act == "add" and rows < 5:
            checked.add()
        elif act == "remove" and rows:
            checked.remove(data.draw(st.integers(0, rows - 1)))
        elif act == "extend" and rows:
            chosen = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
            count = data.draw(st.integers(1, 9))
            if max(len(checked.rows[row]) for row in chosen) + count <= 40:
                checked.extend(chosen, count)
        checked.check()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_cache_zeroes_what_a_freed_row_leaves_behind(poison: float, row: int) -> None:
    checked = CheckedCache(max_rows=3, max_length=20)
    for n in range(3):
        checked.add()
        checked.extend([n], 2 + n, None if n != row else poison)
    checked.extend([row], 9, poison)
    checked.remove(row)
    checked.check()
    checked.add()
    checked.extend([0, 1, 2], 1)
    assert all(store[:3].isfinite().all() for store in (*checked.cache._keys, *checked.cache._values))


def test_cache_keeps_no_memory_when_it_is_empty() -> None:
    checked = CheckedCache(max_rows=4, max_length=1000)
    checked.add()
    checked.extend([0], 300)
    assert checked.cache._keys[0].shape == (1, HEADS, 512, SIZE)
    checked.remove(0)
    assert not checked.cache._keys
    checked.add()
    checked.extend([0], 3)
    assert checked.cache._keys[0].shape == (1, HEADS, 256, SIZE)


def test_cache_refuses_rows_and_tokens_beyond_its_limits() -> None:
    cache = SlottedCache(1, 10, torch.float32, torch.device("cpu"))
    cache.add_row()
    with pytest.raises(ValueError, match="all 1 rows"):
        cache.add_row()
    with pytest.raises(ValueError, match="11 tokens; the cache holds 10"):
        cache.extend([0], 11)


# sampling: against transformers


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 5, 1000]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_sampling_weights_are_those_of_transformers(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 3
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.int64), (logits / temperature)[None])[0].softmax(0)
    [ours] = weights(logits[None], Sampling(temperature, top_k, top_p))
    assert (ours > 0).tolist() == (expected > 0).tolist()
    torch.testing.assert_close(ours / ours.sum(), expected)


def sampler(seed: int | None = None, **sampling: Any) -> Sampler:
    return Sampler(Sampling(**sampling), generator(seed))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    draw = sampler(temperature=1.0, seed=5)
    drawn = torch.tensor([draw(probabilities.log()) for _ in range(4000)])
    torch.testing.assert_close(drawn.bincount(minlength=4) / 4000, probabilities, rtol=0, atol=0.02)
    assert not (drawn == 1).any()


def test_a_seed_draws_the_same_tokens_when_rounding_swaps_near_ties() -> None:
    logits = torch.zeros(200)
    noisy = logits + torch.linspace(1e-6, -1e-6, 200)
    first, second = sampler(temperature=1.0, seed=-3), sampler(temperature=1.0, seed=-3)
    assert [first(logits) for _ in range(50)] == [second(noisy) for _ in range(50)]


def test_without_a_seed_draws_differ() -> None:
    logits = torch.zeros(1000)
    draws = [[draw(logits) for _ in range(8)] for draw in (sampler(temperature=1.0) for _ in range(2))]
    assert draws[0] != draws[1]


@pytest.mark.parametrize("extreme", [{"temperature": 5e-324}, {"top_p": 5e-324}, {"top_k": 2**40}, {"seed": 2**70}])
def test_extreme_parameters_are_served(extreme: dict[str, Any]) -> None:
    logits = torch.tensor([0.0, 30.0, -1e30])
    assert sampler(**{"temperature": 1.0, **extreme})(logits) == 1


def test_rows_of_a_batch_are_sampled_independently() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [9.0, 0.0, 0.0], [0.0, 0.0, 90.0]])
    draw = sampler(temperature=1.0, seed=1)
    assert choose(logits, [None, None, draw]) == [1, 0, 2]
    assert choose(logits[2:], [draw]) == [2]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_penalty_and_suppression_are_those_of_transformers(temperature: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(8)) * 3
    seen, suppressed = [3, 7, 7, 41], torch.zeros(50, dtype=torch.bool).index_fill_(0, torch.tensor([1, 7]), True)
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), SuppressTokensLogitsProcessor([1, 7], device="cpu")]
    )
    expected = processors(torch.tensor([seen]), logits[None])[0]
    draw = Sampler(Sampling(temperature, repetition_penalty=1.3), generator(1), suppressed)
    draw.see(seen)
    if temperature == 0:
        assert draw(logits) == expected.argmax()
    else:
        torch.testing.assert_close(draw.allowed(logits), expected)
        assert not {1, 7} & {draw(logits) for _ in range(100)}


def test_chosen_tokens_count_for_the_penalty() -> None:
    logits = torch.tensor([1.0, 1.5, 0.0])
    assert [Sampler(Sampling(0.0, repetition_penalty=2.0), generator(1))(logits) for _ in range(2)] == [1, 1]
    draw = Sampler(Sampling(0.0, repetition_penalty=2.0), generator(1))
    assert [draw(logits) for _ in range(3)] == [1, 0, 1], "1.5 / 2 is less than 1, and more than 1 / 2"


# text


def byte_level() -> Tokenizer:
    """A tokenizer with a token for every byte, and some longer ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat", "é你好", "the other cat"] * 9, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A tokenizer like that of Llama 1: it prepends a space that decoding drops, and falls back to byte tokens."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {piece: 256 + n for n, piece in enumerate(["<unk>", "▁", "a", "b", "▁a", "▁b", "ab"])}
    model = models.BPE(vocabulary, [("▁", "a"), ("▁", "b"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
WORDS = st.lists(
    st.sampled_from(["a", " a", " b", "ab", "é", "你好", "🙂", "👩\u200d🚀", " ", "\n", "the cat "]), max_size=40
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(words=WORDS)
def test_pieces_have_whole_characters_and_join_to_the_text(kind: str, words: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode("".join(words)).ids
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.push(token) for token in tokens]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert detokenizer.finish() == ""


@given(st.lists(st.integers(0, 289), max_size=150))
def test_random_bytes_decode_to_the_text_of_decoding_them_at_once(tokens: list[int]) -> None:
    decode = TOKENIZERS["byte level"].decode
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push(token) for token in tokens)
    assert text + detokenizer.finish() == decode(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["the cat sat ", "é", "你好", "🙂", "a a b ab", "\ufffd", "a"])
def test_the_cost_of_a_token_does_not_grow(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    sizes = []

    def decode(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return str(tokenizer.decode(tokens))

    detokenizer = Detokenizer(decode)
    tokens = tokenizer.encode(text * 200).ids
    for token in tokens:
        detokenizer.push(token)
    assert max(sizes) <= 40
    assert sum(sizes) <= 40 * len(tokens)


def test_the_cost_of_a_token_does_not_grow_with_invalid_text() -> None:
    tokenizer = TOKENIZERS["byte level"]
    sizes = []

    def decode(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return str(tokenizer.decode(tokens))

    detokenizer = Detokenizer(decode)
    broken = tokenizer.encode("你").ids
    tokens = [tokenizer.token_to_id("Ł")] * 500 + broken[:1] * 500
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.finish()
    assert text == tokenizer.decode(tokens)
    assert max(sizes) <= 40


def test_tokens_without_text_do_not_push_others_out_of_the_window() -> None:
    """Decoding drops a text's first space. A window that began after "x" would lose a space of the text."""
    words = [" x", "", " y"]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    detokenizer = Detokenizer(decode)
    assert "".join(detokenizer.push(token) for token in [0, *[1] * 60, 2]) == "x y"


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Apply the definition of a stop string, one character at a time."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_no_part_of_a_stop_string_is_returned_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    stop_filter, out, stopped = StopFilter(stops), "", False
    expected = cut_at_stop("".join(pieces), stops)
    for piece in pieces:
        more, stopped = stop_filter.push(piece)
        out += more
        assert expected[0].startswith(out)
        if stopped:
            break
    else:
        out += stop_filter.finish()
    assert (out, stopped) == expected


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    stop_filter = StopFilter(["end", "stop"])
    assert stop_filter.push("the en") == ("the ", False)
    assert stop_filter.push("emy") == ("enemy", False)
    assert stop_filter.push("s") == ("", False)
    assert stop_filter.finish() == "s"


def test_memory_is_linear_in_the_length_of_a_stop_string() -> None:
    stop = "x" * 10_000 + "."
    tracemalloc.start()
    try:
        stop_filter = StopFilter([stop])
        assert stop_filter.push("y" + stop[:-1]) == ("y", False)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(stop)
    finally:
        tracemalloc.stop()
    assert stop_filter.push(".") == ("", True)


# packed layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_packed_layers_compute_what_plain_layers_compute(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Sequential(torch.nn.Linear(64, 16, bias=False)))
    model.to(dtype)
    states = torch.randn(3, 5, 48, dtype=dtype)
    plain = model(states)
    pack_linears(model, rows=4)
    units = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}  # four units in the last place, and more
    torch.testing.assert_close(model(states), plain, rtol=units[dtype], atol=units[dtype])


@torch.inference_mode()
def test_packing_reaches_every_linear_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8)))
    pack_linears(model, rows=4)
    assert not [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
