"""The bytes of one connection: a socket with a buffer, bounded in both directions.

Rules
1. A read takes at most ``PIECE_BYTES`` from the socket, and a write gives it at most that much at a time, so that
   backpressure reaches the caller at once and every wait can be cancelled.
2. Each failure of the socket, and a peer that takes nothing for ``SEND_TIMEOUT_S``, is ``ClientDisconnected``.
"""

from __future__ import annotations

import re
import socket
import struct
from contextlib import suppress

import trio

PIECE_BYTES = 64 * 1024
SEND_TIMEOUT_S = 60.0
"""A peer that accepts no byte for so long is dropped."""
LINGER_S = 2.0
LINGER_BYTES = 64 * 1024 * 1024
"""How long, and for how many bytes, a peer that still sends may read its answer before the connection is closed."""

_BLANK_LINE = re.compile(rb"\n\r?\n")


class ClientDisconnected(Exception):
    """The peer has closed or reset its connection, or takes nothing off it."""


class BufferedSocket:
    """One connected socket. buffer: the bytes that were received and not used yet."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock
        self.buffer = bytearray()
        self._searched = 0
        """The part of the buffer in which ``take_head`` found no blank line."""
        self.client: tuple[str, int] = sock.getpeername()[:2]
        self.server: tuple[str, int] = sock.getsockname()[:2]

    async def fill(self) -> bool:
        """Receive into the buffer. False: the peer has closed its side. Raises ClientDisconnected."""
        try:
            data = await self._socket.recv(PIECE_BYTES)
        except OSError as error:
            raise ClientDisconnected from error
        self.buffer += data
        return bool(data)

    def take(self, most: int) -> bytes:
        """Remove up to ``most`` bytes from the buffer."""
        data = bytes(self.buffer[:most])
        del self.buffer[:most]
        self._searched = 0
        return data

    def take_head(self) -> bytes | None:
        """Remove the lines up to the first blank one, with it. Empty lines before them are skipped. None: not whole."""
        if not self._searched:
            del self.buffer[: len(self.buffer) - len(self.buffer.lstrip(b"\r\n"))]
        found = _BLANK_LINE.search(self.buffer, self._searched)
        if found is None:
            self._searched = max(0, len(self.buffer) - 2)
            return None
        return self.take(found.end())

    def put_back(self, data: bytes) -> None:
        """Return bytes that were taken and not used."""
        self.buffer[:0] = data
        self._searched = 0

    async def write(self, *pieces: bytes) -> None:
        """Send all of ``pieces``. Raises ClientDisconnected. Cancellation: some of them may have been sent."""
        if sum(map(len, pieces)) <= PIECE_BYTES:
            pieces = (b"".join(pieces),)
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[await self._send(rest[:PIECE_BYTES]) :]

    async def _send(self, data: memoryview) -> int:
        with trio.move_on_after(SEND_TIMEOUT_S):
            try:
                return await self._socket.send(data)
            except OSError as error:
                raise ClientDisconnected from error
        raise ClientDisconnected

    def require_no_error(self) -> None:
        """Raise ClientDisconnected if the kernel has a pending error for the socket, such as a reset."""
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise ClientDisconnected

    def reset_on_close(self) -> None:
        """Closing will tell the peer that what it got is not whole."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        self._socket.close()

    async def linger(self) -> None:
        """End our side, and discard what the peer still sends until it has closed, within the bounds above.

        Closing with unread data would reset the connection, and a peer that is still sending might lose the answer.
        """
        left = LINGER_BYTES
        with trio.move_on_after(LINGER_S), suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while left > 0 and (data := await self._socket.recv(PIECE_BYTES)):
                left -= len(data)
