"""The llm engine goes on behind the tokens that an earlier incarnation decided, in forwards of a prefill."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import msgspec
import pytest
from torch import Tensor

from omni_actors.stages import base
from omni_actors.stages.autoregressive import language
from omni_actors.stages.autoregressive.sampling import Sampler
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.resumed_answers import PARAMS, SAMPLED, answer, check_every_cut, decisions, submit
from tests.stages.llm.tiny_engine import PROMPTS, answered, check
from tests.support.clear_choices import clear_choose
from tests.support.engine_driver import Driver
from tests.support.forwards import record_forwards

pytestmark = pytest.mark.usefixtures("clear_choices")

PREFILL = 7
"""Positions in each prefill chunk of the engine."""


@pytest.fixture
def driver(drive: Callable[..., Driver], engine: LLMEngine) -> Driver:
    return drive(engine)


@pytest.fixture
def forwards(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of each forward."""
    return record_forwards(engine, monkeypatch)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(params, id=name, marks=pytest.mark.slow if name in ("greedy", "penalised") else ())
        for name, params in PARAMS.items()
    ],
)
def test_an_answer_is_the_same_wherever_it_is_resumed(driver: Driver, params: dict[str, Any]) -> None:
    expected = check_every_cut(driver, PROMPTS[2], **params)
    assert expected[-1].data["completion_tokens"] >= params.get("min_tokens", 1)


def test_tokens_without_text_are_declared_every_now_and_then(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the text waits, because it may become a stop string."""
    monkeypatch.setattr(base, "MOST_UNDECLARED", 4)
    (only,) = answer(driver, PROMPTS[2], max_tokens=1, logit_bias={"40": 100})
    text = only.data["text"]
    params = {"max_tokens": 11, "logit_bias": {"40": 100}, "stop": (12 * text,)}
    expected = check_every_cut(driver, PROMPTS[2], **params)
    assert [len(each.decisions) for each in expected] == [4, 4, 3]
    assert [each.data.get("text", "") for each in expected] == ["", "", 11 * text]


@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 8)), 3])
def test_a_stop_string_may_begin_in_the_decided_part(driver: Driver, engine: LLMEngine, size: int) -> None:
    full, _ = answered(engine, PROMPTS[2], 20)
    for start in range(4, len(full) - size, 5):
        stop = full[start : start + size]
        outputs = check_every_cut(driver, PROMPTS[2], max_tokens=20, stop=(stop,))
        assert "".join(output.data["text"] for output in outputs) == full[: full.index(stop)]


@pytest.mark.parametrize("params", [{"max_tokens": 40}, {**SAMPLED, "max_tokens": 40}], ids=["greedy", "sampled"])
def test_decided_tokens_are_followed_even_if_they_are_not_what_the_engine_would_choose(
    driver: Driver, params: dict[str, Any]
) -> None:
    tokens = [token for decided in decisions(answer(driver, PROMPTS[6], max_tokens=18)) for token in decided]
    forced = iter(tokens)

    def follow(logits: Tensor, samplers: Sequence[Sampler | None]) -> list[int | None]:
        if (token := next(forced, None)) is None:
            return clear_choose(logits, samplers)
        if samplers[0]:
            samplers[0].replay(token)
        return [token]

    with mock.patch.object(language, "choose", follow):
        expected = answer(driver, PROMPTS[2], **params)
    assert expected != answer(driver, PROMPTS[2], **params)
    cut, decided = 0, 0
    while decided < len(tokens):
        decided += len(expected[cut].decisions)
        cut += 1
    assert decided == len(tokens)
    assert answer(driver, PROMPTS[2], decisions(expected[:cut]), **params) == expected


@pytest.mark.parametrize("size", [1, 2, 8, 30])
def test_a_journal_costs_the_forwards_of_a_prefill(driver: Driver, forwards: list[int], size: int) -> None:
    expected = answer(driver, PROMPTS[2], max_tokens=40)
    prompt = forwards.index(1)  # the prompt's forwards; none of them has one position
    undisturbed = len(forwards)
    forwards.clear()
    journal = decisions(expected[:size])
    assert answer(driver, PROMPTS[2], journal, max_tokens=40) == expected
    decided = sum(map(len, journal))
    replay = math.ceil((decided - 1) / PREFILL)
    assert len(forwards) == prompt + replay + (undisturbed - prompt - (decided - 1))


def test_an_answer_that_has_ended_ends_again_without_a_forward_for_its_last_token(
    driver: Driver, forwards: list[int]
) -> None:
    expected = answer(driver, PROMPTS[2], max_tokens=9)
    positions = sum(forwards)
    forwards.clear()
    assert answer(driver, PROMPTS[2], decisions(expected), max_tokens=9) == expected
    assert sum(forwards) == positions


def test_resumed_requests_share_a_batch(driver: Driver, engine: LLMEngine) -> None:
    """More of them than rows, and beside requests that begin."""
    expected = [answer(driver, prompt, **{**SAMPLED, "seed": n}) for n, prompt in enumerate(PROMPTS)]
    for n, prompt in enumerate(PROMPTS):
        submit(driver, n, prompt, decisions(expected[n][: 2 * n]), **{**SAMPLED, "seed": n})
    found = driver.run()
    assert [found[n] for n in range(len(PROMPTS))] == [
        [msgspec.structs.replace(output, request_id=n) for output in outputs] for n, outputs in enumerate(expected)
    ]


@pytest.mark.parametrize("steps", range(9))
def test_abort_of_a_resumed_request_in_any_state_changes_no_other(
    driver: Driver, engine: LLMEngine, steps: int
) -> None:
    expected = answer(driver, PROMPTS[0], max_tokens=25)
    journal = decisions(answer(driver, PROMPTS[2], max_tokens=30)[:-1])
    submit(driver, 0, PROMPTS[0], decisions(expected[:12]), max_tokens=25)
    submit(driver, 1, PROMPTS[2], journal, max_tokens=30)
    outputs = [output for _ in range(steps) if engine.busy for output in driver.step()]
    driver.abort(1)
    check(engine, driver.live)
    outputs += driver.run().get(0, [])
    assert [output for output in outputs if output.request_id == 0] == expected
