"""Control of the system during a run: pauses, sleeping stages, and versions of weights.

Rules
1. A control is never in force for longer than a schedule asks and ``CONTROL_S``: a worker that stands still is not
   waited for.
2. Versions of weights are numbers that grow (``oracle``, rule 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import trio

from omni_actors.errors import OmniError
from omni_actors.stress.judge import TrackedRequest
from omni_actors.stress.schedule import PauseGeneration, Sleep
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

CONTROL_S = 1.0


class Controls:
    """The controls of one run. weights: a file that stands for the weights of the echo engines."""

    def __init__(self, omni: OmniSystem, workload: Workload, weights: Path) -> None:
        self._omni, self._hooks, self._weights = omni, workload.hooks, weights
        self.in_force = 0
        self.slept = Counter[str]()
        """How often each stage was put to sleep."""
        self.sleeping = Counter[str]()
        """How many of these are not over."""
        self._newest = 0
        self.established = 0
        """The version that every worker of an echo stage has."""
        self._updating = trio.Lock()

    async def pause(self, pause: PauseGeneration, running: Iterable[TrackedRequest]) -> None:
        """Pause generation and resume it. running: the requests in flight."""
        if pause.mode == "abort":
            for request in running:
                request.aborted = True
        self.in_force += 1
        try:
            with trio.move_on_after(CONTROL_S):
                await self._omni.pause_generation(pause.mode)
            await trio.sleep(pause.ms / 1000)
        finally:
            with trio.CancelScope(shield=True):
                await self._omni.resume_generation()
            self.in_force -= 1

    async def sleep(self, sleep: Sleep, running: Iterable[TrackedRequest]) -> None:
        """Let a stage sleep, and wake it. running: the requests in flight."""
        for request in running:
            request.aborted |= sleep.stage in request.template.stages
        self.in_force += 1
        self.slept[sleep.stage] += 1
        self.sleeping[sleep.stage] += 1
        try:
            with suppress(OmniError):
                await self._omni.sleep(2, stages=(sleep.stage,))
                await trio.sleep(sleep.ms / 1000)
        finally:
            with trio.CancelScope(shield=True), suppress(OmniError):
                await self._omni.wake_up(stages=(sleep.stage,))
            self.sleeping[sleep.stage] -= 1
            self.in_force -= 1

    async def update_weights(self) -> None:
        """Give the workers the next version."""
        async with self._updating:
            self._newest += 1
            version = self._newest
            with trio.move_on_after(CONTROL_S):
                replies = await self._omni.update_weights(self._weights, version=str(version), stages=self._hooks)
                if all(reply.error is None for stage in replies.values() for reply in stage):
                    self.established = version
