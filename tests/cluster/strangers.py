"""Connections with a pump, or to the parent, that are made byte by byte; floods of them, and what these cost."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil
import trio

from omni_actors.cluster.channel import Address
from omni_actors.cluster.handshake import ROLE_OF_LINKS, Acceptor, Connector
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.strangers import MOST_STRANGERS
from tests.cluster.linked_rings import SECRET, WATCHDOG_S
from tests.support.open_descriptors import open_descriptors

FLOOD = """
import contextlib, random, socket, sys
address, count = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
connections = []
for n in range(count):
    connection = socket.create_connection(address)
    connection.send(random.Random(n).randbytes(n % 80 + 1))
    connections.append(connection)
    if len(connections) == 200:
        with connections.pop(0) as oldest, contextlib.suppress(ConnectionResetError):
            oldest.recv(1)
"""
"""So many connections, 200 at a time. Most say less than a hello, so they are open until they have to make room: the
oldest is awaited, so more than may be open are accepted at a time."""
MEMORY = 8 << 20
"""What a flood may cost in memory: far less than 10,000 connections with a buffer each."""


class Cost:
    """What strangers cost this process, from now on."""

    def __init__(self) -> None:
        self._process, self._descriptors = psutil.Process(), len(open_descriptors())
        self._bytes = self._process.memory_info().rss

    def check(self) -> None:
        assert self._process.num_fds() <= self._descriptors + MOST_STRANGERS + 16
        assert self._process.memory_info().rss <= self._bytes + MEMORY

    async def watch(self) -> None:
        """Check it until cancelled."""
        while True:
            self.check()
            await trio.sleep(0.01)


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


def accept_and_shake_hands(listener: socket.socket) -> socket.socket:
    """Return the next connection once the other side has proved that it knows the secret."""
    connection = listener.accept()[0]
    connection.settimeout(WATCHDOG_S)
    acceptor = Acceptor(SECRET)
    while acceptor.wanted:
        connection.sendall(acceptor.receive(connection.recv(acceptor.wanted, socket.MSG_WAITALL)))
    return connection


def wait_early(pump: Pump, link_id: int, *, is_there: bool = True) -> None:
    """Wait until a pump has accepted the connection of a link that it does not expect, or has none."""
    give_up = time.monotonic() + WATCHDOG_S
    while (link_id in pump._accepting._early) is not is_there:
        assert time.monotonic() < give_up
        time.sleep(0.01)


def wait_forgotten(pump: Pump, link_id: int) -> None:
    """Wait until a pump has accepted the connection of a link that it does not expect, and has dropped it."""
    wait_early(pump, link_id)
    wait_early(pump, link_id, is_there=False)


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
