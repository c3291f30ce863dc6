"""Control of the system during a run: pauses, sleeping stages, and versions of weights.

Rules
1. A control is never in force for longer than a schedule asks and ``CONTROL_S``: a worker that stands still is not
   waited for.
2. Versions of weights are numbers that grow (``oracle``, rule 5).
3. Each control is on record with its time, from before its first call until after its last one. The judge accepts what
   a control does to requests in that time only. While generation is paused, no new request may be answered: that time
   is from after the first call until before the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import assert_never

import trio

from omni_actors.errors import InvalidRequest, OmniError, SystemClosed
from omni_actors.stress.judge import ClosedPeriods, Period
from omni_actors.stress.schedule import PauseGeneration, Sleep, UpdateWeights
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

CONTROL_S = 1.0


class Controls:
    """The controls of one run.

    weights: a file that stands for the weights of the echo engines. now: the clock of the client.
    """

    def __init__(self, omni: OmniSystem, workload: Workload, weights: Path, now: Callable[[], float]) -> None:
        self._omni, self._hooks, self._weights, self._now = omni, workload.hooks, weights, now
        self._stages = workload.stages
        self.closures = ClosedPeriods()
        self.in_force = 0
        self._newest = 0
        self.established = 0
        """The version that every worker of an echo stage has."""
        self._updating = trio.Lock()

    @contextmanager
    def scaling(self, stage: str) -> Iterator[None]:
        """Put the time of this block on record: the number of the stage's replicas changes."""
        with self._period(self.closures.scaled, stage):
            yield

    def has_slept(self, stage: str, since: float) -> bool:
        """Return whether a stage was asleep, or on its way, at any time from ``since`` on."""
        return any(stage in each.stages and each.ended >= since for each in self.closures.asleep)

    @contextmanager
    def _period(self, periods: list[Period], *stages: str) -> Iterator[None]:
        """Put the time of this block on record."""
        period = Period(stages or self._stages, self._now())
        periods.append(period)
        try:
            yield
        finally:
            period.end(self._now())

    def start(self, control: PauseGeneration | Sleep | UpdateWeights, nursery: trio.Nursery) -> None:
        """Carry out a control in a task of ``nursery``. It is in force from now on."""
        self.in_force += 1
        nursery.start_soon(self._carry_out, control)

    async def _carry_out(self, control: PauseGeneration | Sleep | UpdateWeights) -> None:
        try:
            match control:
                case PauseGeneration():
                    await self._pause(control)
                case Sleep():
                    await self._sleep(control)
                case UpdateWeights():
                    await self._update_weights()
                case _:
                    assert_never(control)
        finally:
            self.in_force -= 1

    async def _pause(self, pause: PauseGeneration) -> None:
        closures = self.closures
        try:
            with trio.move_on_after(CONTROL_S):
                if pause.mode == "abort":
                    with self._period(closures.aborting):
                        await self._omni.pause_generation("abort")
                else:
                    await self._omni.pause_generation(pause.mode)
            if await self._omni.is_paused():
                with self._period(closures.paused):
                    await trio.sleep(pause.ms / 1000)
        finally:
            ended = self._now()
            with trio.CancelScope(shield=True), suppress(SystemClosed):
                await self._omni.resume_generation()
            for other in closures.paused:  # generation goes on for all that have paused it, until now
                other.end(ended)

    async def _sleep(self, sleep: Sleep) -> None:
        closures = self.closures
        with self._period(closures.asleep, sleep.stage):
            try:
                with suppress(OmniError), self._period(closures.aborting, sleep.stage):
                    await self._omni.sleep(2, stages=(sleep.stage,))
                await trio.sleep(sleep.ms / 1000)
            finally:
                with trio.CancelScope(shield=True), suppress(OmniError):
                    await self._omni.wake_up(stages=(sleep.stage,))

    async def _update_weights(self) -> None:
        """Give the workers the next version."""
        async with self._updating:
            self._newest += 1
            version = self._newest
            with trio.move_on_after(CONTROL_S), suppress(SystemClosed):
                try:
                    replies = await self._omni.update_weights(self._weights, version=str(version), stages=self._hooks)
                except InvalidRequest as refused:
                    if refused.code != "paused":
                        raise
                    return  # a pause with "keep" holds requests, and nothing was changed
                if all(reply.error is None for stage in replies.values() for reply in stage):
                    self.established = version
