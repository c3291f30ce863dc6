"""The replicas of each stage while the system runs: how many are wanted, which exist, and which callers wait for one.

Rules
1. Scaling changes the number that is wanted first, then adds or removes replicas (``system/scaling.py``).
2. A replica that is removed holds no request any more: they have ended, or their work here was lost as by a death.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import trio

from omni_actors.errors import StageFailed, TemporarilyRefused
from omni_actors.orchestrator.dispatch import Dispatcher
from omni_actors.orchestrator.lifecycle import Event
from omni_actors.orchestrator.replay_state import Phase
from omni_actors.orchestrator.request import EndRequest
from omni_actors.orchestrator.suspects import Suspects
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.replica import Replica, ReplicaState

_DONE = (Phase.FINISHED, Phase.LOST)
"""The phases of a stage in which it has nothing to do for a request."""


class Pools:
    """The replicas of all stages. failed_stages: those without a replica left; a stage is removed when it is not."""

    def __init__(
        self, dispatcher: Dispatcher, suspects: Suspects, failed_stages: dict[str, StageFailed], end: EndRequest
    ) -> None:
        self._end = end
        self._dispatcher, self._suspects, self._placement = dispatcher, suspects, dispatcher.placement
        self._failed_stages = failed_stages
        self.is_standby = self._placement.is_standby
        self.wait_unused, self.unplaced = dispatcher.wait_unused, dispatcher.unplaced
        self.arrived: Mapping[str, int] = dispatcher.arrived
        """How many requests that use each stage have been admitted so far."""
        self.wanted: Mapping[str, int] = self._placement.wanted
        """How many replicas each stage is to have, standbys aside."""
        self.loads: Mapping[Address, int] = self._placement.loads
        """How many requests each replica holds; 0 for any other address."""

    def replicas(self, stage: str) -> list[Replica]:
        """Return the replicas of a stage, standbys and those that are being removed included."""
        return self._placement.of(stage)

    def serves(self, stage: str) -> bool:
        """Return whether a replica of a stage is ready."""
        return bool(self._placement.serving(stage))

    @trio.lowlevel.enable_ki_protection
    def want(self, stage: str, replicas: int) -> None:
        """Set how many replicas a stage is to have. A standby that is one of these now is given requests at once."""
        self._placement.wanted[stage] = replicas
        self._dispatcher.dispatch_waiting()

    def add(self, replica: Replica) -> None:
        """Place requests on a new replica as soon as it is ready."""
        self._placement.add(replica)

    def replica_ready(self, stage: str) -> None:
        """Handle that a worker is ready: its stage has not failed any more, unless the replica is being removed."""
        if self.serves(stage):
            self._failed_stages.pop(stage, None)

    @trio.lowlevel.enable_ki_protection
    def take_back(self, replica: Replica) -> None:
        """Handle that a ready replica is not removed after all: it takes requests and trials again."""
        self.replica_ready(replica.address.stage)
        self._suspects.worker_ready(replica.address)

    def recover(self, stage: str) -> None:
        """Let requests wait for a stage again, unless all its replicas are given up still."""
        if not self._placement.has_failed(stage):
            self._failed_stages.pop(stage, None)

    @trio.lowlevel.enable_ki_protection
    def remove(self, replica: Replica) -> None:
        """Forget a replica, which has no worker any more."""
        self._placement.remove(replica)
        self.recover(replica.address.stage)
        self._dispatcher.trials.return_replica(replica.address)
        self._suspects.advance()

    def leave_order(self, stage: str) -> list[Replica]:
        """Return the replicas of a stage in the order in which they are removed.

        First those that serve nothing: failed ones, then others that are not ready; then standbys, those that are not
        on trial, those with fewer requests, and those with higher numbers.
        """
        reserved = self._dispatcher.trials.running

        def key(each: Replica) -> tuple[bool, bool, bool, bool, int, int]:
            address = each.address
            return (
                each.state is not ReplicaState.FAILED,
                each.accepts_work,
                not self.is_standby(each),
                address in reserved,
                self.loads[address],
                -address.replica,
            )

        return sorted(self.replicas(stage), key=key)

    def starved(self, starting: Collection[str] = ()) -> set[str]:
        """Return the stages that have no replica, that requests wait for, and that are not among ``starting``."""
        empty = {stage for stage, replicas in self.wanted.items() if not replicas}.difference(starting)
        if not empty or self._dispatcher.dispatch_paused:  # it is asked for each request that begins to wait
            return set()
        return {stage for each in self._dispatcher.running() for stage in each.replay_state.waiting if stage in empty}

    @trio.lowlevel.enable_ki_protection
    def refuse_waiting(self, stage: str, reason: str) -> None:
        """End the requests that wait for a stage, which has no replica and can have none now."""
        for each in self._dispatcher.running():
            if stage in each.replay_state.waiting and not each.lifecycle.ended:
                self._end(each, Event.FAIL, TemporarilyRefused(reason, code="cannot_start"))

    def unfinished_since(self, stage: str) -> list[float]:
        """Return when the requests that a stage has not finished were submitted, on trio's clock, in order."""
        requests = self._dispatcher.using([stage])
        unfinished = [each for each in requests if each.replay_state.stages[stage].phase not in _DONE]
        return sorted(each.expires - each.deadline_s for each in unfinished)
