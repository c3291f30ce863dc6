"""A spawner for one pipeline on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Final

import trio
from msgspec import structs

from omni_actors import log_events
from omni_actors.cluster.placement import PARENT, Node, first_workers
from omni_actors.cluster.placements import Placements
from omni_actors.cluster.ray_messages import LOCAL, RayNode
from omni_actors.cluster.ray_nodes import RayAgents, Resources, open_ray
from omni_actors.cluster.spawner import ClusterSpawner, open_cluster
from omni_actors.cluster.tls import make_credentials
from omni_actors.cluster.transfers import require_nixl
from omni_actors.config import Cluster, Pipeline, Stage
from omni_actors.config.devices import VISIBLE, DeviceLayoutError, configured_devices, stage_layout, visible_devices
from omni_actors.errors import ConfigError, RayUnavailable
from omni_actors.protocol.messages import Address

HELD_S: Final = 30.0
"""Seconds that opening waits for devices which agents of other systems hold."""
LOOK_S: Final = 1.0


@asynccontextmanager
async def open_on_ray(pipeline: Pipeline, address: str) -> AsyncIterator[ClusterSpawner]:
    """Give every worker of a pipeline a place, start an agent on each node, and give the spawner.

    Args:
        pipeline: Its section ``cluster`` says where workers may run, how long leases are, and whether nodes use TLS or
            NIXL. Without one, all run on the parent's node.
        address: Of Ray's head ("10.0.0.1:6379"), "auto" (the Ray that this machine is a node of), or "local": a Ray
            of one node is started on this machine, with an agent, to try a pipeline's placement. The node has all
            labels that the pipeline names but "parent".

    A node on which no agent can be started is left out, with a warning in the log, if the others have places for all
    workers. A node that joins Ray later is used for workers that need a place then. Raises RayUnavailable,
    ClusterUnavailable (too few nodes have an agent), NoPlace (there is no node for a worker), ConfigError
    (``device_handles``, or no package for TLS or NIXL).
    """
    settings = pipeline.cluster or Cluster()
    if settings.transport == "nixl":
        require_nixl(pipeline.file)
    if pipeline.device_handles != "none":
        accepted = '"none", because the workers of a cluster pass tensors through rings'
        raise ConfigError(pipeline.file, "device_handles", pipeline.device_handles, accepted)
    named = [label for label in dict.fromkeys(settings.nodes.values()) if label != PARENT]
    async with open_ray(address, named if address == LOCAL else ()) as ray:
        here = next((node for node in ray.nodes if node.is_parents), None)
        if here is None:
            raise RayUnavailable(address, "this machine is not one of its nodes now")
        await _wait_for_devices(pipeline, ray, parents_too=address == LOCAL)
        nodes = [_node(pipeline, node, is_parents=node.is_parents and address != LOCAL) for node in ray.nodes]
        if address == LOCAL:
            nodes.insert(0, Node(name=PARENT, cpus=float(len(os.sched_getaffinity(0)))))
        places = Placements(pipeline, nodes)
        places.plan()
        reserved = {node.name: _resources(pipeline, node, _workers_on(pipeline, places, node)) for node in nodes}
        kinds = {node.name: (node.labels, node.gpus) for node in ray.nodes}
        ray.resources = reserved.__getitem__
        tls = make_credentials() if settings.tls else None

        def replan() -> None:
            plan_again(pipeline, places)
            for node in nodes:
                reserved[node.name] = _resources(pipeline, node, _workers_on(pipeline, places, node))

        async with open_cluster(
            nodes,
            ray,
            places,
            host=here.address,
            lease_s=settings.lease_s,
            tls=tls,
            transport=settings.transport,
            replan=replan,
        ) as spawner:

            def take(found: RayNode, node: Node) -> None:
                """Take a node as it is now, with what its next agent reserves for the workers that wait."""
                waiting = [each for each in first_workers(pipeline) if places.of(each) is None]
                here = [each for each in waiting if _may_have(pipeline, node, each.stage)]
                kinds[node.name] = (found.labels, found.gpus)
                reserved[node.name] = _resources(pipeline, node, here)

            def resources(name: str) -> Resources:
                """Return what the agent reserves that is started now, on a node that may have come back as another."""
                found = next(node for node in ray.nodes if node.name == name)
                if kinds[name] != (found.labels, found.gpus):
                    take(found, node := _node(pipeline, found))
                    spawner.change(node)
                return reserved[name]

            def on_found(gone: Collection[str]) -> None:
                for name in gone:
                    if spawner.remove(name):
                        ray.forget(name)
                states = spawner.nodes()
                for found in ray.nodes:
                    if (state := states.get(found.name)) is None:
                        take(found, node := _node(pipeline, found))
                        spawner.add(node)
                    elif state.agent_pid and kinds[found.name] == (found.labels, found.gpus):
                        held = reserved[found.name][1]
                        node = _node(pipeline, found, held)
                        if node.gpus > held and places.would_help(node):
                            take(found, node)
                            spawner.renew(node)

            ray.resources, ray.on_found = resources, on_found
            yield spawner


async def _wait_for_devices(pipeline: Pipeline, ray: RayAgents, *, parents_too: bool) -> None:
    """Wait for devices that agents of other systems hold: if one has just been killed, they end by themselves.

    If devices are missing, Ray is looked at twice: it says some moments after an agent's end what is free.
    parents_too: whether an agent is to run on the parent's node.
    """
    theirs, looks, waits = set[str](), 0, False
    with trio.move_on_after(HELD_S):
        while True:
            theirs |= await ray.look()
            looks += 1
            others = [node for node in ray.nodes if parents_too or not node.is_parents]
            lacking = [node.name for node in others if _lacks_devices(pipeline, node)]
            held = [name for name in lacking if name in theirs]
            if not lacking or (not held and looks > 1):
                return
            if held and not waits:
                log_events.record(log_events.DevicesAwaited(nodes=tuple(held), at_most_s=HELD_S))
                waits = True
            await trio.sleep(LOOK_S)


def _lacks_devices(pipeline: Pipeline, node: RayNode) -> bool:
    return node.free_gpus < min(node.gpus, most_devices(pipeline, Node(name=node.name, labels=node.labels)))


def plan_again(pipeline: Pipeline, places: Placements) -> None:
    """Give all first workers new places on the nodes that are left, before one is started. Raises NoPlace."""
    for address in first_workers(pipeline):
        places.release(address)
    places.plan()


def _node(pipeline: Pipeline, found: RayNode, held: float = 0.0, *, is_parents: bool = False) -> Node:
    """Return a node as placement sees it. Its devices: what its agent will reserve, or what the parent sees.

    held: how many devices its present agent has, which the next one may have.
    """
    labels = (PARENT, *found.labels) if is_parents else found.labels
    node = Node(name=found.name, labels=labels, cpus=found.cpus)
    gpus = min(found.free_gpus + int(held), found.gpus, most_devices(pipeline, node))
    if is_parents:
        gpus = len(visible_devices(os.environ.get(VISIBLE), found.gpus) or ())
    return structs.replace(node, gpus=gpus)


def most_devices(pipeline: Pipeline, node: Node) -> int:
    """Return how many devices workers may ever get on a node, by its labels and the most workers of each stage.

    It is one more than their highest place, so a stage with ``device: cuda:1`` needs two.
    """
    most = 0
    for name, stage in pipeline.stages.items():
        if configured_devices(stage) and _may_have(pipeline, node, name):
            most = max(most, _most_of_stage(stage))
    return most


def _may_have(pipeline: Pipeline, node: Node, stage: str) -> bool:
    """Return whether a node has the label that workers of a stage need."""
    label = PARENT if pipeline.cluster is None else pipeline.cluster.nodes.get(stage)
    return label is None or node.has(label)


def _most_of_stage(stage: Stage) -> int:
    for workers in range(max(1, stage.most_workers), 0, -1):
        with suppress(DeviceLayoutError):  # a pool is for fewer
            devices = {device for each in stage_layout(stage, workers, visible=None) for device in each}
            places = [int(device) for device in devices if device.isdigit()]
            return max(1 + max(places, default=-1), len(devices))
    return 0


def _workers_on(pipeline: Pipeline, places: Placements, node: Node) -> list[Address]:
    """Return the first workers that have their place on a node."""
    return [each for each in first_workers(pipeline) if (at := places.of(each)) and at.node == node.name]


def _resources(pipeline: Pipeline, node: Node, workers: Iterable[Address]) -> Resources:
    """Return what the agent of a node reserves there: CPUs for these workers, as far as it has them, and GPUs."""
    threads = sum(pipeline.threads(address.stage) for address in workers)
    return min(float(threads), node.cpus), float(node.gpus)
