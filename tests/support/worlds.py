"""The worlds of the tests: what starts the workers of the systems that they open.

======== ==============================================================================================================
local    the default: workers are processes of this one's
agents   every worker runs under one of two agents, which are processes of this machine; stages that an edge joins run
         under different ones, so the edges between stages and to the client are links
ray      the same, with agents that are actors on two nodes of a Ray cluster, which the session starts
======== ==============================================================================================================

Rules
1. A test does not know its world. What is replaced is the function by which ``OmniSystem.open`` gets its spawner. A
   test that gives a system a spawner or a cluster itself has that one.
2. A worker of another world has the variables of the environment that tests have set, as a child would.
3. That each worker has an agent as its parent is checked as it starts.
4. No node is lost because a process of a busy machine stands still: its lease is long.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext

import psutil
import pytest

from omni_actors.cluster.remote_agent import RemoteAgent
from omni_actors.cluster.spawner import ClusterSpawner
from omni_actors.config import Pipeline
from omni_actors.protocol.messages import Address
from omni_actors.stress import nodes
from omni_actors.stress.nodes import AGENTS, open_nodes
from omni_actors.supervisor.process import NO_VARIABLES, EdgeRing, Spawner, Worker
from omni_actors.system import OmniSystem, omni_system
from tests.cluster.ray_cluster import ray_cluster
from tests.support.echo_systems import until

LEASE_S = 12.0
"""Rule 4."""


class WorldSpawner:
    """A spawner of a cluster by rules 2 and 3. before: the environment that the nodes have."""

    def __init__(self, spawner: ClusterSpawner, before: Mapping[str, str]) -> None:
        self._spawner, self._before = spawner, before

    @property
    def agents(self) -> Mapping[str, RemoteAgent]:
        return self._spawner.agents

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> tuple[str, ...] | None:
        return await self._spawner.wait_place(address, on_waiting)

    @asynccontextmanager
    async def spawn(
        self,
        address: Address,
        mailbox_capacity: int,
        *,
        environment: Mapping[str, str] = NO_VARIABLES,
        lock_fds: Sequence[int] = (),
    ) -> AsyncIterator[Worker]:
        set_since = dict(os.environ.items() - self._before.items())
        spawned = self._spawner.spawn(
            address, mailbox_capacity, environment={**set_since, **environment}, lock_fds=lock_fds
        )
        async with spawned as worker:
            try:
                parent = psutil.Process(worker.pid).ppid()
            except psutil.NoSuchProcess:  # it has died already
                pass
            else:
                assert parent in {agent.pid for agent in self.agents.values()}, "a worker without an agent"
            yield worker

    def release(self, address: Address) -> None:
        self._spawner.release(address)

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> EdgeRing:
        return self._spawner.create_ring(producer, consumer, capacity, generation)


async def wait_for_clocks(omni: OmniSystem, within_s: float) -> None:
    """Wait until the clock of each node is known to ``within_s``. The nodes have one clock in truth."""
    spawner = omni._supervisor._spawner
    if isinstance(spawner, WorldSpawner):
        agents = spawner.agents.values()
        await until(lambda: all(min(each._behind, default=math.inf) < within_s for each in agents))


@contextmanager
def in_world(name: str) -> Iterator[None]:
    """Let the systems that are opened within the block start their workers in a world other than "local"."""
    with ray_cluster("n1", "n2") if name == "ray" else nullcontext() as started, pytest.MonkeyPatch.context() as patch:
        before = dict(os.environ)
        where = AGENTS if started is None else started.address
        patch.setattr(nodes, "LEASE_S", LEASE_S)
        patch.setattr(omni_system, "_spawner", _spawner_of(where, before))
        yield


def _spawner_of(
    where: str, before: Mapping[str, str]
) -> Callable[[Pipeline, Spawner | None, str | None], AbstractAsyncContextManager[Spawner]]:
    as_ever = omni_system._spawner

    @asynccontextmanager
    async def give(pipeline: Pipeline, given: Spawner | None, cluster: str | None) -> AsyncIterator[Spawner]:
        if given is None and cluster is None:
            async with open_nodes(pipeline, where) as spawner:
                yield WorldSpawner(spawner, before)
        else:
            async with as_ever(pipeline, given, cluster) as spawner:
                yield spawner

    return give
