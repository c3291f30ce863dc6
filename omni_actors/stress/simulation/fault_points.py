"""Faults that come from inside an engine: at each of its calls and outputs, one may be raised."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from omni_actors.stages.base import StageCheckpoint, StageEngine, StageFailure, StageOutput


class PlannedKill(BaseException):
    """A simulated SIGKILL inside a turn."""


class PlannedEngineError(RuntimeError):
    """An exception that the engine raises on request."""


def add_fault_points(engine: StageEngine, fault_point: Callable[[], None]) -> None:
    """Make an engine call ``fault_point`` at each of its calls and outputs."""
    step = engine.step

    def with_fault_point(method: Callable[..., None], *arguments: object) -> None:
        fault_point()
        method(*arguments)

    def step_with_fault_points() -> Iterator[StageOutput | StageFailure | StageCheckpoint]:
        for output in step():
            fault_point()
            yield output
        fault_point()

    for name in ("start", "feed", "abort", "pause", "resume"):
        if method := getattr(engine, name, None):
            setattr(engine, name, functools.partial(with_fault_point, method))
    setattr(engine, "step", step_with_fault_points)  # noqa: B010 - mypy forbids to assign to a method
