"""The live state: what happens in a running system now, for the page, for ``omni-actors top`` and for other viewers.

Rules
1. ``live_state`` only reads. It waits for nothing, and costs no more than the stages, rings and requests that it shows.
2. Everything is bounded: ``SHOWN`` requests that have not ended, the latest that have, ``DEATHS`` of each replica, and
   ``STDERR_LINES`` lines of each death and of each failure.
3. Nothing in it changes by the mere passing of time, except ``at``: what lasts has the time at which it began. So two
   live states of an idle system differ in ``at`` only.
4. Rates are not in it. A viewer computes them from two live states, their counters and their ``at``.
5. A value that is not known is missing, and never null, so that a JSON merge patch (RFC 7396) can express every change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec
import trio

from omni_actors.config import Pipeline
from omni_actors.errors import Death
from omni_actors.orchestrator.orchestrator import Orchestrator
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.nodes import Links, LinkState, NodeCondition, NodeState
from omni_actors.supervisor.replica import Replica
from omni_actors.system.health import Health
from omni_actors.system.live_requests import EPOCH, STDERR_LINES, LiveRequest, live_request
from ringbuf import RingStatistics

SHOWN = 32
DEATHS = 4


class LiveDeath(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The death of a worker.

    Attributes:
        generation: Its generation number.
        at: When it died, in Unix time.
        how: How, in words.
        pid: Its process; None if no process was started.
        signal, exit_code: The signal that ended it, or its exit code; both None if no process was started, or its exit
            status is unknown.
        reason: Why the supervisor ended it, or why no process was started; None if it died by itself.
        stderr: The last lines that it wrote to stderr.
        node: The node on which it ran; None without a cluster.
    """

    generation: int
    at: float
    how: str
    pid: int | None = None
    signal: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    stderr: list[str] = []
    node: str | None = None


class LiveReplica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica, as in ``ReplicaHealth``, and what it has to do.

    Attributes:
        requests: Requests that it holds.
        down_since: Since when it has had no ready worker after one that has died, was killed or was lost with its
            node, in Unix time; None if it is not down.
        retry_at: When a replica that was given up is tried again, in Unix time.
        deaths: Its latest deaths, oldest first.
        figures: The measurements of its engine in its last answer to a ping.
    """

    state: str
    standby: bool
    note: str
    generation: int
    restarts: int
    requests: int
    pid: int | None = None
    load_s: float | None = None
    devices: tuple[str, ...] = ()
    down_since: float | None = None
    retry_at: float | None = None
    deaths: list[LiveDeath] = []
    figures: dict[str, float] = {}
    node: str | None = None


class LiveStage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stage.

    Attributes:
        engine: The name of its engine.
        wanted: How many replicas it is to have, standbys aside.
        accepts: The kinds of input that clients send to it.
        inputs: The stages that feed it.
        emits: The modality of its output to clients; None if it has none.
        step_timeout_s: After this time without progress, its worker is replaced.
        replicas: By number.
    """

    engine: str
    wanted: int
    accepts: list[str]
    inputs: list[str]
    step_timeout_s: float
    replicas: dict[str, LiveReplica]
    emits: str | None = None


class LiveRing(msgspec.Struct, frozen=True, kw_only=True):
    """A ring. The counters begin with 0 when a worker at one of its ends is replaced.

    Attributes:
        producer, consumer: Stages with their replica's number, such as "llm.0"; the client is "client.0".
        capacity, used: Bytes; ``used`` includes headers and padding.
        messages, payload_bytes: What was sent since the ring's creation.
    """

    producer: str
    consumer: str
    capacity: int
    used: int
    messages: int
    payload_bytes: int


class LiveNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node of a cluster, as in ``NodeState``, without what is left of its lease."""

    state: NodeCondition
    since: float
    why: str | None = None
    agent_pid: int | None = None
    parent: bool = False


class LiveState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The live state of a system.

    Attributes:
        at: Unix time.
        pipeline: Its name.
        ready, errored, error: As in ``Health``.
        in_flight, waiting, max_requests: Requests that take a place, those of them that wait for a replica, and the
            limit.
        stages: By name, in the order of the pipeline.
        rings: By "producer>consumer".
        links: The links between nodes, by the name of their ring.
        nodes: The nodes of a cluster, the parent's first; without a cluster, there are none.
        requests: By identifier: those that run, the oldest first, and those that have ended.
    """

    at: float
    pipeline: str
    ready: bool
    errored: bool
    in_flight: int
    waiting: int
    max_requests: int
    stages: dict[str, LiveStage]
    rings: dict[str, LiveRing]
    requests: dict[str, LiveRequest]
    error: str | None = None
    links: dict[str, LinkState] = {}
    nodes: dict[str, LiveNode] = {}


class TrioClock:
    """Converts times of trio's clock to Unix times, always by the same offset."""

    def __init__(self, clock: trio.abc.Clock) -> None:
        self._offset = time.time() - clock.current_time()

    def unix(self, at: float | None) -> float | None:
        """Return the Unix time, rounded to milliseconds."""
        return None if at is None else round(self._offset + at, 3)


def live_state(
    pipeline: Pipeline,
    orchestrator: Orchestrator,
    replicas: Iterable[Replica],
    *,
    rings: Mapping[tuple[Address, Address], RingStatistics],
    links: Links,
    recent: Iterable[LiveRequest],
    health: Health,
    clock: TrioClock,
) -> LiveState:
    """Return the live state of a system from its parts.

    rings: the counters of each ring, by producer and consumer. links: those between nodes. recent: requests that have
    ended.
    """
    by_stage: dict[str, dict[str, LiveReplica]] = {name: {} for name in pipeline.stages}
    for replica in replicas:
        by_stage[replica.address.stage][str(replica.address.replica)] = _replica(replica, orchestrator, clock)
    wanted = orchestrator.pools.wanted
    running = islice(orchestrator.open_requests.values(), SHOWN)
    shown = [*recent, *(live_request(each, pipeline) for each in running)]
    return LiveState(
        at=round(EPOCH + time.monotonic(), 3),
        pipeline=pipeline.name,
        ready=health.ready,
        errored=health.errored,
        error=health.error,
        in_flight=orchestrator.in_flight,
        waiting=orchestrator.queued,
        max_requests=pipeline.limits.max_requests,
        stages={
            name: LiveStage(
                engine=stage.engine,
                wanted=wanted.get(name, 0),
                accepts=list(stage.accepts),
                inputs=list(stage.inputs),
                emits=stage.emits,
                step_timeout_s=stage.step_timeout_s,
                replicas=by_stage[name],
            )
            for name, stage in pipeline.stages.items()
        },
        rings={
            f"{producer}>{consumer}": _ring(producer, consumer, each) for (producer, consumer), each in rings.items()
        },
        requests={each.name: each for each in shown},
        links={f"{producer}>{consumer}": link for (producer, consumer), link in links.items()},
        nodes={name: _node(node) for name, node in health.nodes.items()},
    )


def _replica(replica: Replica, orchestrator: Orchestrator, clock: TrioClock) -> LiveReplica:
    return LiveReplica(
        state=replica.shown_state.value,
        standby=orchestrator.pools.is_standby(replica),
        note=replica.note,
        generation=replica.generation,
        restarts=replica.restarts,
        requests=orchestrator.pools.loads[replica.address],
        pid=replica.worker.pid if replica.worker else None,
        load_s=None if replica.load_s is None else round(replica.load_s, 3),
        devices=replica.devices,
        down_since=clock.unix(None if replica.outage is None else replica.outage.began_at),
        retry_at=clock.unix(replica.retry_at),
        deaths=[_death(each) for each in [*replica.history][-DEATHS:]],
        figures={name: round(value, 4) for name, value in replica.gauges.items()},
        node=replica.worker.node if replica.worker else None,
    )


def _node(node: NodeState) -> LiveNode:
    return LiveNode(
        state=node.state, since=round(node.since, 3), why=node.why, agent_pid=node.agent_pid, parent=node.parent
    )


def _death(death: Death) -> LiveDeath:
    return LiveDeath(
        generation=death.generation,
        at=round(death.at, 3),
        how=str(death.exit),
        pid=death.exit.pid,
        signal=death.exit.signal,
        exit_code=death.exit.exit_code,
        reason=death.exit.reason,
        stderr=list(death.exit.stderr_tail[-STDERR_LINES:]),
        node=death.exit.node,
    )


def _ring(producer: Address, consumer: Address, statistics: RingStatistics) -> LiveRing:
    return LiveRing(
        producer=str(producer),
        consumer=str(consumer),
        capacity=statistics.capacity,
        used=statistics.used,
        messages=statistics.messages,
        payload_bytes=statistics.payload_bytes,
    )
