"""A simulated worker on another node, as the supervisor sees it: all that passes between the two takes the network.

Rules
1. Descriptors do not travel. The agent gives a worker those of its node's rings; checkpoints are not kept.
2. The parent learns of what a worker has read as the real one does (``cluster.backlog``), and as late.
3. A worker of a lost node is over when its node is fenced: when it cannot run any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import trio

from omni_actors.cluster.backlog import Backlog, BacklogReports
from omni_actors.errors import WorkerExit
from omni_actors.protocol import messages
from omni_actors.protocol.mailbox import MailboxFull, available
from omni_actors.protocol.packets import Envelope, close_all
from omni_actors.stress.simulation.worker import OnStart, SimulatedWorker
from omni_actors.supervisor.process import Worker


class Connection(Protocol):
    """The control connection between the parent and an agent."""

    def to_agent(self, act: Callable[[], None]) -> None:
        """Do something on the node when this message arrives, if its agent runs then."""
        ...

    def to_parent(self, act: Callable[[], None]) -> None:
        """Do something at the parent when this message arrives, if the node is not lost then."""
        ...

    def descriptors(self, generation: int) -> tuple[int, ...]:
        """Return copies of the descriptors of the node's ring of this generation."""
        ...


class RemoteWorker(Worker):
    """The parent's side of ``process``, and its mailbox."""

    def __init__(self, process: SimulatedWorker, capacity: int, connection: Connection, on_start: OnStart) -> None:
        super().__init__(process.pid, self)
        self.process, self._connection, self._on_start = process, connection, on_start
        self._received, self.incoming = trio.open_memory_channel[Envelope](math.inf)
        self.fault: str | None = None
        self._backlog = Backlog(capacity)
        self._reports = BacklogReports(
            capacity,
            waiting=lambda: process.waiting,
            report=lambda count: connection.to_parent(lambda: self._backlog.on_taken(count)),
        )
        process.on_taken = self._reports.on_taken
        process.report_to(_Relay(self, connection))

    # the mailbox

    @property
    def congested(self) -> bool:
        """As ``Mailbox.congested``."""
        return self._backlog.congested

    def post(self, message: messages.ControlMessage, fds: Sequence[int] = (), *, wakes: bool = True) -> None:
        """As ``Mailbox.post``."""
        if self._exit is not None:
            return
        if isinstance(message, messages.Start):
            self._on_start(self.process.address, message)
        if isinstance(message, messages.CheckpointMemory):
            return  # rule 1
        if self._backlog.full:
            raise MailboxFull(self._backlog.capacity)
        self._backlog.on_posted()
        self._connection.to_agent(lambda: self._deliver(message, wakes=wakes))

    def _deliver(self, message: messages.ControlMessage, *, wakes: bool) -> None:
        fds = self._connection.descriptors(message.generation) if isinstance(message, messages.Connect) else ()
        self.process.post(message, fds, wakes=wakes)
        self._reports.on_delivered()
        close_all(fds)

    def unread(self) -> Iterator[Envelope]:
        """As ``Mailbox.unread``."""
        return available(self.incoming)

    # the worker

    def kill(self) -> None:
        if self._exit is None:
            self._connection.to_agent(self.process.kill)

    def fail(self, reason: str) -> None:
        """Receive no more from the worker, for this reason: the supervisor kills it."""
        if self.fault is None:
            self.fault = reason
            self._received.close()

    def receive(self, message: messages.ControlMessage) -> None:
        """Take a message of the worker, unless it has failed."""
        if self.fault is None and self._exit is None:
            self._received.send_nowait((message, ()))

    def end(self, exit: WorkerExit) -> None:
        """Take the news that the worker sends no more."""
        if self._exit is None:
            self._exit = exit
            self._received.close()
            self._ending.set()

    def be_gone(self) -> None:
        """Take the news that nothing is left of the worker."""
        self.end(WorkerExit(self.pid, "SIGKILL", None))
        self._dead.set()


class _Relay:
    """What a process reports through."""

    def __init__(self, worker: RemoteWorker, connection: Connection) -> None:
        self._worker, self._connection = worker, connection

    def send_nowait(self, envelope: Envelope) -> None:
        message, fds = envelope
        if fds:
            close_all(fds)  # rule 1: a checkpoint's memory
        else:
            self._connection.to_parent(lambda: self._worker.receive(message))

    def close(self) -> None:
        """Report the end of the process."""
        exit = self._worker.process.exit
        assert exit is not None
        self._connection.to_parent(lambda: self._worker.end(exit))
