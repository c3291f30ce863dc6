"""Connections as the pump uses them: they never block, they take several buffers, and TLS looks as TCP does.

Rule 1: ``send`` and ``receive`` return None where they would have to wait. The caller tries again when the descriptor
is ready.
Rule 2: small messages leave at once (TCP_NODELAY).
Rule 3: a connection that is given up is reset, so that the kernel does not keep what it could not send.
Rule 4: the reset may be lost. So on the side that connects, the kernel asks a silent other side whether it still has
the connection. That side answers with another reset if it does not. No answer ends nothing here.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

Address: TypeAlias = tuple[str, int]
"""An IP address and a port."""
BACKLOG: Final = 128
_PROBES: Final = {socket.TCP_KEEPIDLE: 4, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 127}
"""When the kernel asks first, in seconds, and how often. An open link that is idle hears of its other side before that.
So often that silence ends a link by the pump's rule before the kernel ends its connection."""
_RESET: Final = struct.pack("ii", 1, 0)
_TLS_RECORD: Final = 16 << 10


class Tls(NamedTuple):
    """The contexts of both sides: each node accepts links and makes some."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class Channel:
    """A connected TCP socket."""

    tells_when_empty = True
    """A ``receive`` that does not fill the buffers has emptied the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def limit_silence(self, silent_s: float) -> None:
        """Let the kernel end the connection when what was sent is not acknowledged for ``silent_s`` seconds."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))

    def send(self, buffers: Sequence[bytes | memoryview]) -> int | None:
        """Send the beginning of ``buffers``; none is empty. Returns how many bytes, None: no room. Raises OSError."""
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return None

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        """Fill ``buffers`` in order. Returns how many bytes; 0: the other side ended; None: nothing. Raises OSError."""
        try:
            return self._socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return None

    def finish(self) -> None:
        """Send no more; what was sent arrives, and then its end."""
        with suppress(OSError):  # the other side has reset it, which ``receive`` reports
            # ``ssl.SSLSocket.shutdown`` would end TLS in both directions.
            socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def close(self) -> None:
        """Close; what was sent arrives. Idempotent."""
        self._socket.close()

    def reset(self) -> None:
        """Close at once, and drop what was not sent. Idempotent."""
        if self._socket.fileno() >= 0:
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._socket.close()


class TlsChannel(Channel):
    """The same over TLS. Its own handshake happens in the first calls."""

    tells_when_empty = False

    def __init__(self, connection: socket.socket, tls: Tls, server_hostname: str | None) -> None:
        """server_hostname: whose certificate to expect; None on the side that accepts."""
        super().__init__(connection)
        context = tls.server if server_hostname is None else tls.client
        self._tls = context.wrap_socket(
            connection,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
        )
        self._socket = self._tls
        self._again = b""
        """What OpenSSL was given and could not send yet: it has to be given the same again."""

    def send(self, buffers: Sequence[bytes | memoryview]) -> int | None:
        piece = self._again or _first_bytes(buffers, _TLS_RECORD)
        try:
            sent = self._tls.send(piece)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._again = piece
            return None
        self._again = b""
        return sent

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        try:
            return self._tls.recv_into(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None


def _first_bytes(buffers: Sequence[bytes | memoryview], size: int) -> bytes:
    """Return the first ``size`` bytes of the buffers, one after the other, or all."""
    pieces = []
    for each in buffers:
        pieces.append(each[:size])
        size -= len(pieces[-1])
        if not size:
            break
    return b"".join(pieces)


def listen(host: str) -> socket.socket:
    """Return a listening socket on a free port of the IP address ``host``. Raises ValueError, OSError.

    ValueError: not an IP address, or one that means every interface of the machine.
    """
    if ipaddress.ip_address(host).is_unspecified:
        raise ValueError(f"{host} means every interface: give the node's own address")
    listener = socket.create_server((host, 0), family=_family(host), backlog=BACKLOG)
    listener.setblocking(False)
    return listener


def connect(address: Address) -> socket.socket:
    """Begin to connect: the socket is writable when this is over. Raises OSError, ValueError (no IP address)."""
    connection = socket.socket(_family(address[0]), socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        with suppress(BlockingIOError):
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def is_connected(connection: socket.socket) -> bool:
    """Return whether connecting is over. Raises OSError if it has failed."""
    if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))
    try:
        connection.getpeername()
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            return False
        raise
    return True


def open_channel(connection: socket.socket, tls: Tls | None, server_hostname: str | None) -> Channel:
    """Return the channel of a connected socket, which it owns. Raises OSError (the other side is gone)."""
    return Channel(connection) if tls is None else TlsChannel(connection, tls, server_hostname)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
