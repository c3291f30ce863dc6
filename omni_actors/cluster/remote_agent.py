"""The parent's side of one agent, from its first message to the time when no worker of it can run any more.

Rules
1. A lost agent is lost for good: nothing is granted or posted to it. Its workers are reported as lost
   (``errors.NODE_LOST``) at once, so that they get no more work, and as dead only when the lease has ended (``lease``,
   rule 3).
2. If the agent's process is known to have ended (``process_ended``), its workers have ended with it, and the rest of
   the lease need not be waited for.
3. Messages of an agent about workers and rings that the parent has forgotten are ignored: they were under way.
"""

from __future__ import annotations

import collections
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Final, TypeAlias

import trio

from omni_actors import log_events
from omni_actors.cluster import control
from omni_actors.cluster.connection import Connection, ConnectionLost
from omni_actors.cluster.lease import GrantedLease
from omni_actors.cluster.remote_checkpoints import RemoteCheckpoints
from omni_actors.cluster.remote_worker import RemoteMailbox, RemoteWorker
from omni_actors.errors import NODE_LOST
from omni_actors.platform.kill_timer import now
from omni_actors.protocol import messages
from omni_actors.protocol.messages import Address
from omni_actors.protocol.packets import close_all
from omni_actors.supervisor.nodes import NodeCondition, NodeState
from omni_actors.supervisor.process import PlaceLost, SpawnFailed
from ringbuf import RingStatistics

PARENT_ENDS: Final = "the parent ends"
"""Why an agent is given up that has not failed."""
BEHIND: Final = 4
"""How many of the last measurements of a node's clock are kept. The one with the least delay counts."""
WORKER_LOGGERS = "omni_actors.worker."
WorkerNews: TypeAlias = (
    control.Spawned | control.NotSpawned | control.Unusable | control.Taken | control.Ending | control.Dead
)
AgentNews: TypeAlias = control.Hello | control.Renew | control.Statistics | control.LinkLost | control.LogLine


class RemoteAgent:
    """One agent.

    node: its node's name. number: its own, which no other agent of this parent has. on_up: called once it has a lease.
    on_lost: called once it is lost. on_link_lost: called with the generation of a ring whose link has broken, and the
    reason. earlier_loss: why the agent before it was given up, if there was one.
    """

    def __init__(
        self,
        node: str,
        number: int,
        lease_s: float,
        *,
        on_up: Callable[[], None],
        on_lost: Callable[[], None],
        on_link_lost: Callable[[int, str], None],
        earlier_loss: str | None = None,
    ) -> None:
        self.node, self.number = node, number
        self.links = ("", 0)
        """Host and port where the agent accepts links, once it is ``up``."""
        self.pid = 0
        self.lost: str | None = None
        """Why it was given up."""
        self._earlier_loss, self._since = earlier_loss, time.time()
        self.up, self.fenced = trio.Event(), trio.Event()
        """up: it runs and has a lease, or is lost. fenced: no worker of it runs any more."""
        self._process_ended = trio.Event()
        self._lease = GrantedLease(lease_s, now())
        self._on_up, self._on_lost, self._on_link_lost = on_up, on_lost, on_link_lost
        self._connection: Connection[control.FromAgent] | None = None
        self._numbers = itertools.count(1)
        self._workers: dict[int, RemoteWorker] = {}
        self._rings: Mapping[int, tuple[int, int, int, int]] = {}
        self._checkpoints = RemoteCheckpoints(self._drop)
        self._behind = collections.deque[float](maxlen=BEHIND)
        """How far its CLOCK_MONOTONIC was behind the parent's, in seconds, when a message that told it had arrived."""
        self._scope = trio.CancelScope()
        self._ran = False
        """Whether it has had a connection."""

    def post(self, message: control.ToAgent) -> None:
        """Send a message, in order; it is dropped if the agent is lost."""
        if self._connection is not None:
            self._connection.post(message)

    def statistics(self, generation: int) -> RingStatistics | None:
        """Return the counters of a ring of the agent, as it has reported them last; None before that."""
        counters = self._rings.get(generation)
        return None if counters is None else RingStatistics(*counters)

    def state(self) -> NodeState:
        """Return the state of the node."""
        condition: NodeCondition = "alive" if self.up.is_set() else "starting"
        ends_at = self._lease.silent_at if self.up.is_set() else None
        if self.lost is not None:
            condition, ends_at = ("fenced", None) if self.fenced.is_set() else ("lost", self._lease.safe_at)
        return NodeState(
            state=condition,
            since=self._since,
            why=self._earlier_loss if condition == "starting" else self.lost,
            lease_left_s=None if ends_at is None else round(max(0.0, ends_at - now()), 1),
            agent_pid=self.pid if self.pid and condition == "alive" else None,
        )

    @asynccontextmanager
    async def spawn(
        self, address: Address, mailbox_capacity: int, environment: Mapping[str, str]
    ) -> AsyncIterator[RemoteWorker]:
        """Start a worker there (see ``Spawner.spawn``). Raises SpawnFailed; PlaceLost: the agent is lost."""
        number = next(self._numbers)
        mailbox = RemoteMailbox(
            number,
            mailbox_capacity,
            post=self.post,
            memory_of=self._checkpoints.memory_of,
            behind=lambda: min(self._behind, default=0.0),
        )
        worker = RemoteWorker(mailbox, kill=lambda: self._kill(number))
        if self.lost is not None:
            raise PlaceLost(self._why_lost())
        self._workers[number] = worker
        self.post(
            control.Spawn(
                worker=number, address=address, mailbox_capacity=mailbox_capacity, environment=dict(environment)
            )
        )
        try:
            await worker.started.wait()
            if worker.error is not None:
                raise worker.error
            yield worker
        finally:
            worker.kill()
            with trio.CancelScope(shield=True):
                await worker.wait_gone()
            del self._workers[number]
            for _, fds in mailbox.unread():
                close_all(fds)

    def _kill(self, number: int) -> None:
        self.post(control.Kill(number))

    async def run(self, connection: Connection[control.FromAgent]) -> None:
        """Serve the agent's connection until it is lost, and wait until no worker runs. Cancelling gives it up."""
        self._connection, self._ran = connection, True
        self._lease = GrantedLease(self._lease.lease_s, now())  # the agent's process may have started long ago
        self.post(control.Accepted())
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, connection)
                    nursery.start_soon(self._read, connection, nursery)
                    nursery.start_soon(self._watch_silence)
        finally:
            self.give_up(PARENT_ENDS)
            with trio.CancelScope(shield=True):
                await connection.close()  # an agent that can be reached ends now
            await self._wait_fenced()

    async def _wait_fenced(self) -> None:
        """Wait until no worker of a lost agent can run, and report them as dead. Not cancelled if there are some."""
        if not self._workers:
            await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            while not self._process_ended.is_set() and (left_s := self._lease.safe_at - now()) > 0:
                with trio.move_on_after(left_s):
                    await self._process_ended.wait()
        for worker in list(self._workers.values()):
            if worker.pid:
                worker.on_dead()
            else:
                worker.on_not_spawned(PlaceLost(self._why_lost()))
        self._fence()

    def _fence(self) -> None:
        self._since = time.time()
        self.fenced.set()

    def give_up(self, reason: str) -> None:
        """Give the agent up, for this reason; only the first one counts. Harmless when it is lost already."""
        if self.lost is None:
            self.lost, self._since = reason, time.time()
            self._lease.give_up()
            self._connection = None
            self._scope.cancel()
            self._on_lost()
            if self.up.is_set() and reason != PARENT_ENDS:
                self._log_loss(reason)
            self.up.set()
            if not self._ran:
                self._fence()
            for worker in self._workers.values():
                worker.mailbox.fail(self._why_lost())

    def _log_loss(self, reason: str) -> None:
        left_s = 0.0 if self._process_ended.is_set() else max(0.0, self._lease.safe_at - now())
        log_events.record(
            log_events.NodeLost(node=self.node, reason=reason, workers=len(self._workers), fenced_in_s=round(left_s, 1))
        )

    def process_ended(self, why: str) -> None:
        """Record that the agent's process has ended for certain, and its workers with it (rule 2)."""
        self._process_ended.set()
        self.give_up(f"its agent has ended: {why}")

    def _why_lost(self) -> str:
        return f"{NODE_LOST}{self.node}: {self.lost}"

    @trio.lowlevel.enable_ki_protection
    async def _write(self, connection: Connection[control.FromAgent]) -> None:
        try:
            await connection.write()
        except ConnectionLost as error:
            self.give_up(str(error))

    @trio.lowlevel.enable_ki_protection
    async def _read(self, connection: Connection[control.FromAgent], nursery: trio.Nursery) -> None:
        try:
            while True:
                message = await connection.receive()
                if isinstance(message, control.CheckpointKept):
                    await self._take_checkpoint(message, nursery)
                elif not isinstance(message, control.FromWorker):
                    self._handle(message)
                elif (worker := self._workers.get(message.worker)) is not None:
                    await worker.mailbox.take(message.packet)
        except (ConnectionLost, control.ControlCorrupted) as error:
            self.give_up(str(error))

    async def _take_checkpoint(self, kept: control.CheckpointKept, nursery: trio.Nursery) -> None:
        """Give a proxy for the memory of checkpoints to the supervisor, unless there are no descriptors for one."""
        worker = self._workers.get(kept.worker)
        try:
            proxy = None if worker is None else self._checkpoints.proxy(kept.memory, nursery)
        except OSError:
            proxy = None
        if worker is None or proxy is None:
            self._drop(kept.memory)
        else:
            await worker.mailbox.take_message(messages.CheckpointMemory(kept.request), (proxy,))

    def _drop(self, memory: int) -> None:
        self.post(control.DropCheckpoint(memory))

    @trio.lowlevel.enable_ki_protection
    async def _watch_silence(self) -> None:
        while (left_s := self._lease.silent_at - now()) > 0:  # noqa: ASYNC110 - each renewal moves the time
            await trio.sleep(left_s)
        self.give_up(f"it asked for no renewal of its lease for {self._lease.lease_s:g} s")

    def _handle(self, message: WorkerNews | AgentNews) -> None:
        match message:
            case control.Renew(asked_at, monotonic):
                self._behind.append(time.monotonic() - monotonic)
                if self._lease.grant(now()):
                    self.post(control.Granted(asked_at))
                    if not self.up.is_set():
                        self._since = time.time()
                        self.up.set()
                        self._on_up()
            case control.Statistics(rings):
                self._rings = rings
            case control.LinkLost(generation, reason):
                self._on_link_lost(generation, reason)
            case control.LogLine(logger, text) if logger.startswith(WORKER_LOGGERS):
                logging.getLogger(logger).info(text)
            case control.Hello() if message.version != (mine := version(control.PACKAGE)):
                self.give_up(f"it runs omni-actors {message.version}, and the parent {mine}")
            case control.Hello(fault=str(fault)):
                self.give_up(fault)
            case control.Hello():
                self.pid, self.links = message.pid, message.links
            case control.LogLine():
                pass
            case _:
                if (worker := self._workers.get(message.worker)) is not None:
                    _tell(worker, message)


def _tell(worker: RemoteWorker, message: WorkerNews) -> None:
    match message:
        case control.Spawned(_, pid):
            worker.on_spawned(pid)
        case control.NotSpawned(_, error):
            worker.on_not_spawned(SpawnFailed(error))
        case control.Unusable(_, reason):
            worker.mailbox.fail(reason)
        case control.Taken(_, count):
            worker.mailbox.backlog.on_taken(count)
        case control.Ending(_, exit):
            worker.on_ending(exit)
        case control.Dead():
            worker.on_dead()
