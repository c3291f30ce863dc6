"""Incremental detokenization and stop strings."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from omni_actors.stages.autoregressive.options import TextParams
from omni_actors.stages.autoregressive.text import AnswerText, Detokenizer, StopFilter, Vocabulary


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


@pytest.mark.parametrize("stop", [("你",), ()], ids=["stop string", "no stop string"])
def test_a_token_of_an_incomplete_character_is_certain_only_without_stop_strings(stop: tuple[str, ...]) -> None:
    """The character may complete a stop string, which then cuts off the text of all its tokens."""
    inner = TOKENIZERS["byte fallback"]

    def decode(tokens: Sequence[int], **options: Any) -> str:
        return inner.decode(list(tokens))

    tokenizer: Any = SimpleNamespace(
        eos_token_id=None, added_tokens_decoder={}, get_vocab=inner.get_vocab, decode=decode
    )
    answer, certain = AnswerText(Vocabulary(tokenizer, None), 1, 50, TextParams(stop=stop)), []
    for token in inner.encode("ab你").ids:
        answer.push(token)
        certain.append(answer.certain_tokens)
    assert len(certain) > 3
    assert certain[-3:] == ([certain[-4]] * 3 if stop else [answer.tokens - 2, answer.tokens - 1, answer.tokens])
    assert (answer.finish_reason == "stop") == bool(stop)


def test_ids_that_the_tokenizer_lacks_have_no_text_and_no_cost() -> None:
    """The answer has them between the tokens of a character, too."""
    inner, sizes = TOKENIZERS["byte level"], []

    def decode(tokens: Sequence[int], **options: Any) -> str:
        sizes.append(len(tokens))
        return str(inner.decode(list(tokens)))

    tokenizer: Any = SimpleNamespace(
        eos_token_id=None, added_tokens_decoder={}, get_vocab=inner.get_vocab, decode=decode
    )
    padded = inner.get_vocab_size() + 3
    tokens = [each for token in inner.encode("the 你🙂 cat").ids for each in (token, *[padded] * 50)]
    answer = AnswerText(Vocabulary(tokenizer, None, rows=2 * padded), 1, len(tokens), TextParams())
    text = "".join(answer.push(token).get("text", "") for token in tokens)
    assert text == "the 你🙂 cat"
    assert max(sizes) <= 40
