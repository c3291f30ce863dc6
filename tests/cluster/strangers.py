"""Connections with a pump, or to the parent, that are made byte by byte; floods of them, and what these cost."""

from __future__ import annotations

import math
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress

import psutil
import pytest
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
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.send(random.Random(n).randbytes(n % 80 + 1))
    connections.append(connection)
    if len(connections) == 200:
        with connections.pop(0) as oldest, contextlib.suppress(ConnectionResetError):
            oldest.recv(1)
"""
"""So many connections, 200 at a time. Most say less than a hello, so they are open until they have to make room: the
oldest is awaited, so more than may be open are accepted at a time."""
KEPT_UP = """
import contextlib, resource, select, socket, sys
address, count, said, host = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), bytes.fromhex(sys.argv[4]), sys.argv[5]
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100,) * 2)
events, connections, ended = select.epoll(), {}, 0
while True:
    while len(connections) < count:
        connection = socket.socket()
        connection.setblocking(False)
        connection.bind((host, 0))
        connection.connect_ex(address)
        connections[connection.fileno()] = connection
        events.register(connection, select.EPOLLRDHUP | (select.EPOLLOUT if said else 0))
    for fd, happened in events.poll():
        if happened == select.EPOLLOUT:
            events.modify(fd, select.EPOLLRDHUP)
            with contextlib.suppress(ConnectionError):
                connections[fd].send(said)
            continue
        connections.pop(fd).close()
        ended += 1
        if ended == count:
            print("all were displaced", flush=True)
"""
"""So many connections at a time, which say the same. One that is closed is made again."""
MEMORY = 8 << 20
"""What a flood may cost in memory: far less than 10,000 connections with a buffer each."""


class Cost:
    """What strangers cost a process, from now on. pid: of another one than this. memory: what they may cost."""

    def __init__(self, pid: int | None = None, memory: int = MEMORY) -> None:
        self._process, self._memory = psutil.Process(pid), memory
        self._descriptors = len(open_descriptors()) if pid is None else self._process.num_fds()
        self._bytes = self._process.memory_info().rss

    def check(self) -> None:
        assert self._process.num_fds() <= self._descriptors + MOST_STRANGERS + 16
        assert self._process.memory_info().rss <= self._bytes + self._memory

    async def watch(self) -> None:
        """Check it until cancelled."""
        while True:
            self.check()
            await trio.sleep(0.01)


@asynccontextmanager
async def kept_up(address: Address, count: int, *, said: bytes = b"", host: str = "127.0.0.1") -> AsyncIterator[None]:
    """Flood an address during the block, which begins when so many connections have had to make room.

    said: by each connection. host: the address from which they come.
    """
    if (most := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) < count + 100:
        pytest.skip(f"a process may have {most} descriptors here")
    command = [sys.executable, "-c", KEPT_UP, address[0], str(address[1]), str(count), said.hex(), host]
    flood = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    try:
        assert flood.stdout is not None
        with trio.fail_after(WATCHDOG_S):
            assert await flood.stdout.receive_some()
        yield
        assert flood.poll() is None
    finally:
        flood.kill()
        with trio.CancelScope(shield=True):
            await flood.wait()


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


def wait_early(pump: Pump, link_id: int) -> None:
    """Wait until a pump has accepted the connection of a link that it does not expect."""
    _wait(lambda: link_id in pump._accepting._early)


def wait_forgotten(pump: Pump, link_id: int) -> None:
    """Wait until a pump has accepted the connection of a link that it does not expect, and has dropped it.

    Its time is over as soon as it is there. The link may have another connection then.
    """
    wait_early(pump, link_id)
    early = pump._accepting._early
    channel = early[link_id][0]
    pump._call(lambda: early.update({link_id: (channel, 0.0)}))
    _wait(lambda: early.get(link_id, (None, 0.0))[0] is not channel)


def give_up_link(pump: Pump, why: str = "") -> None:
    """Let the time of a pump's one link be over that has no connection yet.

    why: a part of the reason for which an attempt must have failed before.
    """
    _wait(lambda: any(why in dial.error for dial in list(pump._dialing._dials.values())))
    # The first call may end an attempt, and then the second one gives the link up.
    pump._call(lambda: [pump._dialing.pass_deadlines(math.inf) for _ in range(2)])


def _wait(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def client_hello() -> bytes:
    """Return the first message of TLS, as OpenSSL makes it."""
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(received, to_send).do_handshake()
    return to_send.read()


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
