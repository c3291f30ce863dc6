"""Chooses the replica of each stage that a request is placed on.

Rules
1. A replica is given requests while it is ready, unless it is reserved for a trial of suspects or is a standby.
2. Standbys are the ready replicas beyond the stage's ``replicas``: those that became ready last. So when a replica dies
   or is reserved, a standby takes over in the same turn of the event loop, and the restarted one becomes a standby.
3. Of several replicas the least loaded one is chosen; congested ones, which do not keep up with their control
   messages, come last.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Mapping

import trio

from omni_actors.protocol.messages import Address
from omni_actors.supervisor.replica import Replica, ReplicaState


class Placement:
    """The replicas of a pipeline.

    load: returns the number of requests placed on a replica.
    reserved: the replicas that are reserved for trials of suspects.
    """

    def __init__(self, load: Callable[[Address], int], reserved: Collection[Address]) -> None:
        self._load, self._reserved = load, reserved
        self.replicas: dict[Address, Replica] = {}
        self._of_stage = collections.defaultdict[str, list[Replica]](list)

    def use(self, replicas: Mapping[Address, Replica]) -> None:
        """Place requests on these replicas from now on. Called once, when the pipeline starts."""
        self.replicas.update(replicas)
        for address, replica in replicas.items():
            self._of_stage[address.stage].append(replica)

    def serving(self, stage: str) -> list[Replica]:
        """Return the ready replicas of a stage, reserved ones and standbys included."""
        return [each for each in self._of_stage[stage] if each.accepts_work]

    def _free(self, stage: str) -> list[Replica]:
        free = [each for each in self.serving(stage) if each.address not in self._reserved]
        if len(free) > 1:
            free.sort(key=lambda each: each.incarnation.ready_at)
        return free[: free[0].stage.replicas] if free else []

    def is_standby(self, replica: Replica) -> bool:
        """Return whether a replica is ready and gets no requests because others serve its stage."""
        stage, address = replica.address.stage, replica.address
        return replica.accepts_work and address not in self._reserved and replica not in self._free(stage)

    def congested(self, stages: Iterable[str]) -> str | None:
        """Return a stage whose free replicas are all congested, or None.

        A congested worker need not hang: aborts are control messages too, so many short requests can outrun a worker
        that gets little CPU time.
        """
        for stage in stages:
            free = self._free(stage)
            if free and all(each.congested for each in free):
                return stage
        return None

    def place(self, stages: Iterable[str], trial: Address | None = None) -> dict[str, Address] | None:
        """Choose one replica of each stage. Returns None if a stage has no free replica.

        trial: the replica to choose for its stage.
        """
        placement: dict[str, Address] = {}
        for stage in stages:
            if trial is not None and stage == trial.stage:
                placement[stage] = trial
                continue
            free = self._free(stage)
            if not free:
                return None
            placement[stage] = min(free, key=lambda each: (each.congested, self._load(each.address))).address
        return placement

    def has_failed(self, stage: str) -> bool:
        """Whether all replicas of a stage were given up."""
        return all(each.state is ReplicaState.FAILED for each in self._of_stage[stage])

    def back_in_s(self, stage: str) -> float | None:
        """Return the seconds until a failed stage may serve again, or None if no replica is tried again.

        This is the time until the next try, plus the time that loading took before.
        """
        now = trio.current_time()
        tries = [(each.retry_at, each.load_s or 0.0) for each in self._of_stage[stage]]
        return min((max(0.0, at - now) + load_s for at, load_s in tries if at is not None), default=None)
