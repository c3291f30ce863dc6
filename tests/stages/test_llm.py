"""The llm engine: one request and several in a batch, on a tiny random model and on a real one."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from omni_actors.stages.autoregressive.options import TextParams
from omni_actors.stages.autoregressive.text import Answer, Vocabulary
from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.llm.engine import LLMEngine, open_engine
from tests.support.clear_choices import patched_choices
from tiny_models.llama import save_model, save_tokenizer

pytestmark = pytest.mark.usefixtures("clear_choices")

CONTEXT = 96
PROMPTS = [
    "hello",
    "what is this?",
    "the quick brown fox jumps over the lazy dog",
    "你好",
    "a " * 12,
    "Why?",
    "tell me about the sea, and the ships on it",
    "0123456789",
    "x",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def opened(path: Path | None, **options: Any) -> LLMEngine:
    options = {"max_batch": 3, "context": CONTEXT, "prefill_chunk": 7, **options}
    return open_engine(StageContext("thinker", path, options, 1, "cpu", lambda note: None))


@pytest.fixture(scope="module")
def shared_tiny(tiny: Path) -> Iterator[LLMEngine]:
    with closing(opened(tiny)) as engine:
        yield engine


@pytest.fixture
def engine(shared_tiny: LLMEngine) -> Iterator[LLMEngine]:
    """The tiny model's engine. A test that leaves a request in it fails; the fixture then removes the request."""
    yield shared_tiny
    left = list(shared_tiny._requests)
    for request_id in left:
        shared_tiny.abort(request_id)
    assert not left
    assert_empty(shared_tiny)


def assert_empty(engine: LLMEngine) -> None:
    assert not engine.busy
    assert not engine._requests
    assert engine._cache.lengths == []
    assert engine._cache._keys == []


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def submit(engine: LLMEngine, request_id: int, prompt: str, **params: Any) -> None:
    engine.start(StageRequest(request_id, (CLIENT,), params))
    engine.feed(request_id, Chunk(CLIENT, 0, True, {}, user(prompt)))


class Results:
    """The outputs of an engine, by request."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[str]] = {}
        self.ends: dict[int, Mapping[str, Any]] = {}
        self.failed: dict[int, InvalidRequest] = {}

    def step(self, engine: LLMEngine) -> None:
        for output in engine.step():
            assert output.request_id not in {*self.ends, *self.failed}, "named after its end"
            if not isinstance(output, StageOutput):
                self.failed[output.request_id] = output.error
                continue
            self.pieces.setdefault(output.request_id, []).append(output.data["text"])
            if output.last:
                self.ends[output.request_id] = output.data

    def run(self, engine: LLMEngine) -> Results:
        while engine.busy:
            self.step(engine)
        return self

    def text(self, request_id: int) -> str:
        return "".join(self.pieces.get(request_id, []))


def answer(engine: LLMEngine, prompt: str, **params: Any) -> tuple[str, Mapping[str, Any]]:
    submit(engine, 0, prompt, **params)
    results = Results().run(engine)
    return results.text(0), results.ends[0]


@functools.cache
def answered(engine: LLMEngine, prompt: str, max_tokens: int) -> tuple[str, Mapping[str, Any]]:
    """Return the greedy ``answer``, computed once, to compare with."""
    return answer(engine, prompt, max_tokens=max_tokens)


@functools.cache
def transformers_of(path: Path) -> tuple[Any, Any]:
    """The tokenizer and the model of a checkpoint, loaded at the first call."""
    return AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)


def reference(path: Path, prompt: str, max_tokens: int) -> tuple[list[int], list[int]]:
    """transformers' own greedy answer: the tokens of the prompt and of the completion."""
    tokenizer, model = transformers_of(path)
    batch = tokenizer.apply_chat_template(user(prompt)["messages"], add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**batch, max_new_tokens=max_tokens, do_sample=False)[0].tolist()
    size = batch["input_ids"].shape[1]
    return tokens[:size], tokens[size:]


def decoded(path: Path, tokens: Sequence[int]) -> str:
    return str(transformers_of(path)[0].decode(tokens, skip_special_tokens=True))


# one request


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_that_of_transformers(tiny: Path, engine: LLMEngine, prompt: str) -> None:
    before, after = reference(tiny, prompt, 24)
    text, end = answer(engine, prompt, max_tokens=24)
    assert text == decoded(tiny, after)
    assert end["prompt_tokens"] == len(before)
    assert end["completion_tokens"] == len(after) == 24
    assert end["finish_reason"] == "length"


def test_an_end_token_ends_the_answer_and_is_counted(tmp_path: Path) -> None:
    save_model(tmp_path)
    _, after = reference(tmp_path, PROMPTS[0], 24)
    end_token = after[9]
    first = after.index(end_token)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [299, end_token]}))
    with closing(opened(tmp_path)) as engine:
        text, end = answer(engine, PROMPTS[0], max_tokens=24)
        assert text == decoded(tmp_path, after[:first])
        assert end["completion_tokens"] == first + 1
        assert end["finish_reason"] == "stop"
        assert_empty(engine)


@pytest.mark.parametrize("chunk", [1, 2, 13, 1000])
def test_chunked_prefill_gives_the_same_answer_as_one_prefill(tiny: Path, engine: LLMEngine, chunk: int) -> None:
    with closing(opened(tiny, prefill_chunk=chunk)) as other:
        for prompt in PROMPTS[:4]:
            assert answer(other, prompt, max_tokens=8) == answered(engine, prompt, 8)


def test_one_step_prefills_one_chunk_and_decodes_all_rows(engine: LLMEngine) -> None:
    results = Results()
    submit(engine, 1, "x", max_tokens=80)
    while 1 not in engine_running(engine):
        results.step(engine)
    submit(engine, 2, "a " * 12, max_tokens=2)
    steps = 0
    while 2 not in results.ends:
        before = running(engine)[0].answer._tokens
        results.step(engine)
        assert running(engine)[0].answer._tokens == before + 1, "a long prompt stopped the others"
        steps += 1
    prompt_tokens = results.ends[2]["prompt_tokens"]
    assert steps == -(-prompt_tokens // 7), "its first two tokens come in the step of its last chunk"
    engine.abort(1)


def running(engine: LLMEngine) -> list[Any]:
    """The requests whose prompt is prefilled, by row."""
    return [request for request in engine._scheduler.rows if not request.prefill_left]


def engine_running(engine: LLMEngine) -> list[int]:
    return [request.id for request in running(engine)]


def test_the_first_token_of_a_request_is_put_out_before_the_others_are_decoded(engine: LLMEngine) -> None:
    submit(engine, 1, "x", max_tokens=80)
    while 1 not in engine_running(engine):
        list(engine.step())
    submit(engine, 2, "x", max_tokens=1)
    while True:
        tokens = running(engine)[0].answer._tokens
        if first := [output for output in engine.step() if seen_before(output, 2, engine, tokens)]:
            break
    assert first[0].last
    engine.abort(1)


def seen_before(output: StageOutput, request_id: int, engine: LLMEngine, tokens: int) -> bool:
    """Whether the output is of ``request_id``, and came while the first running request still had ``tokens`` tokens."""
    if output.request_id != request_id:
        return False
    assert running(engine)[0].answer._tokens == tokens
    return True


# several requests


def test_requests_that_join_at_different_times_give_what_each_gives_alone(tiny: Path) -> None:
    with closing(opened(tiny, max_batch=8)) as engine:
        lengths = [30, 5, 17, 26, 9, 40, 1, 22, 33]
        alone = [answer(engine, p, max_tokens=n) for p, n in zip(PROMPTS, lengths, strict=True)]
        results = Results()
        for number, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
            submit(engine, number, prompt, max_tokens=length)
            for _ in range(number % 4):
                results.step(engine)
        results.run(engine)
        assert [(results.text(n), results.ends[n]) for n in range(len(PROMPTS))] == alone
        assert_empty(engine)


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}])
def test_a_seeded_sample_is_the_same_alone_and_in_a_batch(engine: LLMEngine, params: dict[str, Any]) -> None:
    params = {"temperature": 1.5, "max_tokens": 12, **params}
    prompts = PROMPTS[:5]
    alone = [answer(engine, prompt, seed=n, **params) for n, prompt in enumerate(prompts)]
    assert answer(engine, prompts[0], seed=99, **params) != alone[0]
    for n, prompt in enumerate(prompts):
        submit(engine, n, prompt, seed=n, **params)
    results = Results().run(engine)
    assert [(results.text(n), results.ends[n]) for n in range(len(prompts))] == alone


@pytest.mark.parametrize("context", [CONTEXT, 2])
def test_warming_up_runs_the_model_and_leaves_nothing(
    tiny: Path, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a context that holds no question."""
    with closing(opened(tiny, context=context)) as engine:
        counts: list[int] = []
        forward = engine._forward

        def counted(rows: list[int], count: int) -> Any:
            counts.append(count)
            return forward(rows, count)

        monkeypatch.setattr(engine, "_forward", counted)
        engine.warm_up()
        assert_empty(engine)
        assert counts[-1:] == ([] if context == 2 else [1]), "a prompt, then one more token"


def test_several_requests_that_end_in_one_step_do_not_change_the_others(tiny: Path) -> None:
    with closing(opened(tiny, max_batch=5, prefill_chunk=100)) as engine:
        lengths = [12, 11, 30, 9, 30]  # each joins a step after the one before, so 0, 1 and 3 end together
        expected = [answer(engine, prompt, max_tokens=n) for prompt, n in zip(PROMPTS, lengths, strict=False)]
        results = Results()
        for number, length in enumerate(lengths):
            submit(engine, number, PROMPTS[number], max_tokens=length)
            results.step(engine)
        while not results.ends:
            results.step(engine)
        assert list(results.ends) == [0, 1, 3]
        check(engine, {2, 4})
        results.run(engine)
        assert [(results.text(n), results.ends[n]) for n in range(5)] == expected


def test_requests_beyond_the_batch_wait_in_order(engine: LLMEngine) -> None:
    for n in range(5):
        submit(engine, n, PROMPTS[n], max_tokens=30 if n != 1 else 12)
    results, order = Results(), []
    while engine.busy:
        results.step(engine)
        assert len(engine._cache.lengths) <= 3
        order += [n for n in engine_running(engine) if n not in order]
    assert order == [0, 1, 2, 3, 4]
    assert list(results.ends) == [1, 0, 2, 3, 4]


Case = tuple[int, int, bool]
"""The number of the prompt, the number of tokens, and whether they are sampled."""
CASES = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 14), st.booleans())
SCHEDULE = st.lists(
    st.one_of(
        st.tuples(st.just("start"), CASES),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=24,
)
ALONE: dict[Case, tuple[str, Mapping[str, Any]]] = {}


def submit_case(engine: LLMEngine, request_id: int, case: Case) -> None:
    which, length, sampled = case
    submit(engine, request_id, PROMPTS[which], max_tokens=length, temperature=float(sampled), seed=which)


def alone(engine: LLMEngine, case: Case) -> tuple[str, Mapping[str, Any]]:
    if case not in ALONE:
        submit_case(engine, 0, case)
        results = Results().run(engine)
        ALONE[case] = (results.text(0), results.ends[0])
    return ALONE[case]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=SCHEDULE)
def test_any_schedule_of_joins_aborts_and_steps_gives_what_each_gives_alone(
    engine: LLMEngine, schedule: list[tuple[str, Any]]
) -> None:
    cases = [argument for act, argument in schedule if act == "start"]
    expected = [alone(engine, case) for case in cases]
    results, live, started = Results(), set[int](), 0
    for act, argument in schedule:
        if act == "start":
            submit_case(engine, started, argument)
            live.add(started)
            started += 1
        elif act == "abort" and live:
            gone = sorted(live)[argument % len(live)]
            engine.abort(gone)
            live.remove(gone)
        elif act == "step":
            for _ in range(argument):
                if engine.busy:
                    results.step(engine)
        live -= results.ends.keys()
        check(engine, live)
    results.run(engine)
    assert live <= results.ends.keys()
    for request_id, (text, end) in enumerate(expected):
        assert text.startswith(results.text(request_id))
        if request_id in results.ends:
            assert (results.text(request_id), results.ends[request_id]) == (text, end)
    assert_empty(engine)


def check(engine: LLMEngine, live: set[int]) -> None:
    """The engine holds the live requests only, in consecutive rows that are zero beyond their length."""
    assert sorted(engine._requests) == sorted(live)
    holders = engine._scheduler.rows
    assert len(engine._cache.lengths) == len(holders)
    assert sorted(r.id for r in [*holders, *engine._scheduler._waiting]) == sorted(live)
    for store in (*engine._cache._keys, *engine._cache._values):
        for row in range(len(store)):
            length = engine._cache.lengths[row] if row < len(holders) else 0
            assert not store[row, :, length:].any()


@pytest.mark.parametrize("place", ["first row", "middle row", "last row", "prefilling", "waiting", "collecting"])
def test_abort_in_any_state_frees_the_request_and_changes_no_other(engine: LLMEngine, place: str) -> None:
    expected = {n: answered(engine, PROMPTS[n], 25) for n in (0, 1, 2, 6)}
    results = Results()
    rows = 3 if place in ("first row", "middle row", "last row", "waiting") else 2
    for n in range(rows):
        submit(engine, n, PROMPTS[n], max_tokens=25)
    while len(running(engine)) < rows:
        results.step(engine)
    submit(engine, 6, PROMPTS[6], max_tokens=25)
    if place == "prefilling":
        results.step(engine)
        assert len(running(engine)) < len(engine._scheduler.rows)
    if place == "collecting":
        engine.start(StageRequest(7, (CLIENT, "ear"), {}))
        engine.feed(7, Chunk(CLIENT, 0, True, {}, user("hello")))
    victim = {"first row": 0, "middle row": 1, "last row": 2, "prefilling": 6, "waiting": 6, "collecting": 7}[place]
    engine.abort(victim)
    check(engine, {*range(rows), 6} - {victim})
    results.run(engine)
    assert victim not in results.ends
    for n in {*range(rows), 6} - {victim}:
        assert (results.text(n), results.ends[n]) == expected[n]


@pytest.mark.parametrize("victim", [0, 1])
def test_abort_while_another_prefills_moves_its_row_too(engine: LLMEngine, victim: int) -> None:
    expected = {n: answered(engine, PROMPTS[n], 25) for n in (0, 1, 6)}
    results = Results()
    for n in (0, 1):
        submit(engine, n, PROMPTS[n], max_tokens=25)
    while len(running(engine)) < 2:
        results.step(engine)
    submit(engine, 6, PROMPTS[6], max_tokens=25)
    results.step(engine)
    assert len(running(engine)) < len(engine._scheduler.rows)
    engine.abort(victim)
    check(engine, {0, 1, 6} - {victim})
    results.run(engine)
    for n in {0, 1, 6} - {victim}:
        assert (results.text(n), results.ends[n]) == expected[n]


def test_a_request_that_computes_nan_changes_no_other(engine: LLMEngine) -> None:
    expected = answer(engine, PROMPTS[1], max_tokens=30)
    results = Results()
    submit(engine, 1, PROMPTS[0], max_tokens=10)
    submit(engine, 2, PROMPTS[1], max_tokens=30)
    while len(running(engine)) < 2:
        results.step(engine)
    with torch.inference_mode():
        for store in (*engine._cache._keys, *engine._cache._values):
            store[0, :, : engine._cache.lengths[0]] = torch.nan
    results.run(engine)
    assert results.failed[1].code == "output_not_finite"
    assert (results.text(2), results.ends[2]) == expected
    assert answer(engine, PROMPTS[1], max_tokens=30) == expected


# the end of the text


@pytest.mark.parametrize("start", range(0, 12, 3))
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_stop_string_cuts_the_text_wherever_tokens_end(engine: LLMEngine, start: int, size: int) -> None:
    full, _ = answered(engine, PROMPTS[2], 30)
    stop = full[start : start + size]
    submit(engine, 0, PROMPTS[2], max_tokens=30, stop=(stop, "never said"))
    results = Results().run(engine)
    assert results.text(0) == full[: full.index(stop)]
    assert results.ends[0]["finish_reason"] == "stop"
    assert results.ends[0]["completion_tokens"] <= 30


def test_text_held_for_a_stop_string_comes_at_the_end(engine: LLMEngine) -> None:
    full, _ = answer(engine, PROMPTS[2], max_tokens=12)
    text, end = answer(engine, PROMPTS[2], max_tokens=12, stop=(full[-3:] + "!",))
    assert text == full
    assert end["text"] == full[-3:]
    assert end["finish_reason"] == "length"


def save_chain(path: Path, script: Sequence[str]) -> None:
    """Save a model that answers any prompt with these tokens, which must be distinct: each maps to the next one."""
    size = save_tokenizer(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    last = tokenizer.apply_chat_template(user("x")["messages"], add_generation_prompt=True, return_dict=False)[-1]
    chain = [last, *tokenizer.convert_tokens_to_ids(list(script))]
    assert len(set(chain)) == len(chain)
    assert None not in chain
    width = size + size % 2
    sizes = {"vocab_size": size, "hidden_size": width, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, intermediate_size=8, max_position_embeddings=128, eos_token_id=None)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight[chain[1:], chain[:-1]] = 1
    model.save_pretrained(path)


def byte_tokens(text: str) -> list[str]:
    """The tokens of the single bytes of a text."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return list(letters[0][0])


def test_a_character_of_several_tokens_is_put_out_whole(tmp_path: Path) -> None:
    script = byte_tokens("é🙂 你")
    assert len(script) == 10
    save_chain(tmp_path, script)
    with closing(opened(tmp_path)) as engine:
        submit(engine, 0, "x", max_tokens=10)
        results = Results().run(engine)
        assert [piece for piece in results.pieces[0] if piece] == ["é", "🙂", " ", "你"]
        assert answer(engine, "x", max_tokens=9)[0] == "é🙂 \ufffd"
        assert answer(engine, "x", max_tokens=10, stop=("🙂",))[0] == "é"
        assert answer(engine, "x", max_tokens=10, stop=("\ufffd", " 你!"))[0] == "é🙂 你"
        text, end = answer(engine, "x", max_tokens=9, stop=("\ufffd",))
        assert (text, end["finish_reason"], end["completion_tokens"]) == ("é🙂 ", "stop", 9)


def test_special_tokens_are_counted_and_not_shown(tmp_path: Path) -> None:
    save_chain(tmp_path, ["a", "<|im_start|>", "b", "<|im_end|>"])
    with closing(opened(tmp_path)) as engine:
        text, end = answer(engine, "x", max_tokens=10)
        assert (text, end["finish_reason"], end["completion_tokens"]) == ("ab", "stop", 4)


def test_ignore_eos_continues_after_the_end_token(tmp_path: Path) -> None:
    save_chain(tmp_path, ["a", "<|im_end|>", "b", "c"])
    with closing(opened(tmp_path)) as engine:
        text, end = answer(engine, "x", max_tokens=4, ignore_eos=True)
        assert (text, end["finish_reason"], end["completion_tokens"]) == ("abc", "length", 4)


def test_a_stop_token_ends_the_answer_and_is_not_shown(tmp_path: Path) -> None:
    save_chain(tmp_path, ["a", "b", "c"])
    stop = AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("b")
    with closing(opened(tmp_path)) as engine:
        text, end = answer(engine, "x", max_tokens=3, stop_token_ids=(stop,))
        assert (text, end["finish_reason"], end["completion_tokens"]) == ("a", "stop", 2)


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 1), (3, 5)])
def test_no_end_token_is_chosen_before_min_tokens(tmp_path: Path, min_tokens: int, count: int) -> None:
    """The model leaves its script with the first other token, and does not return to it."""
    save_chain(tmp_path, ["<|im_end|>"])
    with closing(opened(tmp_path)) as engine:
        _, end = answer(engine, "x", max_tokens=5, min_tokens=min_tokens)
        assert end["completion_tokens"] == count


def test_special_tokens_are_shown_on_request(tmp_path: Path) -> None:
    save_chain(tmp_path, ["a", "<|im_start|>", "b", "<|im_end|>"])
    with closing(opened(tmp_path)) as engine:
        assert answer(engine, "x", max_tokens=10, skip_special_tokens=False)[0] == "a<|im_start|>b"


def test_special_tokens_are_not_passed_to_the_decoder(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    decoded_tokens: list[Sequence[int]] = []
    vocabulary = Vocabulary(tokenizer, None)
    vocabulary.decode = lambda tokens, **_: decoded_tokens.append(tuple(tokens)) or "a"  # type: ignore[method-assign, func-returns-value]
    reply = Answer(vocabulary, 1, 1000, TextParams())
    for token in [special] * 100 + tokenizer.encode("a") + [special] * 100:
        reply.push(token)
    assert decoded_tokens == [tuple(tokenizer.encode("a"))]


def test_an_answer_that_ends_at_once_is_empty(tmp_path: Path) -> None:
    save_chain(tmp_path, ["<|im_end|>"])
    with closing(opened(tmp_path)) as engine:
        submit(engine, 0, "x", max_tokens=10)
        results = Results().run(engine)
        assert results.pieces[0] == [""]
        assert (results.ends[0]["finish_reason"], results.ends[0]["completion_tokens"]) == ("stop", 1)
        assert_empty(engine)


def test_max_tokens_is_limited_to_the_rest_of_the_context(tiny: Path, engine: LLMEngine) -> None:
    text, end = answer(engine, "hello", max_tokens=1000)
    assert end["prompt_tokens"] + end["completion_tokens"] == CONTEXT
    assert end["finish_reason"] == "length"
    _, after = reference(tiny, "hello", end["completion_tokens"])
    assert text == decoded(tiny, after)


def test_a_prompt_may_fill_the_context_except_for_one_token(tiny: Path) -> None:
    size = len(reference(tiny, "hello", 1)[0])
    with closing(opened(tiny, context=size + 1)) as engine:
        assert answer(engine, "hello")[1]["completion_tokens"] == 1
        engine.start(StageRequest(1, (CLIENT,), {}))
        with pytest.raises(InvalidRequest) as refusal:
            engine.feed(1, Chunk(CLIENT, 0, True, {}, user("hello!")))
        assert refusal.value.param == "messages"
        assert refusal.value.code == "context_length_exceeded"
        assert f"prompt has {size + 1} tokens" in refusal.value.message
        assert f"holds {size + 1}" in refusal.value.message
        assert_empty(engine)


def refused(engine: LLMEngine, messages: Sequence[Any]) -> str:
    engine.start(StageRequest(1, (CLIENT,), {}))
    with pytest.raises(InvalidRequest) as refusal:
        engine.feed(1, Chunk(CLIENT, 0, True, {}, {"messages": messages}))
    assert (refusal.value.param, refusal.value.code) == ("messages", "context_length_exceeded")
    assert_empty(engine)
    return refusal.value.message


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = len("<|im_start|>")
    frame = len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
    room = longest * (CONTEXT - 1) - frame
    fits = {"role": "user", "content": "a" * room}
    assert re.search(r"prompt has \d+ tokens and", refused(engine, [fits])), "it was tokenized"
    monkeypatch.setattr(engine, "_tokenizer", AutoTokenizer.from_pretrained(engine._tokenizer.name_or_path))
    monkeypatch.setattr(engine._tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    message = refused(engine, [{"role": "user", "content": "a" * (room + 1)}])
    assert f"{longest * (CONTEXT - 1) + 1} characters, which are at least {CONTEXT} tokens" in message
    assert f"holds {CONTEXT}" in message


def test_the_longest_prompt_that_fits_is_not_refused(engine: LLMEngine) -> None:
    """The prompt consists of the longest token, apart from the template."""
    frame = len(engine._tokenizer.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))
    prompt = "<|im_start|>" * (CONTEXT - 1 - frame)
    assert answer(engine, prompt)[1]["prompt_tokens"] == CONTEXT - 1


def test_more_messages_than_tokens_are_refused_before_they_are_rendered(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_tokenizer", None)
    message = refused(engine, [{"role": "user", "content": ""}] * CONTEXT)
    assert f"prompt has {CONTEXT} messages" in message
    assert f"holds {CONTEXT}" in message


# the prompt


def rendered_prompt(
    engine: LLMEngine, content: Any, chunks: Sequence[dict[str, Any]], messages: Sequence[Any] = ()
) -> str:
    """Return the prompt's text for a conversation with audio and the chunks of its transcripts."""
    engine.start(StageRequest(0, (CLIENT, "ear"), {"max_tokens": 1}))
    data = {"messages": [*messages, {"role": "user", "content": content}]}
    engine.feed(0, Chunk(CLIENT, 0, True, {}, data))
    for number, chunk in enumerate(chunks):
        assert not engine.busy
        engine.feed(0, Chunk("ear", number, number == len(chunks) - 1, {}, chunk))
    prompt = str(engine._tokenizer.decode(engine._scheduler._waiting[0].pending_prompt))
    engine.abort(0)
    return prompt


def test_transcripts_replace_audio_parts(engine: LLMEngine) -> None:
    content = [{"type": "audio", "index": 1}, {"type": "text", "text": "and"}, {"type": "audio", "index": 0}]
    chunks = [{"text": " the", "index": 0}, {"text": " sea", "index": 1}, {"text": " fox ", "index": 0}, {}]
    assert rendered_prompt(engine, content, chunks) == (
        "<|im_start|>user\nsea\nand\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    )


def test_decoding_begins_when_every_source_has_ended_in_any_order(engine: LLMEngine) -> None:
    engine.start(StageRequest(0, (CLIENT, "ear"), {"max_tokens": 5}))
    engine.feed(0, Chunk("ear", 0, True, {}, {"text": "hello", "index": 0}))
    assert not engine.busy
    audio = {"messages": [{"role": "user", "content": [{"type": "audio", "index": 0}]}]}
    engine.feed(0, Chunk(CLIENT, 0, True, {}, audio))
    assert engine.busy
    results = Results().run(engine)
    assert (results.text(0), results.ends[0]) == answer(engine, "hello", max_tokens=5)


def test_the_system_prompt_is_used_for_conversations_without_one(tiny: Path) -> None:
    with closing(opened(tiny, system_prompt="be brief")) as engine:
        text = rendered_prompt(engine, "hi", [{"text": ""}])
        assert text == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        text = rendered_prompt(engine, "hi", [{"text": ""}], [{"role": "system", "content": "rhyme"}])
        assert text == "<|im_start|>system\nrhyme<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": " \n"}], "messages"),
        ([{"role": "system", "content": "be brief"}, {"role": "user", "content": []}], "messages"),
        ([{"role": "user", "content": [{"type": "audio", "index": 0}]}], "messages"),
        ("hello", "messages"),
        ([{"role": "ghost", "content": "hello"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "video", "index": 0}]}], "messages"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0].type"),
        ([{"role": "user"}], "messages[0]"),
    ],
)
def test_an_invalid_prompt_is_refused(engine: LLMEngine, messages: Any, param: str) -> None:
    engine.start(StageRequest(0, (CLIENT,), {}))
    with pytest.raises(InvalidRequest) as refusal:
        engine.feed(0, Chunk(CLIENT, 0, True, {}, {"messages": messages}))
    assert refusal.value.param == param
    assert_empty(engine)


def test_an_empty_transcript_is_an_empty_prompt(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        rendered_prompt(engine, [{"type": "audio", "index": 0}], [{"text": " ", "index": 0}])


def test_a_conversation_that_the_chat_template_refuses_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with closing(opened(tmp_path)) as engine:
        engine.start(StageRequest(0, (CLIENT,), {}))
        with pytest.raises(InvalidRequest, match="roles must alternate") as refusal:
            engine.feed(0, Chunk(CLIENT, 0, True, {}, user("hello")))
        assert refusal.value.param == "messages"
        assert_empty(engine)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": "a"}, "stop"),
        ({"stop": ["a", "b" * 257]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"voice": "low"}, None),
    ],
)
def test_parameters_are_validated_in_start(engine: LLMEngine, params: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        engine.start(StageRequest(0, (CLIENT,), params))
    assert refusal.value.param == param
    assert_empty(engine)


# opening


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"context": 129}, "found 129; the model has 128"),
        ({}, {"dtype": "int8"}, "'int8'"),
        ({}, {"dtype": "nonsense"}, "'nonsense'"),
        ({"sliding_window": 50}, {}, "window 50"),
        ({"layer_types": ["full_attention", "linear_attention"]}, {}, "linear_attention"),
    ],
)
def test_a_model_or_option_that_would_give_wrong_results_is_refused(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    save_model(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **options)


def test_a_checkpoint_needs_a_chat_template(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        opened(tmp_path)


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'thinker': the llm engine needs a model"):
        opened(None)


def test_a_model_of_another_structure_and_dtype_works_too(tmp_path: Path) -> None:
    """Tied embeddings, biases, one key-value head and bfloat16, which Llama models do not have."""
    save_model(tmp_path, num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    _, after = reference(tmp_path, PROMPTS[0], 20)
    with closing(opened(tmp_path)) as engine:
        assert answer(engine, PROMPTS[0], max_tokens=20)[0] == decoded(tmp_path, after)
    with closing(opened(tmp_path, dtype="bfloat16")) as engine, patched_choices(strict=False):  # its logits do tie
        assert answer(engine, PROMPTS[0], max_tokens=20)[1]["completion_tokens"] == 20


# the real model


@pytest.fixture(scope="module")
def real(open_stage: Callable[..., LLMEngine], smollm2: Path) -> Iterator[LLMEngine]:
    """The real model with default options: 8 requests in a batch."""
    with closing(open_stage("llm", smollm2)) as engine:
        yield engine


QUESTIONS = [
    "Why is the sky blue?",
    "Tell me a story about the sea.",
    "Write a poem about autumn leaves.",
    "How do I bake bread?",
    "Explain what a prime number is.",
    "What are the planets of the solar system, in order?",
    "Who wrote Hamlet?",
    "What is the capital of France?",
]
"""Those with the shortest answers come last, so that all are in the batch when the last one joins it."""


@pytest.mark.voice
def test_the_capital_of_france_is_paris(real: LLMEngine) -> None:
    text, end = answer(real, QUESTIONS[-1], max_tokens=32)
    assert "Paris" in text
    assert end["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.voice
def test_the_real_model_gives_the_same_answers_alone_and_in_a_batch(real: LLMEngine) -> None:
    """Greedy and sampled requests alternate. When all have joined, those in every other row end before the rest."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 12},
    ]
    lengths = [10 - number + 3 * (number % 2) for number in range(len(QUESTIONS))]
    asks = [(QUESTIONS[n], {"max_tokens": length, **ways[n % 2]}) for n, length in enumerate(lengths)]
    alone = [answer(real, question, **params)[0] for question, params in asks]
    results = Results()
    for number, (question, params) in enumerate(asks):
        submit(real, number, question, **params)
        results.step(real)
    assert engine_running(real) == list(range(len(asks))), "all at once"
    results.run(real)
    assert [results.text(number) for number in range(len(asks))] == alone
    assert_empty(real)
