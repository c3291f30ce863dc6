"""The log events of the supervisor: deaths, restarts, recoveries, and replicas that it gives up."""

from __future__ import annotations

from typing import Any

import trio

from omni_actors.errors import WorkerExit
from omni_actors.log_events import ReplicaGivenUp, WorkerDied, WorkerRecovered, WorkerRestarted, record
from omni_actors.supervisor.replica import Outage, Replica


def started(replica: Replica) -> None:
    """Log that a worker was started after a death."""
    _record_successor(replica, WorkerRestarted)


def ready(replica: Replica) -> None:
    """Log that the worker that was started after a death is ready."""
    _record_successor(replica, WorkerRecovered)


def _record_successor(replica: Replica, event: type[WorkerRestarted] | type[WorkerRecovered]) -> None:
    outage, worker = replica.outage, replica.worker
    if outage is not None and outage.exit is not None and worker is not None:
        facts = _facts(replica, worker.pid, outage.exit)
        record(event(**facts, requests=outage.requests, down_s=_down_s(outage)))


def died(replica: Replica, exit: WorkerExit, requests: int) -> None:
    """Log a death. requests: how many the worker held."""
    record(WorkerDied(**_facts(replica, exit.pid, exit), reason=exit.reason, requests=requests))


def given_up(replica: Replica, exit: WorkerExit, why: str, requests: int) -> None:
    """Log that a replica is given up. requests: how many have ended because their stage has no replica left."""
    retry_in_s = None if replica.retry_at is None else round(replica.retry_at - trio.current_time(), 3)
    facts, down_s = _facts(replica, exit.pid, exit), 0.0 if replica.outage is None else _down_s(replica.outage)
    record(ReplicaGivenUp(**facts, reason=why, retry_in_s=retry_in_s, requests=requests, down_s=down_s))


def _facts(replica: Replica, pid: int | None, exit: WorkerExit) -> dict[str, Any]:
    """Return the fields of a log event about a replica's current worker. exit: its own, or the one that it follows."""
    worker = replica.incarnation.worker
    return {
        "stage": replica.address.stage,
        "replica": replica.address.replica,
        "generation": replica.generation,
        "node": None if worker is None else worker.node,
        "pid": pid,
        "signal": exit.signal,
        "exit_code": exit.exit_code,
    }


def _down_s(outage: Outage) -> float:
    return round(trio.current_time() - outage.began_at, 3)
