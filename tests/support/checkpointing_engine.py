"""A resumable engine that keeps its state in checkpoints, as a denoiser does, and that kills processes on demand."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from omni_actors.stages import base

Row = np.ndarray[Any, np.dtype[np.float64]]


STEPS_A_LIVE_PIECE = 2
"""How many steps each piece of live input allows before the last one."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    log: str
    """The file that gets a line for each step: "REQUEST STEP"."""
    steps: int = 6
    previews: int = 2
    """Every so many steps an output that is not the last one."""
    size: int = 1000
    """Values in the state."""
    growing: bool = False
    """Each step appends to the state, so that its checkpoints outgrow their memory."""
    keeps_view: bool = False
    """``start`` keeps a view of the checkpoint, which is a mistake."""


class Kill(msgspec.Struct, frozen=True, array_like=True):
    """Kill a process, once. where: "begin" of a step, "output" or "checkpoint" behind these, "end" of a step."""

    step: int
    where: str
    pid: int
    """0: this process."""
    marker: str


def first_state(size: int) -> Row:
    return np.linspace(0.0, 1.0, size)


def after(state: Row, step: int, *, growing: bool = False) -> Row:
    changed = np.sin(state * 3 + step)
    return np.concatenate([changed, [float(step)] * 2000]) if growing else changed


class _Request:
    def __init__(self, request: base.StageRequest, options: Options) -> None:
        self.state, self.step = first_state(options.size), 0
        if request.checkpoint is not None:
            self.state = request.checkpoint.tensors["state"].numpy().copy()  # type: ignore[union-attr]
            self.step = request.checkpoint.data["step"]
        self.journal = deque(request.journal)
        self.steps, self.previews = options.steps, options.previews
        self.reachable = 0
        """The last step that the input so far allows."""
        self.paused = False
        self.kills: list[Kill] = []

    @property
    def ready(self) -> bool:
        return not self.paused and self.step < self.reachable


class CheckpointingEngine:
    """Makes ``steps`` steps of each request whose input is there. Its decisions are the steps of its outputs.

    ``data["steps"]`` and ``data["previews"]`` of a piece replace the options. With ``data["live"]``, the first steps
    need not wait for the whole input.
    """

    def __init__(self, context: base.StageContext) -> None:
        self._options = msgspec.convert(context.options, Options)
        self._requests: dict[base.RequestId, _Request] = {}
        self._views: list[Any] = []

    @property
    def busy(self) -> bool:
        return any(request.ready for request in self._requests.values())

    def start(self, request: base.StageRequest) -> None:
        self._requests[request.request_id] = _Request(request, self._options)
        if self._options.keeps_view and request.checkpoint is not None:
            self._views.append(request.checkpoint.tensors["state"].numpy())  # type: ignore[union-attr]

    def feed(self, request_id: base.RequestId, chunk: base.Chunk) -> None:
        request = self._requests[request_id]
        request.kills += [msgspec.convert(kill, Kill) for kill in chunk.data.get("kills", ())]
        request.steps = chunk.data.get("steps", request.steps)
        request.previews = chunk.data.get("previews", request.previews)
        live = request.reachable + STEPS_A_LIVE_PIECE if chunk.data.get("live") else 0
        request.reachable = request.steps if chunk.last else min(live, request.steps - 1)

    def abort(self, request_id: base.RequestId) -> None:
        del self._requests[request_id]

    def pause(self, request_id: base.RequestId) -> None:
        self._requests[request_id].paused = True

    def resume(self, request_id: base.RequestId) -> None:
        self._requests[request_id].paused = False

    def step(self) -> Iterator[base.StageOutput | base.StageCheckpoint]:
        for number, request in list(self._requests.items()):
            if not request.ready:
                continue
            while request.journal and request.journal[0][0] <= request.step:
                yield _output(number, request, request.journal.popleft(), {})  # what it had is lost, and not needed
            request.step += 1
            _kill(request, "begin")
            self._log(f"{number} {request.step}")
            request.state = after(request.state, request.step, growing=self._options.growing)
            if request.step == request.steps:
                del self._requests[number]
            if self._is_due(request):
                if request.journal:
                    request.journal.popleft()
                yield _output(number, request, (request.step,), {"state": request.state.copy()})
                _kill(request, "output")
            if request.step < request.steps:
                yield base.StageCheckpoint(number, {"state": request.state}, {"step": request.step})
                _kill(request, "checkpoint")
            _kill(request, "end")

    def _is_due(self, request: _Request) -> bool:
        if request.step == request.steps:
            return True
        if request.journal:
            return request.journal[0] == (request.step,)
        return request.step % request.previews == 0

    def _log(self, line: str) -> None:
        with open(self._options.log, "a") as log:
            log.write(line + "\n")

    def close(self) -> None:
        self._requests.clear()


def _output(number: int, request: _Request, decisions: base.Decisions, tensors: dict[str, Row]) -> base.StageOutput:
    (step,) = decisions
    return base.StageOutput(number, tensors, {"step": step}, step == request.steps, decisions)


def _kill(request: _Request, where: str) -> None:
    """Kill what this step is to kill here. A pid of 0 is this process."""
    for kill in request.kills:
        if (kill.step, kill.where) == (request.step, where) and not Path(kill.marker).exists():
            Path(kill.marker).touch()
            os.kill(kill.pid or os.getpid(), signal.SIGKILL)


def steps_done(log: Path) -> list[tuple[int, int]]:
    """Return the steps that were made, as (request, step), in order."""
    return [(int(request), int(step)) for request, step in map(str.split, log.read_text().splitlines())]
