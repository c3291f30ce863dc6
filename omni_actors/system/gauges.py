"""The figures that are read from a system at each scrape of its metrics."""

from __future__ import annotations

from collections.abc import Iterable

from omni_actors.metrics import Gauges
from omni_actors.orchestrator.orchestrator import Orchestrator
from omni_actors.supervisor.edges import Edges
from omni_actors.supervisor.nodes import HasNodes
from omni_actors.supervisor.replica import Replica, ReplicaState


def gauges(orchestrator: Orchestrator, replicas: Iterable[Replica], edges: Edges, cluster: HasNodes | None) -> Gauges:
    """Yield every figure of a system: of its requests, of each replica, and of each ring, node and link."""
    readers = orchestrator.readers
    for name, help, value in (
        (
            "requests_in_flight",
            "Admitted requests that have not ended, or have much unread output",
            orchestrator.in_flight,
        ),
        ("requests_paused", "Requests whose stages are paused until their client reads", readers.unread.paused),
        ("unread_bytes", "Bytes of output that clients have not read", readers.unread.total),
        ("requests_queued", "Admitted requests that wait for a stage to become ready", orchestrator.queued),
    ):
        yield f"omni_{name}", help, {}, value
    replicas = list(replicas)
    for stage, wanted in orchestrator.pools.wanted.items():
        labels = {"stage": stage}
        ready = sum(each.address.stage == stage and each.state is ReplicaState.READY for each in replicas)
        yield "omni_stage_replicas_wanted", "Replicas that a stage is to have, standbys aside", labels, wanted
        yield "omni_stage_replicas_ready", "Replicas of a stage that are ready, standbys included", labels, ready
    for replica in replicas:
        labels = {"stage": replica.address.stage, "replica": str(replica.address.replica)}
        is_ready = float(replica.state is ReplicaState.READY)
        load = orchestrator.pools.loads[replica.address]
        yield "omni_stage_requests", "Requests dispatched to a replica", labels, load
        yield "omni_stage_restarts", "Restarts of a replica", labels, replica.restarts
        is_standby = float(orchestrator.pools.is_standby(replica))
        yield "omni_stage_standby", "1 while a replica is a standby", labels, is_standby
        yield "omni_stage_ready", "1 while a replica is ready", labels, is_ready
        for figure, measured in replica.gauges.items():
            help = "Figures of an engine, as of its last answer to a ping (one each step_timeout_s / 20)"
            yield "omni_engine", help, {**labels, "name": figure}, measured
            if figure.startswith("prefix_cache_"):
                yield f"omni_{figure}", "Positions looked up, and found, or bytes of a prefix cache", labels, measured
    for (producer, consumer), ring in edges.statistics().items():
        labels = {"producer": str(producer), "consumer": str(consumer)}
        yield "omni_ring_used_bytes", "Bytes in a ring now", labels, ring.used
        yield "omni_ring_capacity_bytes", "Capacity of a ring", labels, ring.capacity
        yield "omni_ring_payload_bytes", "Payload that has crossed a ring", labels, ring.payload_bytes
    if cluster is not None:
        yield from _of_nodes(cluster, replicas)


def _of_nodes(cluster: HasNodes, replicas: Iterable[Replica]) -> Gauges:
    for name, node in cluster.nodes().items():
        yield "omni_node_alive", "1 while a node of the cluster is alive", {"node": name}, float(node.state == "alive")
    for replica in replicas:
        if (worker := replica.worker) is not None and worker.node is not None:
            labels = {"stage": replica.address.stage, "replica": str(replica.address.replica), "node": worker.node}
            yield "omni_stage_node", "1 for the node on which a replica's worker runs", labels, 1.0
    for (producer, consumer), link in cluster.links().items():
        ends = {"producer": str(producer), "consumer": str(consumer)}
        labels = {**ends, "from_node": link.from_node, "to_node": link.to_node}
        yield "omni_link_messages", "Records that have crossed a link between two nodes", labels, link.messages
        yield "omni_link_payload_bytes", "Payload that has crossed a link", labels, link.payload_bytes
        yield (
            "omni_link_waiting_bytes",
            "Bytes that wait in the ring at the sending end of a link",
            labels,
            link.waiting_bytes,
        )
