"""A control socket as two bounded trio memory channels.

Rules
1. A packet is some messages, whole (SOCK_SEQPACKET), and b"" is read exactly when the other side is gone. Descriptors
   in a packet are its first message's.
2. ``post`` never waits, so that no caller ever hangs on a worker that has stopped reading: it raises ``MailboxFull``,
   and the owner kills the worker.
3. Descriptors are duplicated when posted and closed when sent or dropped: who posts keeps its own.
4. What is no message ends the reading, as the other side's end does, and is said in ``fault``.
5. The connection outlives the cancellation of its block, so that the last words of a cancelled owner are still sent.
6. What is posted in one turn of the event loop goes out as one packet where it fits, a turn later than it could: then
   the input of the same requests is in the ring. Requests that come together are read together, and not one by one.
7. Mail of a ``patient`` mailbox goes out a moment later still: who has nothing to do yet takes no core from who has.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from itertools import chain
from typing import TypeAlias, TypeVar

import msgspec
import trio

from omni_actors.errors import OmniError
from omni_actors.protocol import messages
from omni_actors.protocol.messages import ControlMessage

Envelope: TypeAlias = tuple[ControlMessage, tuple[int, ...]]
"""A message and the descriptors that came with it; the receiver owns them."""

MAX_FDS = 8
PACKED, PACKED_BYTES = 64, 16 * 1024
"""Of messages in one packet; a larger one goes by itself. Those in the writer's hands are not counted as waiting."""

DELIVERY_DELAY_S = 0.001
"""About what a worker needs to take in some dozens of requests that come at once."""

T = TypeVar("T")


class MailboxFull(OmniError):
    """The other side has not read ``pending`` messages."""

    def __init__(self, pending: int) -> None:
        self.pending = pending
        super().__init__(f"{pending} control messages are waiting unread")


class Mailbox:
    """One end of a control connection; open it with ``open_mailbox``."""

    def __init__(self, sock: socket.socket, capacity: int) -> None:
        self._sock = sock
        self._capacity = capacity
        self._out_send, self._out_receive = trio.open_memory_channel[tuple[bytes, tuple[int, ...]]](capacity)
        self._waiting = 0
        """Messages that were posted and that the writer has not begun to pack."""
        self._in_send, self.incoming = trio.open_memory_channel[Envelope](capacity)
        self.delay_delivery = False
        """Whether what is posted here may wait ``DELIVERY_DELAY_S``, for what is posted elsewhere to be read first."""
        self.fault: str | None = None
        """Why nothing more is read though the other side may live."""
        self._in_hand: Iterator[ControlMessage] = iter(())
        """What the reader has of a packet and there is no room for yet."""
        self._peer_gone = False
        self._written = trio.Event()
        self._open = trio.CancelScope(shield=True)

    @property
    def congested(self) -> bool:
        """Whether half of the room is taken: the other side has stopped reading, or reads too slowly."""
        return 2 * self._waiting >= self._capacity

    def post(self, message: ControlMessage, fds: Sequence[int] = ()) -> None:
        """Queue a message in order; one to a peer that is gone is dropped.

        Raises MailboxFull, ValueError (a message too large, or of what cannot be encoded), OSError (no descriptors).
        """
        if self._peer_gone:
            return
        packet = messages.encode(message)
        owned = _duplicates(fds) if fds else ()
        try:
            self._out_send.send_nowait((packet, owned))
        except trio.WouldBlock:
            _close_all(owned)
            raise MailboxFull(self._capacity) from None
        self._waiting += 1

    def available(self) -> Iterator[Envelope]:
        """What else is here to be taken from ``incoming``; for its only taker."""
        return _there(self.incoming)

    def unread(self) -> Iterator[ControlMessage]:
        """What a peer that says no more has said and nobody has taken from ``incoming``; for its only taker."""
        for message, fds in self.available():
            _close_all(fds)
            yield message
        yield from self._in_hand
        while self.fault is None:
            try:
                packet = self._sock.recv(messages.MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # as in ``_read``
            if not packet:
                return
            yield from self._unpacked(packet)

    async def send(self, message: ControlMessage) -> None:
        """Queue a message, waiting for room. A message to a peer that is gone is dropped."""
        if not self._peer_gone:
            await self._out_send.send((messages.encode(message), ()))
            self._waiting += 1

    async def drain(self) -> None:
        """Wait until everything queued has been handed to the socket. Nothing can be sent afterwards."""
        self._out_send.close()
        await self._written.wait()

    @trio.lowlevel.enable_ki_protection
    async def _carry(self) -> None:
        with self._open:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                nursery.start_soon(self._write)

    @trio.lowlevel.enable_ki_protection
    async def _write(self) -> None:
        async for first in self._out_receive:
            await trio.lowlevel.cancel_shielded_checkpoint()  # rule 6
            if self.delay_delivery:
                with trio.CancelScope(shield=True):
                    await trio.sleep(DELIVERY_DELAY_S)  # rule 7
            with closing(_packets(self._posted(first))) as packets:
                for packet, fds in packets:
                    await self._hand_over(packet, fds)
        self._written.set()

    def _posted(self, first: tuple[bytes, tuple[int, ...]]) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """What there is to be sent now. It waits no more once it is taken from here."""
        for posted in chain([first], _there(self._out_receive)):
            self._waiting -= 1
            yield posted

    async def _hand_over(self, packet: bytes, fds: tuple[int, ...]) -> None:
        """To the socket, waiting for room there; to a peer that is gone: dropped."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            while not self._peer_gone:
                try:
                    self._sock.sendmsg([packet], rights)
                    break
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._sock)
        except (BrokenPipeError, ConnectionResetError):
            self._peer_gone = True  # the reader meets the same end and reports it
        finally:
            _close_all(fds)

    @trio.lowlevel.enable_ki_protection
    async def _read(self) -> None:
        async with self._in_send:
            while True:
                try:
                    packet, ancillary, _, _ = self._sock.recvmsg(
                        messages.MAX_PACKET_BYTES, socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
                    )
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(self._sock)
                    continue
                except ConnectionResetError:
                    continue  # said once, where the peer left mail unread; what it sent itself is still to be read
                if not packet:
                    return
                fds = array.array("i")
                for level, kind, data in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                owned = tuple(fds)
                try:
                    self._in_hand = iter(self._unpacked(packet))
                    for message in self._in_hand:
                        await _put(self._in_send, (message, owned))
                        owned = ()
                finally:
                    _close_all(owned)
                if self.fault is not None:
                    return

    def _unpacked(self, packet: bytes) -> list[ControlMessage]:
        """An empty packet is no message either: one after the other would leave no turn to anybody."""
        try:
            if unpacked := messages.unpack(packet):
                return unpacked
            error: Exception = ValueError("it is empty")
        except (msgspec.DecodeError, UnicodeDecodeError) as undecodable:
            error = undecodable
        self.fault = f"a control packet of {len(packet)} bytes is no message: {error}"
        return []

    def _drop_queued(self) -> None:
        for _, fds in chain(_there(self._out_receive), _there(self.incoming)):
            _close_all(fds)


def _packets(posted: Iterable[tuple[bytes, tuple[int, ...]]]) -> Generator[tuple[bytes, tuple[int, ...]]]:
    """As few as possible. Closing it closes the descriptors that it has not given out."""
    batch: list[bytes] = []
    size = 0
    owned: tuple[int, ...] = ()
    try:
        for message, fds in posted:
            if batch and (fds or size + len(message) > PACKED_BYTES or len(batch) == PACKED):
                full, given, owned = messages.pack(batch), owned, fds
                batch, size = [], 0
                yield full, given
            elif fds:
                owned = fds
            batch.append(message)
            size += len(message)
        given, owned = owned, ()
        yield messages.pack(batch), given
    finally:
        _close_all(owned)


def _there(channel: trio.MemoryReceiveChannel[T]) -> Iterator[T]:
    """What can be taken from it without waiting."""
    with suppress(trio.WouldBlock, trio.EndOfChannel):
        while True:
            yield channel.receive_nowait()


async def _put(channel: trio.MemorySendChannel[Envelope], envelope: Envelope) -> None:
    """Where there is room, within this turn of the event loop."""
    try:
        channel.send_nowait(envelope)
    except trio.WouldBlock:
        await channel.send(envelope)


def _duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))  # noqa: PERF401 - those made are closed when one fails
    except OSError:
        _close_all(made)
        raise
    return tuple(made)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@asynccontextmanager
async def open_mailbox(sock: socket.socket, capacity: int) -> AsyncIterator[Mailbox]:
    """Own ``sock`` for the block; leaving it closes the connection and every descriptor still queued.

    ``mailbox.incoming`` ends (EndOfChannel) when the other side is gone and everything it sent has been read.
    """
    mailbox = Mailbox(sock, capacity)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mailbox._carry)
            try:
                yield mailbox
            finally:
                mailbox._open.cancel()
    finally:
        mailbox._drop_queued()
        mailbox._sock.close()
