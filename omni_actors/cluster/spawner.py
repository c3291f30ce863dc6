"""Starts workers on several nodes, and the rings between them: the supervisor's ``Spawner`` for a cluster.

Rules
1. Each node but the parent's has an agent (``remote_agents``), which starts the workers there.
2. Where a worker runs is decided elsewhere (``Places``).
3. A link breaks when the node or the worker at one end is lost. Its ring is then closed as that of any dead worker. If
   a link breaks and its ring is not closed within ``LINK_S``, the worker at its receiving end is killed; if that end is
   on the parent's node, the worker at the sending end. Restarts and replays do the rest. A pump of the parent that has
   failed gets a successor with the next ring; an agent whose pump has failed ends then.
4. Agents outlast the workers: a cancellation from outside reaches the tasks here when the block of ``open_cluster`` has
   ended. What they do is protected from KeyboardInterrupt, which is raised in the user's task.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple

import trio

from omni_actors import log_events
from omni_actors.cluster.cluster_ring import ClusterRing
from omni_actors.cluster.control import MakeRing
from omni_actors.cluster.interfaces import AgentStarter, Places
from omni_actors.cluster.placement import PARENT, Node, Place
from omni_actors.cluster.pump import Pump, PumpStopped
from omni_actors.cluster.remote_agent import RemoteAgent
from omni_actors.cluster.remote_agents import RemoteAgents
from omni_actors.cluster.remote_checkpoints import WithoutProxies
from omni_actors.cluster.remote_worker import RemoteWorker
from omni_actors.cluster.shielded import open_shielded_nursery
from omni_actors.cluster.tls import Credentials
from omni_actors.cluster.transfers import NixlUnavailable, Transfers, Transport
from omni_actors.config.devices import VISIBLE, NoSuchDevice, at_places
from omni_actors.errors import LINK_LOST, NODE_LOST, ClusterUnavailable, NoPlace
from omni_actors.protocol.messages import NODE_VARIABLE, Address
from omni_actors.supervisor.nodes import LinkState, NodeState
from omni_actors.supervisor.process import NO_VARIABLES, EdgeRing, LocalSpawner, PlaceLost, SpawnFailed, Worker
from ringbuf import EndName, Ring

LEASE_S: Final = 10.0
"""The default length of a lease, in seconds."""
LINK_S: Final = 1.0
"""Seconds in which the loss of a node or the death of a worker explains that a link breaks."""


class _Link(NamedTuple):
    """The link of one ring."""

    producer: Address
    consumer: Address
    ring: ClusterRing


class ClusterSpawner:
    """See ``Spawner``. Open it with ``open_cluster``, which has the arguments."""

    def __init__(
        self,
        nodes: Sequence[Node],
        starter: AgentStarter,
        places: Places,
        *,
        host: str,
        lease_s: float,
        tls: Credentials | None,
        transport: Transport,
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._parent = next(node.name for node in nodes if node.has(PARENT))
        self._places, self._host = places, host
        self._transport, self._tls = transport, None if tls is None else tls.contexts()
        self._secret = secrets.token_bytes(32)
        self._local = LocalSpawner()
        self._agents = RemoteAgents(
            starter,
            secret=self._secret,
            host=host,
            lease_s=lease_s,
            tls=tls,
            transport=transport,
            on_up=lambda name: places.join(self._nodes[name]),
            on_lost=places.lose,
            on_link_lost=self._on_link_lost,
        )
        self._placed: dict[Address, RemoteAgent | None] = {}
        """Where each worker runs; None: on the parent's node."""
        self._workers: dict[Address, RemoteWorker] = {}
        self._links: dict[int, _Link] = {}
        """The link of each ring between nodes, by the ring's generation."""
        self._opened = time.time()
        self._make_pump: partial[Pump]
        self._pump: Pump
        self._nursery: trio.Nursery | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which agents connect."""
        return self._agents.address

    @property
    def agents(self) -> Mapping[str, RemoteAgent]:
        """The newest agent of each node."""
        return self._agents.newest

    def nodes(self) -> dict[str, NodeState]:
        """Return the state of each node, the parent's first. See ``HasNodes``."""
        here = NodeState(state="alive", since=self._opened, parent=True)
        return {self._parent: here, **{name: agent.state() for name, agent in self.agents.items()}}

    def links(self) -> dict[tuple[Address, Address], LinkState]:
        """Return the state of each link, by producer and consumer. See ``HasNodes``."""
        return {(link.producer, link.consumer): link.ring.link(self._parent) for link in self._links.values()}

    # Workers and rings.

    @asynccontextmanager
    async def spawn(
        self,
        address: Address,
        mailbox_capacity: int,
        *,
        environment: Mapping[str, str] = NO_VARIABLES,
        lock_fds: Sequence[int] = (),
    ) -> AsyncIterator[Worker]:
        """Start a worker where it has its place (see ``Spawner.spawn``)."""
        try:
            at = self._places.find(address)
        except NoPlace as error:  # there was one (``wait_place``)
            raise PlaceLost(f"{NODE_LOST}{error}") from error
        environment = {**environment, NODE_VARIABLE: at.node}
        try:
            devices = self._devices(at)
        except NoSuchDevice as error:
            raise SpawnFailed(str(error)) from error
        if devices:
            environment[VISIBLE] = ",".join(devices)
        agent = self._placed[address] = None if self._nodes[at.node].has(PARENT) else self.agents[at.node]
        try:
            if agent is None:
                local = self._local.spawn(address, mailbox_capacity, environment=environment, lock_fds=lock_fds)
                async with local as worker:
                    worker.node, worker.devices = at.node, devices
                    worker.mailbox = WithoutProxies(worker.mailbox)
                    yield worker
            else:
                async with agent.spawn(address, mailbox_capacity, environment) as remote:
                    self._workers[address], remote.node, remote.devices = remote, at.node, devices
                    yield remote
        finally:
            del self._placed[address]
            self._workers.pop(address, None)

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> tuple[str, ...]:
        """Wait until a worker can be started somewhere. Return its devices if that is the parent's node, else none."""
        at = await self._places.wait_place(address, on_waiting)
        return self._devices(at) if self._nodes[at.node].has(PARENT) else ()

    def _devices(self, at: Place) -> tuple[str, ...]:
        """Return the devices of a place as its starter knows them: on other nodes, places among those of the agent.

        Raises NoSuchDevice.
        """
        return at_places(at.devices, os.environ.get(VISIBLE)) if self._nodes[at.node].has(PARENT) else at.devices

    def release(self, address: Address) -> None:
        self._places.release(address)

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> EdgeRing:
        """Return a ring between two workers wherever they run, or between a worker and the client. Raises OSError."""
        sender, receiver = self._placed.get(producer), self._placed.get(consumer)
        if sender is receiver is None:
            return self._local.create_ring(producer, consumer, capacity, generation)
        if sender is receiver and sender is not None:
            sender.post(MakeRing(generation, capacity, None))
            return ClusterRing(
                generation,
                capacity,
                here=None,
                agents={"producer": sender, "consumer": sender},
                on_close=lambda: None,
            )
        if self._pump.has_failed:  # its links are reported as lost
            self._pump.stop()  # later, only its successor is asked to close their rings' ends
            self._pump = self._make_pump()
        here = None if sender is not None and receiver is not None else Ring.create(capacity, generation=generation)
        agents: dict[EndName, RemoteAgent] = {}
        if sender is not None:
            agents["producer"] = sender
        if receiver is not None:
            agents["consumer"] = receiver
        ring = ClusterRing(
            generation, capacity, here=here, agents=agents, on_close=lambda: self._close_link(generation)
        )
        self._links[generation] = _Link(producer, consumer, ring)
        try:
            self._begin_link(generation, capacity, here, sender, receiver)
        except (OSError, MemoryError, PumpStopped) as error:
            ring.close()
            raise OSError(str(error) or "out of memory") from error
        return ring

    def _begin_link(
        self,
        generation: int,
        capacity: int,
        here: Ring | None,
        sender: RemoteAgent | None,
        receiver: RemoteAgent | None,
    ) -> None:
        """Have the parts of a ring made and joined. here: that of the parent's node. Raises what the pump raises."""
        if receiver is not None:
            receiver.post(MakeRing(generation, capacity, "in"))
        else:
            assert here is not None
            self._pump.receive(generation, here.claim_producer())
        links = self._pump.address if receiver is None else receiver.links
        if sender is not None:
            sender.post(MakeRing(generation, capacity, links))
        else:
            assert here is not None
            self._pump.send(generation, here.claim_consumer(), links)

    def _close_link(self, generation: int) -> None:
        del self._links[generation]
        self._pump.close(generation)

    def _on_link_lost(self, generation: int, reason: str) -> None:
        if generation in self._links and self._nursery is not None:
            self._nursery.start_soon(self._judge_link, generation, reason)

    @trio.lowlevel.enable_ki_protection
    async def _judge_link(self, generation: int, reason: str) -> None:
        """Have a worker killed whose link has broken, unless the node or the worker at an end is lost (rule 3)."""
        await trio.sleep(LINK_S)
        if (link := self._links.get(generation)) is None:
            return
        ends = link.producer, link.consumer
        if any(agent is not None and agent.lost is not None for agent in map(self._placed.get, ends)):
            return
        for address in reversed(ends):
            if (worker := self._workers.get(address)) is not None:
                worker.mailbox.fail(f"{LINK_LOST}{reason}")
                return

    # Agents.

    @trio.lowlevel.enable_ki_protection
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep an agent on each node until cancelled. Started once the first ones are being started.

        Raises ClusterUnavailable: the parent cannot listen at its address, or has no NIXL.
        """
        token = trio.lowlevel.current_trio_token()

        def on_link_lost(generation: int, why: str) -> None:
            token.run_sync_soon(self._on_link_lost, generation, why)

        self._make_pump = partial(Pump, self._secret, self._host, on_link_lost, self._tls)
        listeners: list[trio.SocketListener] = []
        try:
            listeners = await self._agents.listen()
            transfers = Transfers() if self._transport == "nixl" else None
            self._pump = self._make_pump(transfers=transfers)
        except (OSError, ValueError, NixlUnavailable) as error:
            for listener in listeners:
                listener.socket.close()
            why = str(error) if isinstance(error, NixlUnavailable) else f"it cannot listen at {self._host}: {error}"
            raise ClusterUnavailable({self._parent: why}) from error
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                others = [name for name in self._nodes if name != self._parent]
                await nursery.start(self._agents.run, listeners, others)
                task_status.started()
        finally:
            self._nursery = None
            self._pump.stop()

    def add(self, node: Node) -> None:
        """Keep an agent on a node from now on. It has no effect once the spawner ends."""
        self._nodes[node.name] = node
        self._agents.add(node.name)

    def remove(self, name: str) -> bool:
        """Start no agent on a node any more, unless it may have one now. Return whether it is forgotten."""
        if not self._agents.remove(name):
            return False
        del self._nodes[name]
        self._places.forget(name)
        return True

    def change(self, node: Node) -> None:
        """Use a node as it is now, once its next agent has a lease: it has other labels or devices."""
        self._nodes[node.name] = node

    def renew(self, node: Node) -> None:
        """Start the agent of a node again, because the node has more devices now. No worker has its place there."""
        self.change(node)
        self.agents[node.name].give_up("it starts again, because more devices are free")

    async def wait_up(self, replan: Callable[[], None] | None) -> None:
        """Wait until each node has an agent with a lease, or its first one was given up.

        replan: see ``open_cluster``. Raises ClusterUnavailable: the nodes that have an agent are too few.
        """
        for agent in list(self.agents.values()):
            await agent.up.wait()
        missing = {name: str(node.why) for name, node in self.nodes().items() if node.state != "alive"}
        if not missing:
            return
        if replan is None:
            raise ClusterUnavailable(missing)
        try:
            replan()
        except NoPlace as error:
            raise ClusterUnavailable(missing, str(error)) from error
        for name, why in missing.items():
            log_events.record(log_events.NodeLeftOut(node=name, reason=why))


@asynccontextmanager
async def open_cluster(
    nodes: Sequence[Node],
    starter: AgentStarter,
    places: Places,
    *,
    host: str = "127.0.0.1",
    lease_s: float = LEASE_S,
    tls: Credentials | None = None,
    transport: Transport = "tcp",
    replan: Callable[[], None] | None = None,
) -> AsyncIterator[ClusterSpawner]:
    """Start an agent on each node, and give the spawner. When the block ends, the agents have ended.

    Args:
        nodes: All nodes. One of them is the parent's, with the label "parent"; it has no agent.
        starter: Starts the agents' processes.
        places: Says where each worker runs.
        host: The parent's own IP address, at which it accepts agents and links.
        lease_s: For how long, in seconds, the workers of a node may run without hearing of the parent.
        tls: What nodes use TLS with (``make_credentials``); None: they use none.
        transport: What carries large records between nodes.
        replan: Called when some nodes have no agent at first. It places the workers on the others, or raises NoPlace.
            None: every node is needed.

    A cancellation from outside ends the block, and then the agents. Raises ClusterUnavailable.
    """
    spawner = ClusterSpawner(nodes, starter, places, host=host, lease_s=lease_s, tls=tls, transport=transport)
    async with open_shielded_nursery() as nursery:
        await nursery.start(spawner.run)
        await spawner.wait_up(replan)
        yield spawner
