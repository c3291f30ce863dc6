"""The llm engine: what a request gives, alone and in company, from a tiny random model and from the real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.llm import open_engine
from omni_actors.stages.llm.engine import LLMEngine

CONTEXT = 96
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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


def save_tokenizer(path: Path) -> int:
    """A byte-level tokenizer with a chat template, from a corpus of a few words. Returns its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["system\n", "user\n", "assistant\n", "the fox and the sea"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.save_pretrained(path)
    return len(fast)


def save_model(path: Path, seed: int = 0, **config: Any) -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 128, "vocab_size": save_tokenizer(path)}
    # Weights far larger than usual: each step's best token is clear, and depends on everything before it.
    llama = LlamaForCausalLM(LlamaConfig(**{"initializer_range": 0.6, "eos_token_id": None, **sizes, **config}))
    llama.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def opened(path: Path | None, **options: Any) -> LLMEngine:
    options = {"max_batch": 3, "context": CONTEXT, "prefill_chunk": 7, **options}
    return open_engine(StageContext("thinker", path, options, 1, "cpu", lambda note: None))


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[LLMEngine]:
    with closing(opened(tiny)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_held(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did with the shared engine, it ends without a request in it."""
    yield
    if "engine" in request.fixturenames:
        assert_empty(request.getfixturevalue("engine"))


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
    """What came out, by request."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[str]] = {}
        self.ends: dict[int, Mapping[str, Any]] = {}

    def step(self, engine: LLMEngine) -> None:
        for output in engine.step():
            assert isinstance(output, StageOutput)
            assert output.request_id not in self.ends, "named after its end"
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


def reference(path: Path, prompt: str, max_tokens: int) -> tuple[list[int], list[int]]:
    """transformers' own greedy answer: the tokens of the prompt and of the completion."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    batch = tokenizer.apply_chat_template(user(prompt)["messages"], add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**batch, max_new_tokens=max_tokens, do_sample=False)[0].tolist()
    size = batch["input_ids"].shape[1]
    return tokens[:size], tokens[size:]


def decoded(path: Path, tokens: Sequence[int]) -> str:
    return str(AutoTokenizer.from_pretrained(path).decode(tokens, skip_special_tokens=True))


# alone


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(tiny: Path, engine: LLMEngine, prompt: str) -> None:
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
def test_prefill_in_pieces_gives_what_prefill_at_once_gives(tiny: Path, engine: LLMEngine, chunk: int) -> None:
    with closing(opened(tiny, prefill_chunk=chunk)) as other:
        for prompt in PROMPTS[:4]:
            assert answer(other, prompt, max_tokens=16) == answer(engine, prompt, max_tokens=16)


def test_one_step_prefills_one_piece_and_decodes_everyone(engine: LLMEngine) -> None:
    results = Results()
    submit(engine, 1, "x", max_tokens=80)
    while 1 not in engine_running(engine):
        results.step(engine)
    submit(engine, 2, "a " * 12, max_tokens=2)
    steps = 0
    while 2 not in results.ends:
        before = engine._running[0].answer._tokens
        results.step(engine)
        assert engine._running[0].answer._tokens == before + 1, "a long prompt stopped the others"
        steps += 1
    prompt_tokens = results.ends[2]["prompt_tokens"]
    assert steps == -(-prompt_tokens // 7), "its first two tokens come in the step of its last piece"
    engine.abort(1)


def engine_running(engine: LLMEngine) -> list[int]:
    return [request.id for request in engine._running]


def test_the_first_text_comes_before_the_others_are_decoded(engine: LLMEngine) -> None:
    submit(engine, 1, "x", max_tokens=90)
    list(engine.step())
    while engine._prefilling:
        list(engine.step())
    submit(engine, 2, "x", max_tokens=1)
    while True:
        tokens = engine._running[0].answer._tokens
        for output in engine.step():
            if output.request_id == 2:
                assert engine._running[0].answer._tokens == tokens
                break
        else:
            continue
        break
    engine.abort(1)


# in company


def test_many_give_what_each_gives_alone_joining_at_different_moments(tiny: Path) -> None:
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
    params = {"temperature": 1.5, "max_tokens": 20, **params}
    alone = [answer(engine, prompt, seed=n, **params) for n, prompt in enumerate(PROMPTS)]
    assert answer(engine, PROMPTS[0], seed=99, **params) != alone[0]
    for n, prompt in enumerate(PROMPTS):
        submit(engine, n, prompt, seed=n, **params)
    results = Results().run(engine)
    assert [(results.text(n), results.ends[n]) for n in range(len(PROMPTS))] == alone


def test_those_beyond_the_batch_wait_in_order(engine: LLMEngine) -> None:
    for n in range(5):
        submit(engine, n, PROMPTS[n], max_tokens=30 if n != 1 else 12)
    results, order = Results(), []
    while engine.busy:
        results.step(engine)
        assert len(engine._cache.lengths) <= 3
        order += [n for n in engine_running(engine) if n not in order]
    assert order == [0, 1, 2, 3, 4]
    assert list(results.ends) == [1, 0, 2, 3, 4]


SCHEDULE = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 14), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=24,
)
ALONE: dict[tuple[int, int, bool], tuple[str, Mapping[str, Any]]] = {}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=SCHEDULE)
def test_any_schedule_of_joins_aborts_and_steps_gives_what_each_gives_alone(
    engine: LLMEngine, schedule: list[tuple[Any, ...]]
) -> None:
    started: dict[int, tuple[int, int, bool]] = {}
    expected: dict[int, tuple[str, Mapping[str, Any]]] = {}
    results, live = Results(), []

    def params(which: int, length: int, sampled: bool) -> dict[str, Any]:
        return {"max_tokens": length, "temperature": 1.0 if sampled else 0.0, "seed": which}

    for act, *arguments in schedule:
        if act == "start" and (case := tuple(arguments)) not in ALONE:
            ALONE[case] = {}  # type: ignore[assignment]
    for case in [case for case, known in ALONE.items() if not known]:
        ALONE[case] = answer(engine, PROMPTS[case[0]], **params(*case))
    for act, *arguments in schedule:
        match act:
            case "start":
                case_ = (arguments[0], arguments[1], arguments[2])
                request_id = 100 + len(started)
                started[request_id], expected[request_id] = case_, ALONE[case_]
                submit(engine, request_id, PROMPTS[case_[0]], **params(*case_))
                live.append(request_id)
            case "abort" if live:
                engine.abort(live.pop(arguments[0] % len(live)))
            case "step":
                for _ in range(arguments[0] if engine.busy else 0):
                    if engine.busy:
                        results.step(engine)
        live = [request_id for request_id in live if request_id not in results.ends]
        check(engine, live)
    results.run(engine)
    for request_id, (text, end) in expected.items():
        if request_id in results.ends:
            assert (results.text(request_id), results.ends[request_id]) == (text, end)
        else:
            assert request_id not in live
            assert text.startswith(results.text(request_id))
    assert_empty(engine)


def check(engine: LLMEngine, live: list[int]) -> None:
    """The engine holds the live requests and nothing else, in rows without a hole and with nothing beyond their end."""
    assert sorted(engine._requests) == sorted(live)
    holders = [*engine._running, *([engine._prefilling] if engine._prefilling else [])]
    assert len(engine._cache.lengths) == len(holders)
    assert sorted(r.id for r in [*holders, *engine._waiting]) == sorted(live)
    for store in (*engine._cache._keys, *engine._cache._values):
        for row in range(len(store)):
            length = engine._cache.lengths[row] if row < len(holders) else 0
            assert not store[row, :, length:].any()
