"""The conformance suite, for every engine that needs no vLLM."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.conformance import EngineConformance
from tests.support.engine_cases import Case


@pytest.mark.usefixtures("clear_choices")
class TestConformance(EngineConformance):
    pass


@pytest.mark.slow
def test_close_ends_the_engines_threads(case: Case, driver: Any, open_stage: Callable[..., Any], drive: Any) -> None:
    case.alone(driver, 1, 0)  # threads that a library starts once, for good, are running now
    before = _tasks()
    engine = open_stage(case.opened)
    case.alone(drive(engine), 1, 0)
    engine.close()
    del engine
    give_up = time.monotonic() + 60
    while left := _tasks() - before:
        assert time.monotonic() < give_up, f"threads left: {left}; of Python: {threading.enumerate()}"
        time.sleep(0.01)


def _tasks() -> set[str]:
    """This process's threads, native ones too."""
    return set(os.listdir("/proc/self/task"))
