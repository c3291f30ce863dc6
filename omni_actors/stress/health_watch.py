"""Observes a system's health: deaths, workers that became ready, stages that were given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import trio

from omni_actors.stress.judge import ObservedDeath
from omni_actors.system import Health, OmniSystem, ReplicaHealth


@dataclass(frozen=True, slots=True)
class Serving:
    """A worker became ready. at: CLOCK_MONOTONIC, in seconds. load_s: how long its engine loaded."""

    stage: str
    pid: int
    at: float
    load_s: float


class HealthWatch:
    """Records what a system reports. ``run`` is a task; the other methods are plain calls."""

    def __init__(self, omni: OmniSystem) -> None:
        self._omni = omni
        self.deaths: list[ObservedDeath] = []
        self.serving: list[Serving] = []
        self._dead: dict[tuple[str, int], int] = {}
        self._pids: dict[tuple[str, int], int | None] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self._record_all()

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            await self._omni.wait_changed()
            self._record_all()
            self._changed.unpark_all()

    @property
    def health(self) -> Health:
        return self._omni.health()

    @property
    def given_up(self) -> set[str]:
        """Stages without a replica left."""
        return {name for name, stage in self.health.stages.items() if all(each.state == "failed" for each in stage)}

    @property
    def settled(self) -> bool:
        """Whether every replica serves or is given up."""
        return all(each.state in ("ready", "failed") for stage in self.health.stages.values() for each in stage)

    def serving_since(self, stage: str, at: float) -> Serving | None:
        """The first worker of a stage that became ready at or after ``at``."""
        return next((each for each in self.serving if each.stage == stage and each.at >= at), None)

    def forget(self, before: float) -> list[ObservedDeath]:
        """Drop the records from before ``before``. Returns the deaths among them."""
        old = [death for death in self.deaths if death.at < before]
        self.deaths = [death for death in self.deaths if death.at >= before]
        self.serving = [each for each in self.serving if each.at >= before]
        return old

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` is true. It is evaluated whenever the system's health changes."""
        while not condition():
            await self._changed.park()

    def _record_all(self) -> None:
        now = time.monotonic()
        for stage, replicas in self.health.stages.items():
            for replica in replicas:
                self._record(stage, replica, now)

    def _record(self, stage: str, replica: ReplicaHealth, now: float) -> None:
        place = stage, replica.replica
        if replica.history and replica.history[-1].generation != self._dead.get(place):
            self._dead[place] = replica.history[-1].generation
            self.deaths.append(ObservedDeath(*place, replica.history[-1].pid, replica.last_exit or "", now))
        if replica.state == "ready" and replica.pid is not None and replica.pid != self._pids.get(place):
            self._pids[place] = replica.pid
            self.serving.append(Serving(stage, replica.pid, now, replica.load_s or 0.0))
