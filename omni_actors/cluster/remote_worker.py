"""A worker on another node, as the supervisor sees it.

Rules
1. The agent of the node has the worker and its control socket. What the supervisor posts travels to the agent, and what
   the worker sends comes back, in order.
2. ``fail`` asks the supervisor to kill the worker for a reason, by the way that an undecodable packet takes.
3. Messages that its mailbox on the node has not taken count as waiting, as on one machine (``backlog``).
4. The worker of a lost node counts as alive until no worker can run there any more. Only then do ``wait_ending`` and
   ``wait_dead`` return (``lease``), so that no successor runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import trio

from omni_actors.cluster.backlog import Backlog
from omni_actors.cluster.control import ToAgent, ToWorker
from omni_actors.errors import WorkerExit
from omni_actors.protocol import messages
from omni_actors.protocol.mailbox import MailboxFull, available
from omni_actors.protocol.packets import Envelope, close_all
from omni_actors.supervisor.process import SpawnFailed, Worker

UNREAD_S: Final = 1.0
"""How long a worker's message waits for the supervisor to read earlier ones. All of the agent waits meanwhile, the
renewals of its lease included."""


class RemoteMailbox:
    """The supervisor's end of the control connection of a worker on another node. See ``protocol.mailbox.Mailbox``.

    number: the worker's. post: sends a message to the agent. memory_of: returns which memory of the agent's a
    descriptor stands for, if any (``remote_checkpoints``). behind: returns how far the node's CLOCK_MONOTONIC is behind
    the parent's, in seconds. capacity: how many messages may wait in each direction.
    """

    def __init__(
        self,
        number: int,
        capacity: int,
        *,
        post: Callable[[ToAgent], None],
        memory_of: Callable[[int], int | None] = lambda fd: None,
        behind: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._number, self._capacity = number, capacity
        self._post, self._memory_of, self._behind = post, memory_of, behind
        self._in_send, self.incoming = trio.open_memory_channel[Envelope](capacity)
        self.backlog = Backlog(capacity)
        self.fault: str | None = None

    @property
    def congested(self) -> bool:
        """As ``Mailbox.congested``."""
        return self.backlog.congested

    def post(self, message: messages.ControlMessage, fds: Sequence[int] = (), *, wakes: bool = True) -> None:
        """Queue a message, in order. It is dropped if the worker is to be killed for a fault, such as a lost node.

        Descriptors stay here: the agent has those of its own rings and checkpoints.
        Raises MailboxFull, ValueError (the message is too large or cannot be encoded).
        """
        if self.fault is not None:
            return
        if self.backlog.full:
            raise MailboxFull(self._capacity)
        packet = messages.pack([messages.encode(message)])
        memory = self._memory_of(fds[0]) if fds and isinstance(message, messages.CheckpointMemory) else None
        self._post(ToWorker(self._number, packet, wakes, memory))
        self.backlog.on_posted()

    def unread(self) -> Iterator[Envelope]:
        """Yield the messages that a dead worker has sent and that were not received from ``incoming``."""
        return available(self.incoming)

    async def take(self, packet: bytes) -> None:
        """Take a packet that the worker sent, when there is room for its messages.

        One that cannot be decoded, or for which there is no room within ``UNREAD_S``, is a fault.
        """
        try:
            for message in messages.unpack(packet):
                if isinstance(message, messages.Finished):
                    message = messages.Finished(message.request, message.stats.later(self._behind()))
                await self.take_message(message)
        except msgspec.DecodeError as error:
            self.fail(f"a control packet of {len(packet)} bytes cannot be decoded: {error}")

    async def take_message(self, message: messages.ControlMessage, fds: tuple[int, ...] = ()) -> None:
        """Take one message, as ``take`` does. Owns the descriptors, until the supervisor receives them."""
        try:
            if self.fault is None:
                await self._put((message, fds))
                fds = ()
        except trio.TooSlowError:
            self.fail(f"its control messages are not read: {self._capacity} wait, which is the limit")
        except trio.ClosedResourceError:
            pass  # ``fail``, while it waited
        finally:
            close_all(fds)

    async def _put(self, envelope: Envelope) -> None:
        try:
            self._in_send.send_nowait(envelope)
        except trio.WouldBlock:
            with trio.fail_after(UNREAD_S):
                await self._in_send.send(envelope)

    def fail(self, reason: str) -> None:
        """End reading: the supervisor then kills the worker for this reason, unless it has another one already."""
        if self.fault is None:
            self.fault = reason
            self._in_send.close()


class RemoteWorker(Worker):
    """A worker on another node. Its agent's record (``remote_agent``) tells it what becomes of the process."""

    mailbox: RemoteMailbox

    def __init__(self, mailbox: RemoteMailbox, *, kill: Callable[[], None]) -> None:
        super().__init__(0, mailbox)
        self._kill = kill
        self.started = trio.Event()
        """Set when there is a process, or an ``error``."""
        self.error: SpawnFailed | None = None
        """Why no process was started."""

    @property
    def dead(self) -> bool:
        """Whether nothing of it is left."""
        return self._dead.is_set()

    def kill(self) -> None:
        if not self.dead:
            self._kill()

    async def wait_gone(self) -> None:
        """Wait until nothing is left of it, also if no process was started."""
        await self._dead.wait()

    def on_spawned(self, pid: int) -> None:
        """There is a process now."""
        self.pid = pid
        self.started.set()

    def on_not_spawned(self, error: SpawnFailed) -> None:
        """No process was started."""
        self.error = error
        self.started.set()
        self._dead.set()

    def on_ending(self, exit: WorkerExit) -> None:
        """The worker sends no more, and has ended so. Only the first call counts."""
        if self._exit is None:
            self._exit = exit
            self._ending.set()

    def on_dead(self) -> None:
        """Nothing of the worker is left."""
        self.on_ending(WorkerExit(self.pid, "SIGKILL", None))
        self._dead.set()
