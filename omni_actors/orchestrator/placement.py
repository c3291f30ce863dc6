"""Which replica of each stage gets a request.

Rules
1. A replica takes requests while it is ready, unless it is reserved for suspects on trial.
2. Of several, the least loaded one is taken, and one that is behind with its control messages last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import trio

from omni_actors.protocol.messages import Address
from omni_actors.supervisor.replica import Replica, ReplicaState


class Placement:
    """The replicas of a pipeline. load: how many requests are placed on a replica."""

    def __init__(self, load: Callable[[Address], int]) -> None:
        self._load = load
        self.replicas: Mapping[Address, Replica] = {}
        self._of_stage: dict[str, list[Replica]] = {}
        self.reserved: Mapping[Address, object] = {}
        """Replicas on which suspects are on trial."""

    def use(self, replicas: Mapping[Address, Replica]) -> None:
        """These are the replicas from now on."""
        self.replicas = replicas
        self._of_stage = {}
        for address, replica in replicas.items():
            self._of_stage.setdefault(address.stage, []).append(replica)

    def serving(self, stage: str) -> list[Replica]:
        """The replicas of a stage that are ready, reserved ones too."""
        return [each for each in self._of_stage[stage] if each.accepts_work]

    def _free(self, stage: str) -> list[Replica]:
        return [each for each in self.serving(stage) if each.address not in self.reserved]

    def behind(self, stages: Iterable[str]) -> str | None:
        """A stage none of whose replicas keeps up with its control messages; None where there is none.

        It need not be hung: aborts are messages too, and a flood of short requests may outrun a starved worker.
        """
        for stage in stages:
            free = self._free(stage)
            if free and all(each.congested for each in free):
                return stage
        return None

    def place(self, stages: Iterable[str], trial: Address | None = None) -> dict[str, Address] | None:
        """One replica of each stage, or None where a stage has none. trial: the one to take of its stage."""
        placement: dict[str, Address] = {}
        for stage in stages:
            if trial is not None and stage == trial.stage:
                placement[stage] = trial
                continue
            free = self._free(stage)
            if not free:
                return None
            if len(free) > 1:  # the load of one need not be counted
                free.sort(key=lambda each: (each.congested, self._load(each.address)))
            placement[stage] = free[0].address
        return placement

    def has_failed(self, stage: str) -> bool:
        """Whether a stage has no replica left."""
        return all(each.state is ReplicaState.FAILED for each in self._of_stage[stage])

    def back_in_s(self, stage: str) -> float | None:
        """Seconds until a stage that has failed may serve again: its next try, and as long as it took to load before.

        None where it is not tried again.
        """
        now = trio.current_time()
        tries = [(each.retry_at, each.load_s or 0.0) for each in self._of_stage[stage]]
        return min((max(0.0, at - now) + load_s for at, load_s in tries if at is not None), default=None)
