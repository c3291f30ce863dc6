"""A simulated cluster: starts workers on nodes, through the interface by which the supervisor starts processes.

Rules
1. Placement (``cluster.placements``) and leases (``cluster.lease``) are the real code. Simulated are the nodes, their
   agents, the network and the links.
2. The first node is the parent's. Its workers are connected directly.
3. When a worker starts, no other process with its address runs, on whichever node. So no two generations of an address
   ever write at once.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from omni_actors.cluster.placement import Node
from omni_actors.cluster.placements import Placements
from omni_actors.config import Pipeline
from omni_actors.errors import LINK_LOST
from omni_actors.protocol.messages import CLIENT_ADDRESS, Address
from omni_actors.stress.simulation.agent import SimulatedAgent
from omni_actors.stress.simulation.edge_rings import EdgeRings
from omni_actors.stress.simulation.network import Cut, Network
from omni_actors.stress.simulation.remote_worker import RemoteWorker
from omni_actors.stress.simulation.worker import Note, OnStart, SimulatedWorker, WorkerBehavior
from omni_actors.supervisor.process import EdgeRing, Worker
from ringbuf import Ring

LINK_SILENT_S = 15.0
"""A link breaks when its peer is silent for so long (TCP_USER_TIMEOUT)."""
REJOIN_S = 5.0
"""How often the parent tries to start an agent on a node that it has lost."""


class SimulatedCluster:
    """Starts workers on simulated nodes. ``nursery`` outlives the system, and has its tasks.

    behavior: as for ``SimulatedSpawner``.
    explain: called with the pid of each worker that may die because of the nodes or the network.
    violated: called with each fact that must not be.
    rates: how fast the clock of each node runs.
    """

    nursery: trio.Nursery

    def __init__(
        self,
        pipeline: Pipeline,
        nodes: Sequence[Node],
        network: Network,
        *,
        behavior: Callable[[Address, int], WorkerBehavior],
        note: Note,
        explain: Callable[[int], None],
        violated: Callable[[str], None],
        rates: Sequence[float],
    ) -> None:
        self.network, self.placements = network, Placements(pipeline, nodes)
        self._colocate = pipeline.cluster.colocate if pipeline.cluster is not None else ()
        self._behavior, self._note, self._explain, self._violated = behavior, note, explain, violated
        self._nodes = {node.name: node for node in nodes}
        self._rates = {node.name: rate for node, rate in zip(nodes, rates, strict=True)}
        self.parent = nodes[0].name
        self._pids = itertools.count(1)
        self._refused: Address | None = None
        self.workers: list[SimulatedWorker] = []
        """All workers so far."""
        self.living: dict[Address, SimulatedWorker] = {}
        """The current worker of each address, as the parent knows it."""
        self.on_start: OnStart = lambda address, message: None
        self._views: dict[Address, SimulatedWorker | RemoteWorker] = {}
        self.node_of: dict[Address, str] = {CLIENT_ADDRESS: self.parent}
        self._started: set[SimulatedWorker] = set()
        self._running: dict[SimulatedWorker, str] = {}
        """The processes that run, on whichever node, and their nodes."""
        self._rings: list[Ring] = []
        self.edges: dict[int, EdgeRings] = {}
        """The edges on other nodes than the parent's that are not closed everywhere, by generation."""
        self.down: set[str] = set()
        """The nodes without power."""
        self.agents = {node.name: self._agent(node.name) for node in nodes[1:]}

    def _agent(self, node: str) -> SimulatedAgent:
        return SimulatedAgent(
            node,
            self.parent,
            rate=self._rates[node],
            network=self.network,
            descriptors=lambda node, generation: self.edges[generation].descriptors_at(node),
            run=self._start_process,
            on_end=self._on_end,
            on_lost=self._on_lost,
        )

    # as the supervisor sees it

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> None:
        """Wait until there is a node for a worker."""

        def waiting(reason: str) -> None:
            self._note(reason)
            on_waiting(reason)

        await self.placements.wait_place(address, waiting)

    @asynccontextmanager
    async def spawn(self, address: Address, mailbox_capacity: int, **inherited: Any) -> AsyncIterator[Worker]:
        pid = next(self._pids)
        behavior = self._behavior(address, pid)
        process = SimulatedWorker(
            address=address, pid=pid, behavior=behavior, mailbox_capacity=mailbox_capacity, note=self._note
        )
        node = self.placements.find(address).node
        self._note(f"{process} is spawned on {node}: {behavior}")
        self._refused = address if behavior.refused else None
        self.living[address], self.node_of[address] = process, node
        self.workers.append(process)
        try:
            async with self._connected(process, mailbox_capacity, node) as worker:
                self._views[address] = worker
                try:
                    yield worker
                finally:
                    worker.kill()
                    with trio.CancelScope(shield=True):
                        await worker.wait_dead()
        finally:
            del self.living[address], self.node_of[address], self._views[address]

    @asynccontextmanager
    async def _connected(
        self, process: SimulatedWorker, capacity: int, node: str
    ) -> AsyncIterator[SimulatedWorker | RemoteWorker]:
        """Start a process on a node. Leaving the block frees what it has."""
        if node == self.parent:
            process.on_start = self.on_start
            self._start_process(process, None)
            try:
                yield process
            finally:
                process.free()
            return
        agent = self.agents[node]
        if any(cut.touches(node) for cut in self.network.cuts):
            self._explain(process.pid)
        worker = RemoteWorker(process, capacity, agent, self.on_start)
        agent.workers.append(worker)
        agent.engage()
        agent.to_agent(partial(agent.start, process))
        try:
            yield worker
        finally:
            agent.workers.remove(worker)
            if process not in self._started:
                process.kill()
                process.free()

    @property
    def congested(self) -> set[str]:
        """The stages with a worker that is congested, as far as the parent knows."""
        return {address.stage for address, worker in self._views.items() if worker.congested}

    def release(self, address: Address) -> None:
        self.placements.release(address)

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> EdgeRing:
        if self._refused in (producer, consumer):
            self._refused = None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        nodes = self.node_of[producer], self.node_of[consumer]
        if nodes == (self.parent, self.parent):
            ring = Ring.create(capacity, generation=generation)
            self._rings.append(ring)
            return ring
        edge = EdgeRings(
            (producer, consumer),
            nodes,
            parent=self.parent,
            capacity=capacity,
            generation=generation,
            network=self.network,
            send=lambda node, act: self.network.send(self.parent, node, act),
        )
        self._rings += edge.rings.values()
        self.edges[generation] = edge
        if edge.has_link:
            self.nursery.start_soon(edge.run)
        return edge

    # processes

    def _start_process(self, process: SimulatedWorker, agent: SimulatedAgent | None) -> None:
        """Start a process on a node; agent: None on the parent's."""
        node = self.parent if agent is None else agent.node
        for other, where in self._running.items():
            if other.address == process.address and other.alive:
                self._violated(f"{process} starts on {node} while {other} runs on {where}")
            if other.alive and where != node and self._are_colocated(process.address, other.address):
                self._violated(f"{process} starts on {node} while {other}, its colocated worker, runs on {where}")
        self._running[process] = node
        self._started.add(process)
        self.nursery.start_soon(self._run_process, process, agent)

    def _are_colocated(self, one: Address, other: Address) -> bool:
        groups = self._colocate if one.replica == other.replica else ()
        return any(one.stage in group and other.stage in group for group in groups)

    async def _run_process(self, process: SimulatedWorker, agent: SimulatedAgent | None) -> None:
        await process.run()
        del self._running[process]
        if agent is not None:
            process.free()
            agent.processes.remove(process)
            worker = next((each for each in agent.workers if each.process is process), None)
            if worker is not None and agent.alive:
                agent.to_parent(worker.be_gone)

    # nodes

    def _on_lost(self, agent: SimulatedAgent, why: str) -> None:
        self._note(f"{agent.node} is given up: {why}")
        self.placements.lose(agent.node)
        for worker in agent.workers:
            self._explain(worker.pid)
        self.network.after(REJOIN_S, partial(self._rejoin, agent))

    def _rejoin(self, agent: SimulatedAgent) -> None:
        """Start a new agent on a node, once its old one is gone and the node can be reached."""
        node, there_and_back = agent.node, [(self.parent, agent.node), (agent.node, self.parent)]
        reachable = all(itertools.starmap(self.network.is_open, there_and_back)) and node not in self.down
        if not reachable or agent.alive or not agent.fenced or agent.processes:
            self.network.after(REJOIN_S, partial(self._rejoin, agent))
            return
        self._note(f"{node} joins")
        self.agents[node] = self._agent(node)
        self.placements.join(self._nodes[node])

    def _on_end(self, agent: SimulatedAgent, silent: bool) -> None:
        """Do what the kernels do when an agent is gone: its memory is freed and, unless silently, its peers notice."""
        self._note(f"the agent of {agent.node} ends")
        for process in agent.processes:
            self._explain(process.pid)
        self._close_edges(agent.node)
        for edge in self._links_of(agent.node):
            self._break_later(edge, agent.node, LINK_SILENT_S if silent else 0.0)
        if not silent:
            self.network.send(agent.node, self.parent, partial(agent.lose, "its connection was closed"))

    def _close_edges(self, node: str) -> None:
        for edge in self.edges.values():
            if node in edge.rings:
                edge.close_at(node)

    def touch(self, nodes: Collection[str]) -> None:
        """Note that what happens to the workers of nodes may have its cause in the network."""
        for process, node in self._running.items():
            if node in nodes:
                self._explain(process.pid)
        for agent in self.agents.values():
            for worker in agent.workers if agent.node in nodes else ():
                self._explain(worker.pid)

    @property
    def is_cut_off(self) -> bool:
        """Whether there is a worker that messages of the parent do not reach now."""
        return not all(self.network.is_open(self.parent, node) for node in self.node_of.values())

    # links

    def _links_of(self, node: str) -> list[EdgeRings]:
        return [edge for edge in self.edges.values() if edge.has_link and node in edge.nodes and not edge.is_closed]

    def _break_later(self, edge: EdgeRings, node: str, after_s: float) -> None:
        """Let the other node of a link notice in a while that this one is gone."""
        [other] = [each for each in edge.nodes if each != node]
        self.network.after(after_s, lambda: self.network.send(node, other, partial(self.break_link, edge)))

    def break_cut_links(self, cut: Cut) -> None:
        """Break the links that a cut has kept silent for too long."""
        if cut in self.network.cuts:
            for edge in [*self.edges.values()]:
                source, target = edge.nodes
                if edge.has_link and (cut.blocks(source, target) or cut.blocks(target, source)):
                    self.break_link(edge)

    def break_link(self, edge: EdgeRings) -> None:
        """End a link. The parent gets to know from the consumer's node, and lets the consumer's worker be killed."""
        if edge.is_broken or edge.is_closed:
            return
        self._note(f"the link from {edge.ends[0]} to {edge.ends[1]} breaks")
        edge.break_link()
        self.network.send(edge.nodes[1], self.parent, partial(self._on_broken, edge))

    def _on_broken(self, edge: EdgeRings) -> None:
        """Kill the worker at an end of a broken link, unless both or one of them are dead already."""
        if edge.is_closed or any(node != self.parent and self.agents[node].lost for node in edge.nodes):
            return
        producer, consumer = edge.ends
        victim = self._views.get(producer if consumer == CLIENT_ADDRESS else consumer)
        if victim is not None:
            self._explain(victim.pid)
            victim.fail(f"{LINK_LOST}the link from {producer} on {edge.nodes[0]} to {consumer} on {edge.nodes[1]}")

    # the end

    def close(self) -> list[SimulatedWorker]:
        """Return the processes that run although the system is closed, and free what the nodes have."""
        left = [process for process in self._running if process.alive]
        for process in left:
            process.kill()
        for node in self._nodes:
            self._close_edges(node)
        return left

    def all_rings(self) -> Iterator[Ring]:
        """Every mapping of a ring, the parent's and the workers'."""
        yield from self._rings
        for worker in self.workers:
            yield from worker.rings
