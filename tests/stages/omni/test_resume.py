"""A thinker goes on behind the tokens that an earlier incarnation decided, and its talker gets the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from omni_actors.stages.base import Decisions
from tests.support.closeness import assert_same_results
from tests.support.conformance import chunks
from tests.support.engine_cases import shown
from tests.support.engine_driver import Driver
from tests.support.forwards import record_forwards

pytestmark = [
    pytest.mark.voice,  # it needs the libraries of the extra; the weights are random
    pytest.mark.usefixtures("clear_choices"),
]

PREFILL = 16
"""Positions in each prefill chunk: several chunks for a prompt, and for decided tokens."""


@pytest.fixture(scope="module", params=["qwen3_thinker", "qwen2_5_thinker"])
def engine(request: pytest.FixtureRequest, open_stage: Callable[..., Any]) -> Iterator[Any]:
    with closing(open_stage(request.param, prefill_chunk=PREFILL)) as opened:
        yield opened


@pytest.fixture
def driver(engine: Any, drive: Callable[..., Driver]) -> Driver:
    return drive(engine)


def answer(driver: Driver, journal: tuple[Decisions, ...] = (), **params: Any) -> list[Any]:
    driver.start(1, journal=journal, **params)
    asked = shown(1)
    for number, chunk in enumerate(asked):
        driver.feed(1, *chunk, last=number == len(asked) - 1)
    outputs: list[Any] = driver.run()[1]
    return outputs


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"ignore_eos": True}, id="greedy", marks=pytest.mark.slow),
        pytest.param({"ignore_eos": True, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}, id="sampled"),
        pytest.param({"ignore_eos": True, "stop": (" !?",)}, id="stop string", marks=pytest.mark.slow),
        pytest.param({"ignore_eos": True, "logprobs": 2}, id="log probabilities", marks=pytest.mark.slow),
    ],
)
def test_text_and_rows_are_the_same_wherever_they_are_resumed(driver: Driver, params: dict[str, Any]) -> None:
    params = {"max_tokens": 40, **params}
    expected = answer(driver, **params)
    assert not expected[0].decisions, "the first output has rows of the prompt only"
    assert sum(len(output.decisions) for output in expected) == 40
    for cut in (0, 1, 3, len(expected) // 2, len(expected) - 1, len(expected)):
        found = answer(driver, tuple(output.decisions for output in expected[:cut]), **params)
        assert [output.decisions for output in found] == [output.decisions for output in expected]
        assert_same_results(chunks(found), chunks(expected))


def test_a_journal_costs_the_forwards_of_a_prefill(
    engine: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = record_forwards(engine, monkeypatch)
    expected = answer(driver, max_tokens=40, ignore_eos=True)
    prompt = len(forwards) - 39
    forwards.clear()
    answer(driver, tuple(output.decisions for output in expected[:-1]), max_tokens=40, ignore_eos=True)
    assert len(forwards) == prompt + 3 + 1, "38 of 39 decided tokens in chunks, and one decoded"
