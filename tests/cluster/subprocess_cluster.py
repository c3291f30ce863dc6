"""Systems whose stages run on "nodes" of this machine: one agent each, started as a process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio

from omni_actors import OmniSystem
from omni_actors.cluster.placement import PARENT, Node, Place
from omni_actors.cluster.spawner import ClusterSpawner, open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.cluster.tls import Credentials
from omni_actors.cluster.transfers import Transport
from omni_actors.config import Pipeline
from omni_actors.errors import NoPlace
from omni_actors.protocol.messages import Address


class FixedPlaces:
    """Each stage runs on the first of its nodes that is not lost, and waits if there is none. See ``Places``."""

    def __init__(self, nodes: Mapping[str, str | Sequence[str]]) -> None:
        self._nodes = {stage: [each] if isinstance(each, str) else each for stage, each in nodes.items()}
        self._lost = set[str]()
        self._changed = trio.lowlevel.ParkingLot()

    def find(self, address: Address) -> Place:
        for node in self._nodes[address.stage]:
            if node not in self._lost:
                return Place(node, address.replica, ())
        raise NoPlace(address.stage, address.replica, dict.fromkeys(self._nodes[address.stage], "it is lost"))

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> Place:
        while True:
            try:
                return self.find(address)
            except NoPlace as error:
                on_waiting(str(error))
            await self._changed.park()

    def release(self, address: Address) -> None: ...

    def join(self, node: Node) -> None:
        self._lost.discard(node.name)
        self._changed.unpark_all()

    def lose(self, name: str) -> None:
        self._lost.add(name)

    def forget(self, name: str) -> None: ...


class ClusterOf:
    """A running system, its spawner, and what started its agents."""

    def __init__(self, omni: OmniSystem, spawner: ClusterSpawner, agents: SubprocessAgents) -> None:
        self.omni, self.spawner, self.agents = omni, spawner, agents


def named(*nodes: str) -> list[Node]:
    """Return nodes of these names, and the parent's."""
    return [Node(name=node) for node in dict.fromkeys((PARENT, *nodes))]


@asynccontextmanager
async def open_on_nodes(
    pipeline: Pipeline,
    nodes: Mapping[str, str],
    *,
    lease_s: float = 10.0,
    tls: Credentials | None = None,
    transport: Transport = "tcp",
    commands: Mapping[str, Sequence[str]] | None = None,
) -> AsyncIterator[ClusterOf]:
    """Open a pipeline with each stage on the node that ``nodes`` names for it; "parent" is this process's.

    commands: what precedes the agent's command on some nodes.
    """
    agents = SubprocessAgents(commands)
    async with (
        open_cluster(
            named(*nodes.values()), agents, FixedPlaces(nodes), lease_s=lease_s, tls=tls, transport=transport
        ) as spawner,
        OmniSystem.open(pipeline, spawner=spawner) as omni,
    ):
        yield ClusterOf(omni, spawner, agents)
