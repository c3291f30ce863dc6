"""The transports: ours, bare TCP as the limit for Python, ZMQ, and a ring without a network, which a link adds to.

*With relays* is bare TCP with a process on each node that passes bytes on, as a link has: the least that such a process
costs, in Python.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import numpy as np

from bench.link.measure import STREAM_SIZES, WATCHDOG_S, End, fork
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.tls import Credentials, make_credentials
from ringbuf import Ring, RingClosed

LARGEST = max(STREAM_SIZES)
RING_BYTES = 64 << 20
SECRET = secrets.token_bytes(32)


def cpu_s_of(process: ForkProcess) -> float:
    """Return the CPU time of a process that runs."""
    assert process.pid is not None
    return time.clock_gettime(~process.pid << 3 | 2)  # its CPU clock


class BareEnd:
    """The limit for Python: one ``sendmsg`` for each message, and ``recv_into`` until it is complete."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = memoryview(np.zeros(LARGEST + 16, np.uint8).data)
        self._header = bytes(16)

    def send(self, message: memoryview) -> None:
        total = len(message) + 16
        sent = self._socket.sendmsg([self._header, message])
        while sent < total:
            sent += self._socket.sendmsg([message[sent - 16 :]])

    def receive(self, size: int) -> memoryview:
        filled = 0
        while filled < size + 16:
            filled += self._socket.recv_into(self._buffer[filled : size + 16])
        return self._buffer[16 : size + 16]

    def cpu_s(self) -> float:
        return 0.0

    def close(self) -> None:
        self._socket.close()


def connected(host: str, other: Connection, is_near: bool) -> socket.socket:
    """Return this node's end of a TCP connection."""
    if is_near:
        connection = socket.create_connection(other.recv())
    else:
        with socket.create_server((host, 0)) as listener:
            other.send(listener.getsockname())
            connection = listener.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Bare:
    name = "bare TCP"

    def open(self, host: str, other: Connection, is_near: bool) -> End:
        return BareEnd(connected(host, other, is_near))


class RelayedEnd(BareEnd):
    """A Unix socket to a process of this node, which passes all bytes on to the other node, and back."""

    def __init__(self, connection: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        self._process = fork.Process(target=self._relay, args=(theirs, connection))
        self._process.start()
        theirs.close()
        connection.close()
        super().__init__(ours)

    @staticmethod
    def _relay(here: socket.socket, there: socket.socket) -> None:
        threading.Thread(target=pass_on, args=(there, here), daemon=True).start()
        pass_on(here, there)

    def cpu_s(self) -> float:
        return cpu_s_of(self._process)

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.join()


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass on what comes, until the source closes."""
    buffer = memoryview(bytearray(1 << 20))
    while size := source.recv_into(buffer):
        target.sendall(buffer[:size])


class Relayed:
    name = "bare TCP, relays"

    def open(self, host: str, other: Connection, is_near: bool) -> End:
        return RelayedEnd(connected(host, other, is_near))


class ZmqEnd:
    def __init__(self, channel: Any, context: Any) -> None:
        import msgspec

        self._socket, self._context = channel, context
        self._encode, self._decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(memoryview).decode

    def send(self, message: memoryview) -> None:
        self._socket.send(self._encode(message), copy=False)

    def receive(self, size: int) -> memoryview:
        found: memoryview = self._decode(self._socket.recv(copy=False).buffer)
        return found

    def cpu_s(self) -> float:
        return 0.0

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Zmq:
    name = "ZMQ tcp + msgpack"

    def open(self, host: str, other: Connection, is_near: bool) -> End:
        import zmq

        context = zmq.Context()
        channel = context.socket(zmq.PAIR)
        channel.set_hwm(8)
        if is_near:
            channel.connect(other.recv())
        else:
            other.send(f"tcp://{host}:{channel.bind_to_random_port(f'tcp://{host}')}")
        return ZmqEnd(channel, context)


class RingEnd:
    """Two rings, each with its other end in another process."""

    def __init__(self, outgoing: Ring, incoming: Ring) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._producer, self._consumer = outgoing.claim_producer(), incoming.claim_consumer()
        self._frame: Any = None

    def send(self, message: memoryview) -> None:
        self._producer.send(message, timeout=WATCHDOG_S)

    def receive(self, size: int) -> memoryview:
        if self._frame is not None:
            self._frame.release()
        self._frame = self._consumer.recv(WATCHDOG_S)
        found: memoryview = self._frame.data
        return found

    def cpu_s(self) -> float:
        return 0.0

    def close(self) -> None:
        """Close the rings after the other end has closed its own, too."""
        if self._frame is not None:
            self._frame.release()
        self._producer.close()
        with suppress(RingClosed):
            self._consumer.recv(WATCHDOG_S).release()
        self._outgoing.close()
        self._incoming.close()


class RingAlone:
    """No network: what the two rings at the ends of a link cost by themselves. It ignores its node."""

    name = "ring, one node"

    def __init__(self) -> None:
        self._rings: tuple[Ring, Ring] | None = None

    def open(self, host: str, other: Connection, is_near: bool) -> End:
        channel = socket.socket(fileno=os.dup(other.fileno()))
        with channel:
            if is_near:
                rings = Ring.create(RING_BYTES), Ring.create(RING_BYTES)
                socket.send_fds(channel, [b"."], [*rings[0].fds, *rings[1].fds])
                return RingEnd(*rings)
            fds = socket.recv_fds(channel, 1, 6)[1]
        back, there = Ring.attach(fds[:3], generation=0), Ring.attach(fds[3:], generation=0)
        return RingEnd(there, back)


class LinkEnd(RingEnd):
    """Two rings of this node, and a process with the pump."""

    def __init__(self, host: str, other: Connection, is_near: bool, credentials: Credentials | None = None) -> None:
        super().__init__(Ring.create(RING_BYTES), Ring.create(RING_BYTES))
        self._tls = None if credentials is None else credentials.contexts()
        self._agent, there = fork.Pipe()
        self._process = fork.Process(target=self._run_agent, args=(there, host, is_near))
        self._process.start()
        other.send(self._agent.recv())
        self._agent.send(other.recv())
        self._agent.recv()

    def _run_agent(self, node: Connection, host: str, is_near: bool) -> None:
        outgoing, incoming = (
            Ring.attach([os.dup(fd) for fd in ring.fds], generation=0) for ring in (self._outgoing, self._incoming)
        )
        pump = Pump(SECRET, host, lambda link_id, why: print(f"link {link_id}: {why}", file=sys.stderr), self._tls)
        there, back = (1, 2) if is_near else (2, 1)
        node.send(pump.address)
        pump.receive(back, incoming.claim_producer())
        pump.send(there, outgoing.claim_consumer(), node.recv())
        node.send("ready")
        node.recv()
        pump.stop()

    def cpu_s(self) -> float:
        return cpu_s_of(self._process)

    def close(self) -> None:
        super().close()
        self._agent.send("end")
        self._process.join(WATCHDOG_S)


class Link:
    name = "link"

    def open(self, host: str, other: Connection, is_near: bool) -> End:
        return LinkEnd(host, other, is_near)


class TlsLink:
    name = "link with TLS"

    def __init__(self) -> None:
        self._credentials = make_credentials()

    def open(self, host: str, other: Connection, is_near: bool) -> End:
        return LinkEnd(host, other, is_near, self._credentials)
