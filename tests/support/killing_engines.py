"""Engines that make pictures, log their denoising steps, and kill a process at a place of a step.

Options, besides those of the engine: ``engine``, its name; ``log``, a file that gets a line with the number of each
step that was computed; and ``plan``, a file that a test writes: JSON, a list of [step, place, pid], where a pid of 0 is
the engine's own process. An entry is removed before that process is killed. Places: "begin" of a step, "computed"
(nothing of the step was sent), "sent".

They are for one request at a time. They rely on nothing but the events of ``step``, whose data names the step. The
engine ``diffusers`` has one for each step if the request has ``previews=1``.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stages.registry import ENGINES

PLACES = ("begin", "computed", "sent")


def write_plan(file: Path, plan: list[list[Any]]) -> None:
    """Write a plan at once: a worker that has sent a picture may read it while the next one is planned."""
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(plan))
    new.replace(file)


def make(context: StageContext) -> Any:
    """Return the engine of the option ``engine``, with what the module describes."""
    options = dict(context.options)
    spec = ENGINES[options.pop("engine")]
    module, name = spec.factory.split(":")
    kind = type("Killing", (_Killing, getattr(import_module(module), name)), {"schema": spec.params})
    return kind(msgspec.structs.replace(context, options=options))


class _Killing:
    """Comes before the engine's class. schema: of the request's parameters."""

    schema: Any

    def __init__(self, context: StageContext) -> None:
        options = dict(context.options)
        self._log, self._plan = Path(options.pop("log")), Path(options.pop("plan"))
        self._done = 0
        super().__init__(msgspec.structs.replace(context, options=options))  # type: ignore[call-arg]

    def warm_up(self) -> None:
        """Compute nothing: the log is of the test's requests alone."""

    def start(self, request: StageRequest) -> None:
        self._done = 0 if request.checkpoint is None else request.checkpoint.data["step"]
        known = {name: value for name, value in request.params.items() if name in self.schema.__struct_fields__}
        super().start(msgspec.structs.replace(request, params=known))  # type: ignore[misc]

    def step(self) -> Iterator[Any]:
        self._kill(self._done + 1, "begin")
        events = list(super().step())  # type: ignore[misc]
        reached = max((event.data["step"] for event in events if "step" in event.data), default=0)
        if reached <= self._done:
            yield from events
            return
        self._done = reached
        with self._log.open("a") as log:
            log.write(f"{reached}\n")
        self._kill(reached, "computed")
        yield from events
        self._kill(reached, "sent")

    def _kill(self, step: int, place: str) -> None:
        plan = json.loads(self._plan.read_text())
        due = [entry for entry in plan if entry[:2] == [step, place]]
        if due:
            write_plan(self._plan, [entry for entry in plan if entry not in due])
        for *_, pid in sorted(due, reverse=True):  # the own process last
            os.kill(pid or os.getpid(), signal.SIGKILL)
