"""What a system says of its workers, as it says it: deaths, workers that serve, stages given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import trio

from omni_actors.stress.judge import ObservedDeath
from omni_actors.system import Health, OmniSystem, ReplicaHealth


@dataclass(frozen=True, slots=True)
class Serving:
    """A worker became ready. at: CLOCK_MONOTONIC; load_s: what its engine took to load."""

    stage: str
    pid: int
    at: float
    load_s: float


class HealthWatch:
    """Follows a system's health. ``run`` in a nursery; everything else is plain calls."""

    def __init__(self, omni: OmniSystem) -> None:
        self._omni = omni
        self.deaths: list[ObservedDeath] = []
        self.serving: list[Serving] = []
        self._dead: dict[tuple[str, int], int] = {}
        self._pids: dict[tuple[str, int], int | None] = {}
        self._news = trio.lowlevel.ParkingLot()
        self._look()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._omni.wait_changed()
            self._look()
            self._news.unpark_all()

    @property
    def health(self) -> Health:
        return self._omni.health()

    @property
    def given_up(self) -> set[str]:
        """Stages without a replica left."""
        return {name for name, stage in self.health.stages.items() if all(each.state == "failed" for each in stage)}

    @property
    def settled(self) -> bool:
        """Every replica serves, or is given up."""
        return all(each.state in ("ready", "failed") for stage in self.health.stages.values() for each in stage)

    def serving_since(self, stage: str, at: float) -> Serving | None:
        """The first worker of a stage that became ready since then."""
        return next((each for each in self.serving if each.stage == stage and each.at >= at), None)

    def forget(self, before: float) -> list[ObservedDeath]:
        """Let go of what was said before then; the deaths among it."""
        old = [death for death in self.deaths if death.at < before]
        self.deaths = [death for death in self.deaths if death.at >= before]
        self.serving = [each for each in self.serving if each.at >= before]
        return old

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a worker's death or return makes true."""
        while not condition():
            await self._news.park()

    def _look(self) -> None:
        now = time.monotonic()
        for stage, replicas in self.health.stages.items():
            for replica in replicas:
                self._look_at(stage, replica, now)

    def _look_at(self, stage: str, replica: ReplicaHealth, now: float) -> None:
        place = stage, replica.replica
        if replica.history and replica.history[-1].generation != self._dead.get(place):
            self._dead[place] = replica.history[-1].generation
            self.deaths.append(ObservedDeath(*place, replica.history[-1].pid, replica.last_exit or "", now))
        if replica.state == "ready" and replica.pid is not None and replica.pid != self._pids.get(place):
            self._pids[place] = replica.pid
            self.serving.append(Serving(stage, replica.pid, now, replica.load_s or 0.0))
