"""The rules of ``stages.base.Pausable``, for every engine that implements it."""

from __future__ import annotations

import pkgutil
import random
from typing import Any

import pytest

from omni_actors.stages.base import Pausable
from tests.support.closeness import assert_same_results
from tests.support.conformance import chunks
from tests.support.engine_cases import EVERY_ENGINE, Case

PAUSABLE = {"echo", "whisper", "hibari_acoustic", "hibari_vocoder", "qwen3_code2wav", "qwen2_5_token2wav"}


@pytest.fixture(
    scope="module",
    params=[param for param in EVERY_ENGINE if param.id in PAUSABLE],
)
def case(request: pytest.FixtureRequest) -> Case:
    """Overrides the fixture of ``conftest.py``: the engines that can pause."""
    made: Case = request.param(request)
    return made


@pytest.mark.voice
@pytest.mark.parametrize("engine", ["autoregressive.language:LanguageEngine", "omni.talker:OmniTalker"])
def test_engines_whose_requests_hold_rows_of_a_batch_cannot_pause(engine: str) -> None:
    """A paused request would keep its row, and other requests would wait for it."""
    assert not issubclass(pkgutil.resolve_name(f"omni_actors.stages.{engine}"), Pausable)


def test_pausing_changes_no_chunk(case: Case, driver: Any) -> None:
    """Two requests are paused and resumed at random, between any two steps and chunks of input."""
    draw = random.Random(1)
    case.start(driver, 1)
    case.feed(driver, 1, 0)
    expected = chunks(driver.run()[1])
    outputs: list[Any] = []
    for number in (0, 1):
        case.start(driver, 10 + number)
    for i in range(max(map(len, case.inputs))):
        for number in (0, 1):
            case.feed(driver, 10 + number, number, slice(i, i + 1))
        outputs += _step_and_pause(driver, draw)
    while driver.live:
        outputs += _step_and_pause(driver, draw)
    assert_same_results(chunks([output for output in outputs if output.request_id == 10]), expected)


def _step_and_pause(driver: Any, draw: random.Random) -> list[Any]:
    for request_id in driver.live:
        draw.choice((driver.engine.pause, driver.engine.resume))(request_id)
    return driver.step() if driver.engine.busy else []


def test_a_paused_request_alone_leaves_the_engine_idle(case: Case, driver: Any) -> None:
    case.start(driver, 2)
    driver.engine.pause(2)
    driver.engine.pause(2)
    case.feed(driver, 2, 0)
    assert not driver.engine.busy
    case.start(driver, 3)
    case.feed(driver, 3, 1)
    outputs = driver.run()
    assert outputs.keys() == {3}, "the paused request was served"
    case.check(driver, outputs[3], 1)
    driver.engine.resume(2)
    driver.engine.resume(2)
    case.check(driver, driver.run()[2], 0)


def test_abort_frees_a_paused_request(case: Case, driver: Any) -> None:
    case.start(driver, 2)
    case.feed(driver, 2, 0)
    driver.step()
    driver.engine.pause(2)
    driver.abort(2)
    assert not driver.engine.busy
    case.start(driver, 2)  # a new request of the same number is not paused
    case.feed(driver, 2, 0)
    case.check(driver, driver.run()[2], 0)
