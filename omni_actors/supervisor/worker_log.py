"""The log events of the supervisor: deaths, restarts, recoveries, and replicas that it gives up."""

from __future__ import annotations

from typing import Any

import trio

from omni_actors.errors import WorkerExit
from omni_actors.log_events import ReplicaGivenUp, WorkerDied, WorkerRecovered, WorkerRestarted, record
from omni_actors.supervisor.replica import Outage, Replica


def started(replica: Replica, pid: int) -> None:
    """Log that a worker was started after a death."""
    if (outage := replica.outage) is not None and outage.exit is not None:
        ended = _successor(replica, outage.exit, outage.requests, pid)
        record(WorkerRestarted(**ended, down_s=_down_s(outage)))


def ready(replica: Replica) -> None:
    """Log that the worker that was started after a death is ready."""
    outage, worker = replica.outage, replica.worker
    if outage is not None and outage.exit is not None and worker is not None:
        ended = _successor(replica, outage.exit, outage.requests, worker.pid)
        record(WorkerRecovered(**ended, down_s=_down_s(outage)))


def died(replica: Replica, exit: WorkerExit, requests: int) -> None:
    """Log a death. requests: how many the worker held."""
    record(WorkerDied(**_end(replica, exit), reason=exit.reason, requests=requests))


def given_up(replica: Replica, exit: WorkerExit, why: str, requests: int) -> None:
    """Log that a replica is given up. requests: how many have ended because their stage has no replica left."""
    retry_in_s = None if replica.retry_at is None else round(replica.retry_at - trio.current_time(), 3)
    facts, down_s = _end(replica, exit), 0.0 if replica.outage is None else _down_s(replica.outage)
    record(ReplicaGivenUp(**facts, reason=why, retry_in_s=retry_in_s, requests=requests, down_s=down_s))


def _end(replica: Replica, exit: WorkerExit) -> dict[str, Any]:
    """Return the fields of a log event about the end of a replica's current worker."""
    return {**_identity(replica), "pid": exit.pid, "signal": exit.signal, "exit_code": exit.exit_code}


def _identity(replica: Replica) -> dict[str, Any]:
    """Return the fields of a log event that name a replica's current worker."""
    worker = replica.incarnation.worker
    return {
        "stage": replica.address.stage,
        "replica": replica.address.replica,
        "generation": replica.generation,
        "node": None if worker is None else worker.node,
    }


def _successor(replica: Replica, exit: WorkerExit, requests: int, pid: int) -> dict[str, Any]:
    """Return the fields of a log event about a worker that follows one that has ended so."""
    ended = {"signal": exit.signal, "exit_code": exit.exit_code, "requests": requests}
    return {**_identity(replica), "pid": pid, **ended}


def _down_s(outage: Outage) -> float:
    return round(trio.current_time() - outage.began_at, 3)
