"""A connected socket with a receive buffer.

Rules
1. A receive takes at most ``PIECE_BYTES`` from the socket, and a send gives it at most that much at a time. So
   backpressure reaches the caller at once, and every wait can be cancelled.
2. A send is cancelled only while the socket accepts no byte.
3. Each failure of the socket, and a client that accepts no byte for ``SEND_TIMEOUT_S``, raises ``ClientDisconnected``.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from contextlib import suppress
from typing import ClassVar

import trio

PIECE_BYTES = 64 * 1024
SEND_TIMEOUT_S = 60.0
"""A client that accepts no byte for this long counts as disconnected."""
LINGER_S = 2.0
LINGER_BYTES = 64 * 1024 * 1024
"""How long, and for how many received bytes, a lingering close gives the client time to read the response."""

_BLANK_LINE = re.compile(rb"\n\r?\n")


class ClientDisconnected(Exception):
    """The client has closed or reset its connection, or does not accept data."""


class BufferedSocket:
    """A connected socket. buffer: the bytes that were received and not used yet."""

    scheme: ClassVar[str] = "http"
    """The scheme of the URLs under which clients reach it."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock
        self.buffer = bytearray()
        self._searched = 0
        """The size of the part of the buffer in which ``take_head`` found no blank line."""
        self.client: tuple[str, int] = sock.getpeername()[:2]
        self.server: tuple[str, int] = sock.getsockname()[:2]

    async def handshake(self) -> None:
        """Prepare the connection. Only TLS has something to do (``tls_socket``). Raises ClientDisconnected."""

    async def fill(self) -> bool:
        """Receive into the buffer. Return False if the client has closed its side. Raises ClientDisconnected."""
        try:
            data = await self._socket.recv(PIECE_BYTES)
        except OSError as error:
            raise ClientDisconnected from error
        self.buffer += data
        return bool(data)

    def take(self, most: int) -> bytes:
        """Remove up to ``most`` bytes from the buffer and return them."""
        data = bytes(self.buffer[:most])
        del self.buffer[:most]
        self._searched = 0
        return data

    def skip_empty_lines(self) -> bool:
        """Drop empty lines from the beginning of the buffer. Return whether something is left."""
        del self.buffer[: len(self.buffer) - len(self.buffer.lstrip(b"\r\n"))]
        self._searched = 0
        return bool(self.buffer)

    def take_head(self) -> bytes | None:
        """Remove a request's head from the buffer: all lines up to and including the first blank one.

        The buffer does not begin with an empty line. Return None if the head is not complete.
        """
        found = _BLANK_LINE.search(self.buffer, self._searched)
        if found is None:
            self._searched = max(0, len(self.buffer) - 2)
            return None
        return self.take(found.end())

    def put_back(self, data: bytes) -> None:
        """Return bytes to the buffer that were taken and not used."""
        self.buffer[:0] = data
        self._searched = 0

    async def send(self, *pieces: bytes) -> None:
        """Send all of ``pieces``. Raises ClientDisconnected.

        Cancellation: an unknown part of the data may have been sent, and the socket accepts no more.
        """
        if sum(map(len, pieces)) <= PIECE_BYTES:
            pieces = (b"".join(pieces),)
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[await self._send_some(rest[:PIECE_BYTES]) :]

    async def _send_some(self, data: memoryview) -> int:
        with trio.move_on_after(SEND_TIMEOUT_S):
            while True:
                try:
                    sent = os.write(self._socket.fileno(), data)  # trio's own send begins with a checkpoint
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._socket)
                except OSError as error:
                    raise ClientDisconnected from error
                else:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    return sent
        raise ClientDisconnected

    def try_send(self, data: bytes) -> None:
        """Send what the kernel takes at once. The rest is lost, and so is all of it if the client has disconnected."""
        with suppress(OSError):
            os.write(self._socket.fileno(), data)

    def check_error(self) -> None:
        """Raises ClientDisconnected if the kernel has a pending error for the socket, such as a reset."""
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise ClientDisconnected

    def reset_on_close(self) -> None:
        """Make ``close`` reset the connection, which tells the client that the response is incomplete."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        self._socket.close()

    async def linger(self) -> None:
        """Close our side, then discard what the client still sends until it closes too, within ``LINGER_*``.

        Closing a socket with unread data would reset the connection, and a client that is still sending could lose the
        response.
        """
        left = LINGER_BYTES
        with trio.move_on_after(LINGER_S), suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while left > 0 and (data := await self._socket.recv(PIECE_BYTES)):
                left -= len(data)
