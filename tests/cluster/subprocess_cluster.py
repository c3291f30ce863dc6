"""Systems whose stages run on "nodes" of this machine: one agent each, started as a process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from omni_actors import OmniSystem
from omni_actors.cluster.spawner import ClusterSpawner, open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.config import Pipeline


class ClusterOf:
    """A running system, its spawner, and what started its agents."""

    def __init__(self, omni: OmniSystem, spawner: ClusterSpawner, agents: SubprocessAgents) -> None:
        self.omni, self.spawner, self.agents = omni, spawner, agents


@asynccontextmanager
async def open_on_nodes(
    pipeline: Pipeline, nodes: Mapping[str, str], *, lease_s: float = 10.0
) -> AsyncIterator[ClusterOf]:
    """Open a pipeline with each stage on the node that ``nodes`` names for it; "parent" is this process's."""
    agents = SubprocessAgents()
    others = [node for node in dict.fromkeys(nodes.values()) if node != "parent"]
    async with (
        open_cluster(others, agents, lambda address: nodes[address.stage], lease_s=lease_s) as spawner,
        OmniSystem.open(pipeline, spawner=spawner) as omni,
    ):
        yield ClusterOf(omni, spawner, agents)
