"""The state of a system's replicas, as ``OmniSystem.health`` and ``/health`` report it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from omni_actors.supervisor.nodes import NodeState
from omni_actors.supervisor.replica import Replica


class PastExit(msgspec.Struct, frozen=True, kw_only=True):
    """How an earlier worker of a replica ended. Its stderr is in ``OmniSystem.dead_error`` only.

    Attributes:
        generation: Generation number of the worker.
        at: When it ended, in Unix time.
        pid: Its process; None if no process was started.
        exit_code: Its exit code; None if a signal ended it, no process was started, or its exit status is unknown.
        signal: Name of the signal that ended it, such as "SIGKILL"; None if it exited, or its exit status is unknown.
        reason: Why the supervisor ended it, or why no process was started; None if it died by itself.
        node: The node on which it ran; None without a cluster.
    """

    generation: int
    at: float
    pid: int | None
    exit_code: int | None
    signal: str | None
    reason: str | None
    node: str | None = None


class ReplicaHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one replica.

    Attributes:
        replica: Number of the replica within its stage.
        state: "loading", "ready", "restarting", "asleep", "draining" (it is being removed) or "failed".
        standby: Whether it is loaded and gets no requests while others serve its stage.
        note: What its worker is doing, in words.
        generation: Generation number of the current worker.
        restarts: Restarts so far.
        pid: Process of the current worker; None if there is none.
        load_s: Seconds that the current engine took to load; None before.
        last_exit: How the latest worker ended, in words; None if none has.
        retry_in_s: Seconds until a failed replica is tried again; None if it is not.
        history: The ends of the latest workers, oldest first.
        devices: The devices that its last worker got, as in CUDA_VISIBLE_DEVICES; empty on the CPU, and before the
            first worker. On another node, the places among the devices of the node's agent.
        node: The node on which the current worker runs; None if there is no worker, or no cluster.
    """

    replica: int
    state: str
    standby: bool
    note: str
    generation: int
    restarts: int
    pid: int | None
    load_s: float | None
    last_exit: str | None
    retry_in_s: float | None
    history: list[PastExit]
    devices: tuple[str, ...] = ()
    node: str | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a system.

    Attributes:
        ready: Every stage has a ready replica.
        errored: Failed stages leave no route from any input to any output.
        stages: The replicas of each stage.
        error: Why the first failed stage failed; None if none has.
        nodes: The state of each node of a cluster, the parent's first; without a cluster, there are none.
    """

    ready: bool
    errored: bool
    stages: dict[str, list[ReplicaHealth]]
    error: str | None
    nodes: Mapping[str, NodeState] = {}


def replica_health(replica: Replica, *, standby: bool, now: float) -> ReplicaHealth:
    """Return the state of ``replica``. now: on trio's clock."""
    return ReplicaHealth(
        replica=replica.address.replica,
        state=replica.shown_state.value,
        standby=standby,
        note=replica.note,
        generation=replica.generation,
        restarts=replica.restarts,
        pid=replica.worker.pid if replica.worker else None,
        load_s=replica.load_s,
        last_exit=str(replica.history[-1].exit) if replica.history else None,
        retry_in_s=None if replica.retry_at is None else max(0.0, replica.retry_at - now),
        history=[
            PastExit(
                generation=death.generation,
                at=death.at,
                pid=death.exit.pid,
                exit_code=death.exit.exit_code,
                signal=death.exit.signal,
                reason=death.exit.reason,
                node=death.exit.node,
            )
            for death in replica.history
        ],
        devices=replica.devices,
        node=replica.worker.node if replica.worker else None,
    )
