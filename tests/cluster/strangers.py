"""Connections to a pump, or to the parent, that are made byte by byte."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from omni_actors.cluster.channel import Address
from omni_actors.cluster.handshake import ROLE_OF_LINKS, Connector
from tests.cluster.linked_rings import SECRET, WATCHDOG_S


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, WATCHDOG_S)


def authenticated(
    address: Address, subject: int, *, role: str = ROLE_OF_LINKS, secret: bytes = SECRET
) -> tuple[socket.socket, bytes]:
    """Return a connection that has done the handshake, and the bytes that it has sent."""
    connection = connect(address)
    handshake = Connector(secret, role, subject)
    connection.sendall(handshake.hello)
    answer = b""
    while len(answer) < handshake.wanted:
        received = connection.recv(handshake.wanted - len(answer))
        assert received, "the other side closed the connection before the handshake was over"
        answer += received
    proof = handshake.receive(answer)
    connection.sendall(proof)
    return connection, handshake.hello + proof


def wait_closed(connection: socket.socket) -> None:
    """Wait until the other side has closed the connection, and close this one."""
    with connection, suppress(ConnectionResetError, BrokenPipeError):
        while connection.recv(1 << 16):
            pass


@contextmanager
def forwarder(address: Address, seen: bytearray) -> Iterator[Address]:
    """Pass one connection on to ``address``, and note all its bytes. Yields where to connect to."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:

        def forward() -> None:
            with listener.accept()[0] as near, connect(address) as far:
                list(threads.map(lambda ends: _copy(*ends, seen), [(near, far), (far, near)]))

        done = threads.submit(forward)
        yield listener.getsockname()
        done.result(WATCHDOG_S)


def _copy(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    with suppress(OSError):  # either side may reset it
        while data := source.recv(1 << 16):
            seen += data
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
