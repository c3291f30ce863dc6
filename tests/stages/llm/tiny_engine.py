"""Requests to an llm engine on a tiny random model, their results, and transformers' answers to the same prompts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest, StageOutput, StageRequest
from omni_actors.stages.llm.engine import LLMEngine, open_engine
from tests.support.stage_context import stage_context

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


def opened(path: Path | None, **options: Any) -> LLMEngine:
    options = {"max_batch": 3, "context": CONTEXT, "prefill_chunk": 7, **options}
    return open_engine(stage_context(options, stage="thinker", model=path))


def assert_empty(engine: LLMEngine) -> None:
    assert not engine.busy
    assert not engine._requests
    assert engine._cache.lengths == []
    assert engine._cache._keys == []


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def submit(engine: LLMEngine, request_id: int, prompt: str, **params: Any) -> None:
    engine.start(StageRequest(request_id, (CLIENT,), params))
    engine.feed(request_id, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data=user(prompt)))


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


def running(engine: LLMEngine) -> list[Any]:
    """The requests whose prompt is prefilled, by row."""
    return [request for request in engine._scheduler.rows if not request.prefill_left]


def engine_running(engine: LLMEngine) -> list[int]:
    return [request.id for request in running(engine)]


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
