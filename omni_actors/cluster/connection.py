"""A control connection as trio uses it: messages out without waiting, messages in one after the other.

Rules
1. ``post`` never waits. What is not sent yet is bounded: beyond ``MOST_WAITING`` bytes the connection is given up.
2. Messages that are posted in one turn of the event loop travel in one frame, if they fit.
3. The connection belongs to its ``run``: leaving it closes the socket.
4. Before the handshake is over nothing is decoded, and the handshake has ``HANDSHAKE_S`` seconds.
"""

from __future__ import annotations

import collections
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

import msgspec
import trio

from omni_actors.cluster.control import BATCH_BYTES, FromAgent, Opener, Sealer, ToAgent, encode
from omni_actors.cluster.handshake import Connector, Handshake, HandshakeFailed
from omni_actors.errors import OmniError

HANDSHAKE_S: Final = 5.0
MOST_WAITING: Final = 64 << 20
ROOM: Final = 1 << 20
"""Below this many waiting bytes, ``wait_room`` returns."""
READ_BYTES: Final = 64 << 10

M = TypeVar("M")
S = TypeVar("S", bound=trio.abc.Stream)


class ConnectionLost(OmniError):
    """A control connection has ended. why: in words."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the control connection is lost: {why}")


@asynccontextmanager
async def closed_at_once(stream: S) -> AsyncIterator[S]:
    """Close a connection at the end of the block, without waiting for the other side as TLS would."""
    try:
        yield stream
    finally:
        await trio.aclose_forcefully(stream)


async def shake_hands(stream: trio.abc.Stream, handshake: Handshake) -> None:
    """Authenticate both sides of a new connection, TLS included where the stream has it.

    Raises HandshakeFailed: the other side does not belong to this cluster. ConnectionLost: it may; try again.
    """
    with trio.move_on_after(HANDSHAKE_S) as scope:
        try:
            await _exchange(stream, handshake)
        except trio.BrokenResourceError as error:
            cause = error.__cause__ or error
            if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
                raise HandshakeFailed(str(cause)) from error
            raise ConnectionLost(str(cause)) from error
    if scope.cancelled_caught:
        raise ConnectionLost(f"the handshake took longer than {HANDSHAKE_S:g} s")


async def _exchange(stream: trio.abc.Stream, handshake: Handshake) -> None:
    if isinstance(handshake, Connector):
        await stream.send_all(handshake.hello)
    while handshake.wanted:
        received = b""
        while len(received) < handshake.wanted:
            data = bytes(await stream.receive_some(handshake.wanted - len(received)))
            if not data:
                raise ConnectionLost("the other side closed it during the handshake")
            received += data
        if reply := handshake.receive(received):
            await stream.send_all(reply)


class Connection(Generic[M]):
    """One side of an authenticated control connection.

    keys: what this side sends with, and what the other side does. decoder: of the other side's messages.
    """

    def __init__(
        self, stream: trio.abc.Stream, keys: tuple[bytes, bytes], decoder: msgspec.msgpack.Decoder[list[M]]
    ) -> None:
        self._stream, self._sealer = stream, Sealer(keys[0])
        self._opener = Opener(keys[1], decoder)
        self._arrived: Iterator[M] = iter(())
        """The messages in what was read last."""
        self._queue: collections.deque[bytes] = collections.deque()
        self._waiting, self._is_full = 0, False
        """Bytes that wait to be sent, and whether a message was left out because they were too many."""
        self._posted, self._room = trio.Event(), trio.lowlevel.ParkingLot()

    @property
    def waiting_bytes(self) -> int:
        """How many bytes of messages were posted that the kernel has not taken."""
        return self._waiting

    def post(self, message: FromAgent | ToAgent) -> None:
        """Send a message, in order. Raises ValueError (too large). It is dropped if the connection is lost."""
        encoded = encode(message)
        self._is_full = self._is_full or self._waiting + len(encoded) > MOST_WAITING
        if not self._is_full:
            self._queue.append(encoded)
            self._waiting += len(encoded)
        self._posted.set()

    async def wait_room(self) -> None:
        """Wait until little waits to be sent. For senders that may wait."""
        while self._waiting > ROOM:
            await self._room.park()

    async def send_now(self, message: FromAgent | ToAgent) -> None:
        """Send a message, and return when the kernel has it. Not while ``write`` runs. Raises ConnectionLost."""
        await self._send([encode(message)])

    async def write(self) -> None:
        """Send what is posted until cancelled. Raises ConnectionLost."""
        while True:
            await self._posted.wait()
            await trio.lowlevel.checkpoint()  # rule 2
            if self._is_full:
                raise ConnectionLost(f"more than {MOST_WAITING} bytes wait to be sent")
            self._posted = trio.Event()
            while self._queue:
                batch = self._take_batch()
                await self._send(batch)
                self._waiting -= sum(map(len, batch))
                self._room.unpark_all()

    async def _send(self, batch: list[bytes]) -> None:
        try:
            await self._stream.send_all(self._sealer.seal(batch))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionLost(str(error)) from error

    async def close(self) -> None:
        """Close the connection at once. What was not sent is dropped."""
        await trio.aclose_forcefully(self._stream)

    def _take_batch(self) -> list[bytes]:
        batch = [self._queue.popleft()]
        size = len(batch[0])
        while self._queue and size + len(self._queue[0]) <= BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += len(batch[-1])
        return batch

    async def receive(self) -> M:
        """Return the other side's next message. Raises ConnectionLost, ControlCorrupted."""
        while (message := next(self._arrived, None)) is None:
            try:
                data = bytes(await self._stream.receive_some(READ_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionLost(str(error)) from error
            if not data:
                raise ConnectionLost("the other side has closed it")
            self._arrived = self._opener.feed(data)
        return message
