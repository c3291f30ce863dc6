"""Chooses the replica of each stage that a request is placed on.

Rules
1. A replica is given requests while it is ready, unless it is reserved for a trial of suspects, is a standby, or is
   being removed.
2. Standbys are the ready replicas beyond the number that is wanted: those that became ready last. When a replica dies
   or is reserved, a standby takes over in the same turn of the event loop, and the restarted one becomes a standby.
3. ``routing`` chooses among several replicas.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable

import trio

from omni_actors.orchestrator.routing import Affinity, Candidate, StageRouting
from omni_actors.protocol.messages import Address
from omni_actors.stages.base import NEXT_END
from omni_actors.supervisor.replica import Replica, ReplicaState


class Placement:
    """The replicas of a pipeline.

    reserved: the replicas that are reserved for trials of suspects.
    """

    def __init__(self, reserved: Collection[Address]) -> None:
        self._reserved = reserved
        self.replicas: dict[Address, Replica] = {}
        self._of_stage = collections.defaultdict[str, list[Replica]](list)
        self._routing: dict[str, StageRouting] = {}
        self.wanted = collections.Counter[str]()
        """How many replicas each stage is to have, standbys aside."""
        self.loads = collections.Counter[Address]()
        """How many dispatched requests, which have not ended, each replica holds. ``Dispatcher`` counts them."""

    def add(self, replica: Replica) -> None:
        """Place requests on this replica, too, from now on."""
        self.replicas[replica.address] = replica
        self._of_stage[replica.address.stage].append(replica)
        self._routing.setdefault(replica.address.stage, StageRouting(replica.stage.routing))

    def remove(self, replica: Replica) -> None:
        """Forget a replica, which holds no request."""
        del self.replicas[replica.address]
        self._of_stage[replica.address.stage].remove(replica)

    def of(self, stage: str) -> list[Replica]:
        """Return all replicas of a stage."""
        return list(self._of_stage[stage])

    def serving(self, stage: str) -> list[Replica]:
        """Return the ready replicas of a stage, reserved ones and standbys included."""
        return [each for each in self._of_stage[stage] if each.accepts_work]

    def _free(self, stage: str) -> list[Replica]:
        free = [each for each in self._of_stage[stage] if each.accepts_work and each.address not in self._reserved]
        if len(free) > 1:
            free.sort(key=_age)
        return free[: self.wanted[stage]]

    def is_standby(self, replica: Replica) -> bool:
        """Return whether a replica is ready and gets no requests because others serve its stage."""
        stage, address = replica.address.stage, replica.address
        return replica.accepts_work and address not in self._reserved and replica not in self._free(stage)

    def was_standby(self, replica: Replica) -> bool:
        """Return whether a replica that has just died served no requests.

        It was a standby, or was loading to become one.
        """
        if self.loads[replica.address] or replica.address in self._reserved:
            return False
        before = [
            each
            for each in self.serving(replica.address.stage)
            if each is not replica
            and each.address not in self._reserved
            and (not replica.incarnation.ready.is_set() or _age(each) < _age(replica))
        ]
        return len(before) >= self.wanted[replica.address.stage]

    def congested(self, stages: Iterable[str]) -> str | None:
        """Return a stage whose free replicas are all congested, or None.

        A congested worker need not hang: aborts are control messages too, so a flood of short requests can outrun a
        worker that gets little CPU time.
        """
        for stage in stages:
            for replica in self._of_stage[stage]:
                if replica.congested:
                    free = self._free(stage)
                    if free and all(each.congested for each in free):
                        return stage
                    break
        return None

    def place(
        self, stages: Collection[str], affinity: Affinity, trial: Address | None = None
    ) -> dict[str, Address] | None:
        """Choose one replica of each stage. Returns None if a stage has no free replica.

        affinity: what relates the request to earlier ones.
        trial: the replica to choose for its stage.
        """
        free = {stage: self._free(stage) for stage in stages if trial is None or stage != trial.stage}
        if not all(free.values()):
            return None
        placement = {stage: self._choose(stage, each, affinity) for stage, each in free.items()}
        if trial is not None and trial.stage in stages:
            placement[trial.stage] = trial
        return placement

    def _choose(self, stage: str, free: list[Replica], affinity: Affinity) -> Address:
        routing = self._routing[stage]
        if len(free) == 1 and not routing.remembers(affinity):
            return free[0].address
        return routing.choose([self._candidate(each) for each in free], affinity)

    def _candidate(self, replica: Replica) -> Candidate:
        return Candidate(replica.address, replica.generation, self.loads[replica.address], replica.congested)

    def _staying(self, stage: str) -> list[Replica]:
        return [each for each in self._of_stage[stage] if not each.leaving]

    def has_failed(self, stage: str) -> bool:
        """Whether a stage has replicas, and all of them were given up. Those that are being removed do not count."""
        staying = self._staying(stage)
        return bool(staying) and all(each.state is ReplicaState.FAILED for each in staying)

    def back_in_s(self, stage: str) -> float | None:
        """Return the seconds until a failed stage may serve again, or None if no replica is tried again.

        This is the time until the next try, plus the time that loading took before.
        """
        now = trio.current_time()
        tries = [(each.retry_at, each.load_s or 0.0) for each in self._staying(stage)]
        return min((max(0.0, at - now) + load_s for at, load_s in tries if at is not None), default=None)

    def next_ends_s(self) -> dict[str, float]:
        """Return the stages whose engines measure when the next of their requests ends, and the seconds until then."""
        now, found = trio.current_time(), dict[str, float]()
        for address, replica in self.replicas.items():
            seconds = replica.gauges.get(NEXT_END)
            left = 0.0 if seconds is None else replica.incarnation.last_pong_at + seconds - now
            if left > 0:  # otherwise it has ended since the measurement
                found[address.stage] = min(left, found.get(address.stage, left))
        return found


def _age(replica: Replica) -> tuple[float, int]:
    """Return the place of a replica in the order in which those of a stage became ready."""
    return replica.incarnation.ready_at, replica.address.replica
