"""The control connection as the engine loop sees it: commands in, messages for the parent out.

Rule: only the engine's thread uses it. It reads before a turn and writes after one. So a command waits for the step
that runs, and the messages of a turn are sent together.
"""

from __future__ import annotations

import select
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from omni_actors.protocol import messages, packets
from ringbuf import Ring


class AttachRing(NamedTuple):
    """Command: this ring is now the edge from ``producer`` to ``consumer``. same_memory: see ``Connect``."""

    producer: messages.Address
    consumer: messages.Address
    ring: Ring
    same_memory: bool = False


class AttachCheckpoint:
    """Command: this memory has the checkpoint of an earlier incarnation, for the ``Start`` that follows.

    It owns the descriptor until the engine loop takes it.
    """

    def __init__(self, request: int, memory_fd: int) -> None:
        self.request = request
        self._memory_fd: int | None = memory_fd

    def take(self) -> int | None:
        """Return the descriptor, which the caller owns from now on; None the second time."""
        taken, self._memory_fd = self._memory_fd, None
        return taken


Command: TypeAlias = messages.LoopCommand | AttachRing | AttachCheckpoint


class Control(ABC):
    """The engine loop's end of the control connection."""

    def __init__(self) -> None:
        self._notices: list[packets.Envelope] = []

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that is readable while commands wait."""

    @abstractmethod
    def bell(self) -> int:
        """Return an eventfd that is readable when a command waits that is to wake the loop, which then empties it."""

    @abstractmethod
    def commands(self) -> Sequence[Command]:
        """Return the commands that have arrived, in order. Does not wait."""

    @abstractmethod
    def _write(self, notices: Sequence[packets.Envelope]) -> None:
        """Send messages to the parent, in order, and close their descriptors. May block."""

    def add(self, notice: messages.ControlMessage, fds: tuple[int, ...] = ()) -> None:
        """Add a message, with descriptors that it now owns, to those that are sent next."""
        self._notices.append((notice, fds))

    def warn(self, text: str) -> None:
        """Write a line to the worker's log."""
        print(text, file=sys.stderr, flush=True)

    def send(self, *last: messages.ControlMessage) -> None:
        """Send the messages that were added, and then ``last``. May block while the parent does not read."""
        if notices := [*self._notices, *((notice, ()) for notice in last)]:
            self._notices = []
            self._write(notices)


class ControlSocket(Control):
    """The control connection of a worker process.

    When the parent is gone, the loop stops.

    sock: a non-blocking AF_UNIX socket of type SOCK_SEQPACKET.
    bell: the eventfd that the parent rings after a message that is to wake the loop (``protocol.mailbox``, rule 7).
    """

    def __init__(self, sock: socket.socket, bell: int) -> None:
        super().__init__()
        self._socket, self._bell = sock, bell
        self._unread: list[Command] = []
        """Commands that came in one packet with ``Configure``."""

    def configure(self) -> messages.Configure:
        """Wait for the first message and return it. Raises TypeError if it is not ``Configure``, PeerGone."""
        while (packet := packets.receive(self._socket)) is None:
            packets.wait(self._socket, select.POLLIN)
        first, *more = packet[0]
        if not isinstance(first, messages.Configure):
            raise TypeError(f"the first message to a worker is Configure, not {type(first).__name__}")
        self._unread = _commands(more)
        return first

    def fileno(self) -> int:
        return self._socket.fileno()

    def bell(self) -> int:
        return self._bell

    def commands(self) -> Sequence[Command]:
        arrived, self._unread = self._unread, []
        try:
            while (packet := packets.receive(self._socket)) is not None:
                arrived += _commands(*packet)
        except packets.PeerGone:
            arrived.append(messages.Stop())
        return arrived

    def _write(self, notices: Sequence[packets.Envelope]) -> None:
        packets.send_all(self._socket, notices)


def _commands(received: Sequence[messages.ControlMessage], fds: Sequence[int] = ()) -> list[Command]:
    """Return the messages of a packet as commands. ``fds`` belong to the first one."""
    commands: list[Command] = []
    for message in received:
        if isinstance(message, messages.LoopCommand):
            commands.append(message)
        elif isinstance(message, messages.Connect):
            ring = Ring.attach(fds, generation=message.generation)
            commands.append(AttachRing(message.producer, message.consumer, ring, message.same_memory))
        elif isinstance(message, messages.CheckpointMemory):
            commands += [AttachCheckpoint(message.request, fd) for fd in fds]  # none, if this process could have none
        else:
            raise TypeError(f"a worker does not accept {type(message).__name__}")
    return commands
