"""Observes a system's health: deaths, workers that became ready, standbys that took over, stages that were given up."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import trio

from omni_actors.errors import WorkerExit
from omni_actors.stress.judge import ObservedDeath
from omni_actors.system import OmniSystem, ReplicaHealth


@dataclass(frozen=True, slots=True)
class Serving:
    """A worker became ready. at: when, by the clock of the watch. load_s: how long its engine loaded."""

    stage: str
    at: float
    load_s: float


class HealthWatch:
    """Records what a system reports. ``run`` is a task; the other methods are plain calls.

    now: the clock of the recorded times. on_death: called with each death. on_promotion: called for each standby that
    serves when a death of its stage is reported. One that changes in two reports, or dies in the same, is missed.
    """

    def __init__(
        self,
        omni: OmniSystem,
        now: Callable[[], float] = time.monotonic,
        on_death: Callable[[ObservedDeath], None] = lambda death: None,
        on_promotion: Callable[[], None] = lambda: None,
    ) -> None:
        self._omni, self._now, self._on_death, self._on_promotion = omni, now, on_death, on_promotion
        self.deaths: list[ObservedDeath] = []
        self.serving: list[Serving] = []
        self.ever_given_up: set[str] = set()
        self._newest_death: defaultdict[tuple[str, int], int] = defaultdict(int)
        """The generation of the newest death seen, by stage and replica."""
        self._newest_ready: dict[tuple[str, int], int] = {}
        """The pid of the newest worker seen ready, by stage and replica."""
        self._failed: set[tuple[str, int]] = set()
        """Stage and number of each replica that was given up at the latest look."""
        self._standbys: set[tuple[str, int | None]] = set()
        """Stage and pid of each standby at the latest look."""
        self._changed = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            self.look()
            self._changed.unpark_all()
            await self._omni.wait_changed()

    @property
    def replicas(self) -> list[tuple[str, ReplicaHealth]]:
        """The state of every replica, with the name of its stage."""
        return [(stage, each) for stage, replicas in self._omni.health().stages.items() for each in replicas]

    def pids(self, stage: str, *, standbys_first: bool) -> list[int]:
        """The workers of the replicas of a stage that were not given up, standbys first or last."""
        living = [each for name, each in self.replicas if name == stage and each.state != "failed"]
        return [each.pid for each in sorted(living, key=lambda each: each.standby != standbys_first) if each.pid]

    def state_of(self, pid: int | None) -> str | None:
        """The state of the replica with this worker."""
        return next((each.state for _, each in self.replicas if pid and each.pid == pid), None)

    @property
    def given_up(self) -> set[str]:
        """Stages without a replica left. Replicas that are being removed do not count.

        What is seen here counts in ``ever_given_up``: a schedule may put such a stage to sleep at once, and wake it.
        """
        found = self._without_replica(self._failed_now)
        self.ever_given_up |= found
        return found

    @property
    def _failed_now(self) -> set[tuple[str, int]]:
        return {(stage, each.replica) for stage, each in self.replicas if each.state == "failed"}

    def _without_replica(self, failed: Collection[tuple[str, int]]) -> set[str]:
        """Return the stages without a replica left if these were given up."""
        staying = [(stage, each.replica) for stage, each in self.replicas if each.state != "draining"]
        return {stage for stage, _ in staying} - {stage for stage, number in staying if (stage, number) not in failed}

    def look(self) -> None:
        """Record what the system reports now. The task may not run any more before the system is closed."""
        seen, known = self.replicas, len(self.deaths)
        for stage, replica in seen:
            self._record(stage, replica)
        died = {death.stage for death in self.deaths[known:]}
        ready = {(stage, each.pid): each.standby for stage, each in seen if each.state == "ready"}
        for stage, pid in self._standbys:
            if stage in died and ready.get((stage, pid)) is False:
                self._on_promotion()
        self._standbys = {worker for worker, is_standby in ready.items() if is_standby}
        # Between two looks, one replica may be given up just before another one serves again.
        failed = self._failed_now
        self.ever_given_up |= self._without_replica(failed | self._failed)
        # A replica that is added in the same moment hides this, although the stage refuses requests until it is ready.
        first = self._omni.dead_error
        self.ever_given_up |= {stage for stage, _ in failed if first is not None and stage == first.stage}
        self._failed = failed

    @property
    def unsettled(self) -> list[str]:
        """A description of every replica that neither serves nor is given up."""
        return [
            f"{stage}.{each.replica} is {each.state}: {each.note}"
            for stage, each in self.replicas
            if each.state not in ("ready", "failed")
        ]

    def serving_since(self, stage: str, at: float) -> Serving | None:
        """The first worker of a stage that became ready at or after ``at``."""
        return next((each for each in self.serving if each.stage == stage and each.at >= at), None)

    def is_given_up(self, stage: str, number: int) -> bool:
        """Whether a replica was given up. Others of its stage, such as a standby, may serve."""
        return any(name == stage and each.replica == number and each.state == "failed" for name, each in self.replicas)

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

    def _record(self, stage: str, replica: ReplicaHealth) -> None:
        place, now = (stage, replica.replica), self._now()
        for past in replica.history:
            if past.generation > self._newest_death[place]:
                self._newest_death[place] = past.generation
                how = WorkerExit(past.pid, past.signal, past.exit_code, reason=past.reason)
                self.deaths.append(ObservedDeath(*place, past.pid, exit=str(how), at=now))
                self._on_death(self.deaths[-1])
        if replica.state == "ready" and replica.pid is not None and replica.pid != self._newest_ready.get(place):
            self._newest_ready[place] = replica.pid
            self.serving.append(Serving(stage, now, replica.load_s or 0.0))
