"""The llm engine with one request at a time, against transformers."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from omni_actors.stages.base import StageOutput
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import (
    PROMPTS,
    Results,
    answer,
    answered,
    assert_empty,
    decoded,
    engine_running,
    opened,
    reference,
    running,
    submit,
)
from tiny_models.llama import save_model

pytestmark = pytest.mark.usefixtures("clear_choices")


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
        before = running(engine)[0].answer.tokens
        results.step(engine)
        assert running(engine)[0].answer.tokens == before + 1, "a long prompt stopped the others"
        steps += 1
    prompt_tokens = results.ends[2]["prompt_tokens"]
    assert steps == -(-prompt_tokens // 7), "its first two tokens come in the step of its last chunk"
    engine.abort(1)


def test_the_first_token_of_a_request_is_put_out_before_the_others_are_decoded(engine: LLMEngine) -> None:
    submit(engine, 1, "x", max_tokens=80)
    while 1 not in engine_running(engine):
        list(engine.step())
    submit(engine, 2, "x", max_tokens=1)
    while True:
        tokens = running(engine)[0].answer.tokens
        if first := [output for output in engine.step() if seen_before(output, 2, engine, tokens)]:
            break
    assert first[0].last
    engine.abort(1)


def seen_before(output: StageOutput, request_id: int, engine: LLMEngine, tokens: int) -> bool:
    """Whether the output is of ``request_id``, and came while the first running request still had ``tokens`` tokens."""
    if output.request_id != request_id:
        return False
    assert running(engine)[0].answer.tokens == tokens
    return True
