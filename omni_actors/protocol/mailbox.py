"""A control socket as a bounded queue of messages to send, and a bounded trio memory channel of received ones.

Rules
1. A packet contains whole messages (SOCK_SEQPACKET), and b"" is read exactly when the peer is gone. Descriptors in a
   packet belong to its first message.
2. ``post`` never waits, so that no caller hangs on a worker that has stopped reading. It raises ``MailboxFull``, and
   the owner kills the worker.
3. Descriptors are duplicated when posted and closed when sent or dropped: the caller of ``post`` keeps its own.
4. An undecodable packet ends reading, as the peer's end does; ``fault`` has the reason.
5. The connection outlives the cancellation of its block, so that the last messages of a cancelled owner are still sent.
6. Messages that are posted in one turn of the event loop are sent in the next turn, as one packet if they fit. By then
   the input of the same requests is in the rings, so their first steps are batched.
7. The peer sleeps on ``bell``, not on the socket. The bell is rung for messages that are to wake the peer; it reads the
   others when it wakes for something else. A wake-up costs ten times as much as the message.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from itertools import chain
from typing import TypeVar

import msgspec
import trio

from omni_actors.errors import OmniError
from omni_actors.protocol import messages
from omni_actors.protocol.packets import IN_FLIGHT_RETRY_S, Encoded, Envelope, close_all, packets, receive_packet

T = TypeVar("T")


class MailboxFull(OmniError):
    """The peer has not read ``pending`` messages."""

    def __init__(self, pending: int) -> None:
        self.pending = pending
        super().__init__(f"it does not read its control messages: {pending} wait, which is the limit")


class Mailbox:
    """One end of a control connection; open it with ``open_mailbox``.

    incoming: a memory channel of received messages. It ends (EndOfChannel) when the peer is gone and everything that it
    sent has been read, or after a fault.
    """

    def __init__(self, sock: socket.socket, capacity: int, bell: int) -> None:
        self._sock, self._capacity, self._bell = sock, capacity, bell
        self._posted = deque[Encoded]()
        """The messages that the writer has not taken yet."""
        self._writer = trio.lowlevel.ParkingLot()
        self.on_taken: Callable[[], None] = lambda: None
        """Called when the writer has taken a message."""
        self._wakes = False
        """Whether a message that is not written yet is to wake the peer."""
        self._in_send, self.incoming = trio.open_memory_channel[Envelope](capacity)
        self.fault: str | None = None
        """Why reading has ended although the peer may be alive."""
        self._unpacking: Iterator[messages.ControlMessage] = iter(())
        """The messages of the reader's packet that ``incoming`` has no room for yet."""
        self._peer_gone = False
        self._open = trio.CancelScope(shield=True)

    @property
    def waiting(self) -> int:
        """How many messages were posted and not yet taken by the writer."""
        return len(self._posted)

    @property
    def congested(self) -> bool:
        """Whether half of the capacity is used: the peer has stopped reading, or reads too slowly."""
        return 2 * len(self._posted) >= self._capacity

    def post(self, message: messages.ControlMessage, fds: Sequence[int] = (), *, wakes: bool = True) -> None:
        """Queue a message, in order. If the peer is gone, the message is dropped.

        wakes: whether the message wakes a sleeping peer (rule 7).
        Raises MailboxFull, ValueError (the message is too large or cannot be encoded), OSError (no descriptors).
        """
        if self._peer_gone:
            return
        if len(self._posted) >= self._capacity:
            raise MailboxFull(self._capacity)
        self._posted.append((messages.encode(message), _duplicates(fds) if fds else ()))
        self._wakes |= wakes
        if self._writer:
            self._writer.unpark_all()

    def _ring(self) -> None:
        """Wake the peer."""
        os.eventfd_write(self._bell, 1)

    def unread(self) -> Iterator[Envelope]:
        """Yield the messages that a dead peer has sent and that were not received from ``incoming``.

        Only for the task that receives from ``incoming``.
        """
        yield from available(self.incoming)
        for message in self._unpacking:
            yield message, ()  # the packet's first message had its descriptors
        while self.fault is None:
            try:
                packet, fds = receive_packet(self._sock)
            except BlockingIOError:
                return
            if not packet:
                return
            owned = tuple(fds)
            for message in self._unpacked(packet):
                given, owned = owned, ()
                yield message, given
            close_all(owned)

    @trio.lowlevel.enable_ki_protection
    async def _run(self) -> None:
        with self._open:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                nursery.start_soon(self._write)

    @trio.lowlevel.enable_ki_protection
    async def _write(self) -> None:
        while True:
            if not self._posted:
                await self._writer.park()
            await trio.lowlevel.cancel_shielded_checkpoint()  # rule 6
            with closing(packets(self._taken())) as sent:
                for packet, fds in sent:
                    await self._write_packet(packet, fds)
            if self._wakes:
                self._wakes = bool(self._posted)  # the writer waited for room meanwhile: one of these may be to wake it
                self._ring()

    def _taken(self) -> Iterator[Encoded]:
        """Yield what was posted. Messages no longer count as waiting once they are taken from here."""
        while self._posted:
            posted = self._posted.popleft()
            self.on_taken()
            yield posted

    async def _write_packet(self, packet: bytes, fds: tuple[int, ...]) -> None:
        """Write a packet to the socket, waiting for room. If the peer is gone, drop it."""
        try:
            while not self._peer_gone:
                try:
                    socket.send_fds(self._sock, [packet], fds)
                    break
                except BlockingIOError:
                    self._ring()  # messages that wake nothing may fill the socket, too
                    await trio.lowlevel.wait_writable(self._sock)
                except OSError as error:
                    if error.errno != errno.ETOOMANYREFS:
                        raise
                    self._ring()  # the peer is to receive descriptors that are on their way
                    await trio.sleep(IN_FLIGHT_RETRY_S)
        except (BrokenPipeError, ConnectionResetError):
            self._peer_gone = True  # the reader meets the same end and reports it
        finally:
            close_all(fds)

    @trio.lowlevel.enable_ki_protection
    async def _read(self) -> None:
        async with self._in_send:
            while True:
                try:
                    packet, fds = receive_packet(self._sock)
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(self._sock)
                    continue
                if not packet:
                    return
                owned = tuple(fds)
                try:
                    self._unpacking = iter(self._unpacked(packet))
                    for message in self._unpacking:
                        try:  # within this turn of the event loop
                            self._in_send.send_nowait((message, owned))
                        except trio.WouldBlock:
                            await self._in_send.send((message, owned))
                        owned = ()
                finally:
                    close_all(owned)
                if self.fault is not None:
                    return

    def _unpacked(self, packet: bytes) -> list[messages.ControlMessage]:
        """Decode a packet, or set ``fault``.

        A packet without messages is a fault, too: a stream of them would leave the event loop no turn for other tasks.
        """
        try:
            if unpacked := messages.unpack(packet):
                return unpacked
            error: Exception = ValueError("it is empty")
        except msgspec.DecodeError as undecodable:
            error = undecodable
        self.fault = f"a control packet of {len(packet)} bytes cannot be decoded: {error}"
        return []


def available(channel: trio.MemoryReceiveChannel[T]) -> Iterator[T]:
    """Yield what can be received from a channel without waiting."""
    with suppress(trio.WouldBlock, trio.EndOfChannel):
        while True:
            yield channel.receive_nowait()


def _duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))  # noqa: PERF401 - those made are closed when one fails
    except OSError:
        close_all(made)
        raise
    return tuple(made)


@asynccontextmanager
async def open_mailbox(sock: socket.socket, capacity: int, bell: int) -> AsyncIterator[Mailbox]:
    """Own ``sock`` for the block; leaving it closes the connection and every descriptor that is still queued.

    sock: a non-blocking AF_UNIX socket of type SOCK_SEQPACKET.
    capacity: how many messages may be queued in each direction.
    bell: an eventfd on which the peer sleeps, which the caller owns.
    """
    mailbox = Mailbox(sock, capacity, bell)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mailbox._run)
            try:
                yield mailbox
            finally:
                mailbox._open.cancel()
    finally:
        for _, fds in chain(mailbox._posted, available(mailbox.incoming)):
            close_all(fds)
        sock.close()
