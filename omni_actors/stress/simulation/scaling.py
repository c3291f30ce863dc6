"""Changes the number of replicas of a simulated system's stages, while faults hit it.

Rules
1. A stage is left without replicas only for a time, unless a request that waits for it starts one.
2. Often more replicas are wanted soon after some began to drain: these are taken back.
3. The time of each change is on record for the judge, from before the call until the stage has a replica again.
"""

from __future__ import annotations

import math
import random
from contextlib import suppress

import trio

from omni_actors.errors import InvalidRequest, StageAsleep, StageFailed, SystemClosed
from omni_actors.stress.controls import Controls
from omni_actors.stress.simulation.journal import Journal
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

MOST_REPLICAS = 3
DRAIN_S = (0.0, 0.05, 1.0, None)
GIVE_UP_S = (math.inf, math.inf, 0.0, 0.1, 1.0)
"""The caller of ``scale`` waits so long."""
EMPTY_S = (0.0, 0.1, 5.0)
"""A stage that no request can start has no replica for so long."""
AGAIN_S = 0.5
BACK_S = (0.0, 0.001, 0.01, 0.05)
"""The time from a change to fewer replicas to one to more of them."""


class SimulatedScaling:
    """Draws the changes of one schedule. ``nursery`` outlives the system; ``use`` is called when that is open."""

    nursery: trio.Nursery

    def __init__(self, draw: random.Random, workload: Workload, journal: Journal) -> None:
        self._draw, self._workload, self._journal = draw, workload, journal
        self.scaled = set[str]()
        """The stages whose number of replicas was changed, or was to be."""
        self._omni: OmniSystem
        self._controls: Controls

    def use(self, omni: OmniSystem, controls: Controls) -> None:
        """Scale this system from now on. controls: where changes are on record."""
        self._omni, self._controls = omni, controls

    def scale(self) -> None:
        """Add or remove replicas of a stage; often of one that holds requests. The caller may lose its patience."""
        draw, busy = self._draw, self._busy()
        stage = draw.choice(busy if busy and draw.random() < 0.7 else self._workload.stages)
        wanted = self._wanted(stage)
        replicas = draw.choice([each for each in range(MOST_REPLICAS + 1) if each != wanted])
        drain_s, give_up_s, empty_s = draw.choice(DRAIN_S), draw.choice(GIVE_UP_S), draw.choice(EMPTY_S)
        self.scaled.add(stage)
        self._journal.injected("scale up" if replicas > wanted else "scale down")
        self._journal.note(f"{stage} is scaled from {wanted} to {replicas}, {drain_s=} {give_up_s=} {empty_s=}")
        self._controls.in_force += 1
        self.nursery.start_soon(self._carry_out, stage, replicas, drain_s, give_up_s, empty_s)
        if replicas < wanted and draw.random() < 0.5:
            self._controls.in_force += 1
            more, back_s = draw.choice(range(replicas + 1, MOST_REPLICAS + 1)), draw.choice(BACK_S)
            self.nursery.start_soon(self._scale_back, stage, more, back_s)

    def _busy(self) -> list[str]:
        """The stages that hold requests."""
        pools = self._omni._orchestrator.pools
        return [
            name for name in self._workload.stages if any(pools.loads[each.address] for each in pools.replicas(name))
        ]

    def _wanted(self, stage: str) -> int:
        return self._omni._orchestrator.pools.wanted[stage]

    async def _scale_back(self, stage: str, replicas: int, back_s: float) -> None:
        """Scale a stage up that was just scaled down."""
        try:
            await trio.sleep(back_s)
            drains = any(each.can_stay for each in self._omni._orchestrator.pools.replicas(stage))
            self._journal.injected("scale up during a drain" if drains else "scale up")
            self._journal.note(f"{stage} is scaled back to {replicas}")
            with self._controls.scaling(stage), suppress(SystemClosed):
                await self._scale(stage, replicas, None)
                await self._leave_one(stage)
        finally:
            self._controls.in_force -= 1

    async def _carry_out(
        self, stage: str, replicas: int, drain_s: float | None, give_up_s: float, empty_s: float
    ) -> None:
        try:
            with self._controls.scaling(stage), suppress(SystemClosed):
                with trio.move_on_after(give_up_s):
                    await self._scale(stage, replicas, drain_s)
                if not replicas:
                    await trio.sleep(empty_s)
                await self._leave_one(stage)
        finally:
            self._controls.in_force -= 1

    async def _leave_one(self, stage: str) -> None:
        """Wait until a stage has a replica or a request can start one. Any change may fail and leave it with none."""
        while not self._wanted(stage) and not self._workload.pipeline.stages[stage].scale_from_zero:
            await self._scale(stage, 1, None)
            await trio.sleep(AGAIN_S)

    async def _scale(self, stage: str, replicas: int, drain_s: float | None) -> None:
        """Scale a stage, unless it sleeps or the new replicas have no place or cannot load. Raises SystemClosed."""
        with suppress(InvalidRequest, StageAsleep, StageFailed):
            scaled = await self._omni.scale(stage, replicas, drain_s=drain_s)
            self._journal.note(f"{scaled}")
