"""Where the workers of a run are: on this machine, under agents that share it, or on a Ray cluster that does.

Rules
1. Each stage has a node of its own in turn, downstream of the client: the first stages have the first node, those that
   they feed the second one. So every worker runs under an agent, every edge to or from the client crosses nodes, and
   each stage has an input that does.
2. The nodes share this machine, so that the harness can hit their processes by pid, and look for what they leave.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from msgspec import structs

from omni_actors.cluster.interfaces import AgentStarter
from omni_actors.cluster.placement import PARENT, Node
from omni_actors.cluster.placements import Placements
from omni_actors.cluster.ray_nodes import open_ray
from omni_actors.cluster.spawner import ClusterSpawner, open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.config import Cluster, Pipeline
from omni_actors.errors import ClusterUnavailable
from omni_actors.supervisor.process import LocalSpawner

AGENTS: Final = "agents"
"""In place of Ray's address: two nodes that are agents started as processes, without Ray."""
NODES: Final = ("n1", "n2")
LEASE_S: Final = 4.0
"""Shorter than a server's, so that a run has many losses of nodes."""


def across(pipeline: Pipeline, nodes: Sequence[str]) -> Pipeline:
    """Return the pipeline with each stage on one of these nodes, by rule 1.

    >>> from omni_actors import config
    >>> across(config.load("echo"), ["a", "b"]).cluster.nodes
    {'first': 'a', 'second': 'b'}
    """
    depths: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in depths:
            depths[name] = 1 + max((depth(each) for each in pipeline.stages[name].inputs), default=-1)
        return depths[name]

    placed = {name: nodes[depth(name) % len(nodes)] for name in pipeline.stages}
    return structs.replace(pipeline, cluster=Cluster(nodes=placed))


@asynccontextmanager
async def open_nodes(pipeline: Pipeline, cluster: str | None) -> AsyncIterator[LocalSpawner | ClusterSpawner]:
    """Start an agent on each node, and give a spawner that places the pipeline's workers by rule 1.

    cluster: ``AGENTS``, or an address of a Ray as for ``OmniSystem.open``; None: there are no nodes but this process's.

    Raises ClusterUnavailable: there is no Ray, or it has no node on this machine.
    """
    if cluster is None:
        yield LocalSpawner()
        return
    if cluster == AGENTS:
        async with _open(pipeline, NODES, SubprocessAgents(), "127.0.0.1") as spawner:
            yield spawner
        return
    async with open_ray(cluster) as ray:
        here = next(node for node in ray.nodes if node.is_parents)
        names = [node.name for node in ray.nodes if node.address == here.address and not node.is_parents]
        if elsewhere := {node.name: "another machine" for node in ray.nodes if node.address != here.address}:
            raise ClusterUnavailable(elsewhere)
        async with _open(pipeline, names or [here.name], ray, here.address) as spawner:
            yield spawner


@asynccontextmanager
async def _open(
    pipeline: Pipeline, names: Sequence[str], starter: AgentStarter, host: str
) -> AsyncIterator[ClusterSpawner]:
    nodes = [Node(name=PARENT), *(Node(name=name) for name in names)]
    places = Placements(across(pipeline, names), nodes)
    places.plan()
    async with open_cluster(nodes, starter, places, host=host, lease_s=LEASE_S) as spawner:
        yield spawner
