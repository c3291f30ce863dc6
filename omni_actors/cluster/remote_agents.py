"""The parent's agents: keeps one on each node, and accepts their connections.

Rules
1. Each node has one agent at a time (``remote_agent``). A lost one gets a successor when no worker of the lost one can
   run any more. Workers are started there again once the successor has a lease.
2. A connection that is not authenticated has ``HANDSHAKE_S`` seconds, and there are few of them (``strangers``).
3. What is done here is protected from KeyboardInterrupt, which is raised in the user's task. Trio's own code that
   accepts a connection is not: it runs for microseconds.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import trio

from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.connection import HANDSHAKE_S, Connection, ConnectionLost, closed_at_once, shake_hands
from omni_actors.cluster.control import FROM_AGENT, Refused
from omni_actors.cluster.handshake import ROLE_OF_AGENTS, Acceptor, HandshakeFailed
from omni_actors.cluster.interfaces import AgentStarter
from omni_actors.cluster.remote_agent import RemoteAgent
from omni_actors.cluster.strangers import BACKLOG, Strangers
from omni_actors.cluster.tls import Credentials
from omni_actors.cluster.transfers import Transport

START_S: Final = 120.0
"""How long an agent may take to start. That may include the start of Ray's helper."""
RESTART_S: Final = (1.0, 30.0)
"""Seconds between the end of an agent and the start of its successor: the first time, and at most after failures."""


class RemoteAgents:
    """Keeps one agent on each node.

    Args:
        starter: Starts the agents' processes.
        secret: What agents prove to know.
        host: The parent's own IP address, at which it accepts agents.
        lease_s, tls, transport: See ``spawner.open_cluster``.
        on_up, on_lost: Called with the name of a node whose agent has a lease now, or is lost.
        on_link_lost: Called with the generation of a ring whose link has broken, and the reason.
    """

    def __init__(
        self,
        starter: AgentStarter,
        *,
        secret: bytes,
        host: str,
        lease_s: float,
        tls: Credentials | None,
        transport: Transport,
        on_up: Callable[[str], None],
        on_lost: Callable[[str], None],
        on_link_lost: Callable[[int, str], None],
    ) -> None:
        self.address = (host, 0)
        """Host and port at which agents connect, once they are accepted."""
        self.newest: dict[str, RemoteAgent] = {}
        """The newest agent of each node, by the node's name."""
        self._starter, self._secret, self._lease_s = starter, secret, lease_s
        self._credentials, self._tls = tls, None if tls is None else tls.contexts()
        self._transport: Transport = transport
        self._on_up, self._on_lost, self._on_link_lost = on_up, on_lost, on_link_lost
        self._expected: dict[int, RemoteAgent] = {}
        self._strangers = Strangers[trio.CancelScope]()
        self._numbers = itertools.count(1)
        self._nursery: trio.Nursery | None = None

    async def listen(self) -> list[trio.SocketListener]:
        """Return listeners for ``run``, which the caller closes if it does not start that. Raises OSError."""
        listeners = await trio.open_tcp_listeners(0, host=self.address[0], backlog=BACKLOG)
        self.address = (self.address[0], listeners[0].socket.getsockname()[1])
        return listeners

    @trio.lowlevel.enable_ki_protection
    async def run(
        self,
        listeners: list[trio.SocketListener],
        nodes: Iterable[str],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Keep an agent on each node until cancelled. Started once the first ones are being started."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(trio.serve_listeners, self._welcome, listeners)
                for node in nodes:
                    self.add(node)
                task_status.started()
        finally:
            self._nursery = None

    def add(self, node: str) -> None:
        """Keep an agent on one more node from now on. It has no effect before and after ``run``."""
        if self._nursery is not None:
            self.newest[node] = self._new(node)
            self._nursery.start_soon(self._keep, node)

    def remove(self, node: str) -> bool:
        """Start no agent on a node any more, unless it may have one now. Return whether it is forgotten."""
        if (agent := self.newest.get(node)) is None or not agent.fenced.is_set():
            return False
        del self.newest[node]  # ``_keep`` notices
        return True

    def _new(self, node: str, earlier_loss: str | None = None) -> RemoteAgent:
        return RemoteAgent(
            node,
            next(self._numbers),
            self._lease_s,
            on_up=lambda: self._on_up(node),
            on_lost=lambda: self._on_lost(node),
            on_link_lost=self._on_link_lost,
            earlier_loss=earlier_loss,
        )

    @trio.lowlevel.enable_ki_protection
    async def _keep(self, node: str) -> None:
        """Run agents on a node, one after the other, until it is removed."""
        failures = 0
        while True:
            agent = self.newest[node]
            self._expected[agent.number] = agent
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._start, agent)
                    with trio.move_on_after(START_S):
                        await agent.up.wait()
                    if not agent.up.is_set():
                        agent.give_up(f"it has not started within {START_S:g} s")
                    await agent.fenced.wait()
                    nursery.cancel_scope.cancel()
            finally:
                self._expected.pop(agent.number, None)
            failures = failures + 1 if agent.pid == 0 else 0
            await trio.sleep(min(RESTART_S[1], RESTART_S[0] * 2.0 ** min(failures, 16)))
            if self.newest.get(node) is not agent:
                return
            self.newest[node] = self._new(node, agent.lost)

    @trio.lowlevel.enable_ki_protection
    async def _start(self, agent: RemoteAgent) -> None:
        try:
            settings = AgentSettings(
                number=agent.number,
                parent=self.address,
                secret=self._secret,
                lease_s=self._lease_s,
                tls=self._credentials,
                transport=self._transport,
                import_path=tuple(map(os.path.abspath, sys.path)),
            )
            end = await self._starter.run(agent.node, settings)
        except (OSError, RuntimeError) as error:  # such as no descriptors, or no thread; the next agent may have them
            agent.give_up(f"its agent cannot be started: {error}")
            return
        if end.certain:
            agent.process_ended(end.why)
        else:
            agent.give_up(f"its agent cannot be {'reached' if agent.pid else 'started'}: {end.why}")

    @trio.lowlevel.enable_ki_protection
    async def _welcome(self, connected: trio.SocketStream) -> None:
        """Authenticate a connection, and serve it if it is that of an agent which was started."""
        stream = connected if self._tls is None else trio.SSLStream(connected, self._tls.server, server_side=True)
        acceptor = Acceptor(self._secret)
        async with closed_at_once(stream):
            try:
                with trio.CancelScope() as scope:
                    host = connected.socket.getpeername()[0]
                    if (displaced := self._strangers.add(scope, host, acceptor)) is not None:
                        displaced.cancel()
                    await shake_hands(stream, acceptor)
            except (OSError, HandshakeFailed, ConnectionLost):
                return
            finally:
                self._strangers.discard(scope)
            if scope.cancelled_caught or acceptor.role != ROLE_OF_AGENTS:
                return
            received, sent = acceptor.keys()
            connection = Connection(stream, (sent, received), FROM_AGENT)
            agent = self._expected.pop(acceptor.subject, None)
            if agent is not None and agent.lost is None:
                await agent.run(connection)
                return
            with trio.move_on_after(HANDSHAKE_S), suppress(ConnectionLost):
                await connection.send_now(Refused())
