"""A spawner for one pipeline on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from omni_actors.cluster.placement import PARENT, Node, first_workers
from omni_actors.cluster.placements import Placements
from omni_actors.cluster.ray_messages import LOCAL, RayNode
from omni_actors.cluster.ray_nodes import Resources, open_ray
from omni_actors.cluster.spawner import LEASE_S, ClusterSpawner, open_cluster
from omni_actors.cluster.tls import make_credentials
from omni_actors.config import Pipeline
from omni_actors.errors import ConfigError


@asynccontextmanager
async def open_on_ray(pipeline: Pipeline, address: str, *, lease_s: float = LEASE_S) -> AsyncIterator[ClusterSpawner]:
    """Give every worker of a pipeline a place, start an agent on each node, and give the spawner.

    Args:
        pipeline: Its section ``cluster`` says where workers may run, and whether nodes use TLS. Without one, all
            run on the parent's node.
        address: Of Ray's head ("10.0.0.1:6379"), "auto" (the Ray that this machine is a node of), or "local": a Ray
            of one node is started on this machine, with an agent, to try a pipeline's placement.
        lease_s: For how long, in seconds, the workers of a node may run without hearing of the parent.

    Raises ClusterUnavailable (no Ray, or no agent on a node), NoPlace (there is no node for a worker), ConfigError
    (``device_handles``, or no package for TLS).
    """
    if pipeline.device_handles != "none":
        accepted = '"none", because the workers of a cluster pass tensors through rings'
        raise ConfigError(pipeline.file, "device_handles", pipeline.device_handles, accepted)
    async with open_ray(address) as ray:
        here = next(node for node in ray.nodes if node.is_parents)
        nodes = [_node(node, is_parents=node.is_parents and address != LOCAL) for node in ray.nodes]
        if address == LOCAL:
            nodes.insert(0, Node(name=PARENT, cpus=float(len(os.sched_getaffinity(0)))))
        places = Placements(pipeline, nodes)
        places.plan()
        reserved = {node.name: _resources(pipeline, places, node) for node in nodes}
        ray.resources = reserved.__getitem__
        tls = make_credentials() if pipeline.cluster is not None and pipeline.cluster.tls else None
        async with open_cluster(nodes, ray, places, host=here.address, lease_s=lease_s, tls=tls) as spawner:
            yield spawner


def _node(node: RayNode, *, is_parents: bool) -> Node:
    labels = (PARENT, *node.labels) if is_parents else node.labels
    return Node(name=node.name, labels=labels, cpus=node.cpus, gpus=node.gpus)


def _resources(pipeline: Pipeline, places: Placements, node: Node) -> Resources:
    """Return what the first workers on a node need there: CPUs for their threads, as far as it has them, and GPUs."""
    here = [(address, at) for address in first_workers(pipeline) if (at := places.of(address)) and at.node == node.name]
    threads = sum(pipeline.threads(address.stage) for address, _ in here)
    return min(float(threads), node.cpus), float(len(_distinct(at.devices for _, at in here)))


def _distinct(devices: Iterable[tuple[str, ...]]) -> set[str]:
    return {device for each in devices for device in each}
