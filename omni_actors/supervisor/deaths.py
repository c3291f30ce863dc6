"""What the supervisor does when a worker has died: it records the death, decides what follows, and reports both."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import trio

from omni_actors.config import Stage
from omni_actors.errors import Death, StageFailed, WorkerExit
from omni_actors.protocol.messages import Address
from omni_actors.stage_graph import downstream_stages
from omni_actors.supervisor import giving_up, restart, worker_log
from omni_actors.supervisor.incarnation import IncarnationEvent
from omni_actors.supervisor.listener import Listener
from omni_actors.supervisor.replica import Outage, Replica, ReplicaState


class DeathHandler:
    """Handles the deaths of a supervisor's workers. It starts and stops nothing.

    replicas, stages, changes: those of ``Supervisor``.
    """

    def __init__(
        self,
        replicas: Mapping[Address, Replica],
        stages: Mapping[str, Stage],
        listener: Listener,
        changes: trio.lowlevel.ParkingLot,
    ) -> None:
        self._replicas, self._stages, self._listener, self._changes = replicas, stages, listener, changes

    def report(self, replica: Replica, exit: WorkerExit) -> None:
        """Record the death of a replica's incarnation, decide what follows, and report both to the listener."""
        incarnation, now = replica.incarnation, trio.current_time()
        was_standby = self._listener.was_standby(replica.address)
        node = None if incarnation.worker is None else incarnation.worker.node
        exit = replace(exit, reason=incarnation.reason or exit.reason, node=node)
        replica.outage = outage = replica.outage or Outage(now)
        outage.exit = outage.exit or exit
        replica.history.append(Death(replica.generation, time.time(), exit))
        incarnation.advance(IncarnationEvent.DIE)
        incarnation.calls.lose(exit, raised=incarnation.failed_call)
        blameless = incarnation.ended_from_outside or incarnation.failed_call
        counts = blameless or self._listener.on_worker_died(replica.address, exit, incarnation.failed_request)
        counts = counts and not incarnation.took_back
        if incarnation.ready.is_set():
            since = now - replica.policy.period_s
            replica.recent_restarts = tuple(at for at in replica.recent_restarts if at >= since)
        why = giving_up.why_given_up(replica, exit, counts=counts)
        replica.state = ReplicaState.RESTARTING if why is None else ReplicaState.FAILED
        replica.note = str(exit)
        if why is not None:
            giving_up.plan_retry(replica, exit, now)
        elif not incarnation.stopped_with_another:
            self._plan_restart(replica, now, counts=counts, others=[] if was_standby else self._restarted_with(replica))
        self._changes.unpark_all()
        requests = self._listener.on_worker_lost(replica.address, replica.generation, exit, now)
        outage.requests += requests
        is_reported = giving_up.cannot_load(replica) and not replica.added
        is_logged = not is_reported or any(each.state is not ReplicaState.FAILED for each in self.of_stage(replica))
        if is_logged:  # else the caller of ``OmniSystem.open`` reports it
            worker_log.died(replica, exit, requests)
        if why is not None:
            replica.failure = StageFailed(replica.address.stage, replica.address.replica, why, replica.history)
            replica.failure.__cause__ = incarnation.start_error
            ended = self._listener.on_stage_failed(replica.failure)
            if is_logged:
                worker_log.given_up(replica, exit, why, ended)

    def of_stage(self, replica: Replica) -> list[Replica]:
        """Return the replicas of the same stage, this one included."""
        return [each for each in self._replicas.values() if each.address.stage == replica.address.stage]

    def _plan_restart(self, replica: Replica, now: float, *, counts: bool, others: Sequence[Replica]) -> None:
        """Set the delay of a restart, and stop giving work to the replicas that are restarted with this one, others."""
        incarnation = replica.incarnation
        incarnation.delay_s = restart.restart_delay_s(replica.policy, len(replica.recent_restarts))
        if counts:
            replica.recent_restarts += (now,)
        incarnation.restarts_with = tuple(each.address for each in others)
        for each in others:  # before the death is reported: nothing is to be sent to them any more
            each.incarnation.stopped_with_another = True
            if each.state is not ReplicaState.FAILED:
                each.state = ReplicaState.RESTARTING
            each.incarnation.reason = f"restarted with stage {replica.address.stage!r} ({replica.policy.strategy})"
            each.incarnation.stop()

    def _restarted_with(self, replica: Replica) -> list[Replica]:
        """The running replicas that the strategy restarts with this one; one that is down is restarted anyway."""
        running = [each for each in self._replicas.values() if each.incarnation.running]
        if replica.policy.strategy == "one_for_all":
            return running
        if replica.policy.strategy == "one_for_one":
            return []
        inputs = {name: stage.inputs for name, stage in self._stages.items()}
        downstream = downstream_stages([replica.address.stage], inputs)
        return [each for each in running if each.address.stage in downstream]
