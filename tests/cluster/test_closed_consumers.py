"""A consumer that closes its ring while the way back is full: the producer's node still learns of it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

import pytest

from omni_actors.cluster.channel import Channel, TlsChannel, listen
from omni_actors.cluster.link import ALIVE, CLOSED, HEADER
from omni_actors.cluster.receiving import ReceivingLink
from omni_actors.cluster.tls import make_credentials
from ringbuf import Consumer, Ring

WATCHDOG_S = 30.0
RECORD = HEADER.pack(4 << 8 | 1, 0) + b"data"


class FullChannel(Channel):
    """A connection that takes nothing while it is ``full``."""

    full = False

    def send(self, buffers: Sequence[bytes | memoryview]) -> int | None:
        return None if self.full else super().send(buffers)


class FullTlsChannel(TlsChannel):
    """The same with TLS: OpenSSL keeps what it was given and could not send."""

    full = False

    def send(self, buffers: Sequence[bytes | memoryview]) -> int | None:
        if self.full:
            self._again = self._again or bytes(buffers[0])
            return None
        return super().send(buffers)


class Closing(NamedTuple):
    """A link, the other end of its connection, and the consumer of its ring, which closes it."""

    link: ReceivingLink
    far: FullChannel | FullTlsChannel
    near: Channel
    consumer: Consumer

    def close_while_full(self) -> None:
        """Let the consumer close its ring, and the link notice, while the way back takes nothing."""
        self.far.full = True
        for _ in range(2):
            self.link.check_silence(1.0)
        self.consumer.close()
        assert self.near.send([RECORD]) == len(RECORD)
        deadline = time.monotonic() + WATCHDOG_S
        while not self.link._discards:
            assert time.monotonic() < deadline
            self.step()

    def step(self) -> None:
        """Let the link move, as if the pump had learned that the connection has something."""
        self.link.readable = True
        self.link.step()

    def read_to_the_end(self) -> bytes:
        """Read what the link sends back while it moves."""
        received, buffer, deadline = b"", memoryview(bytearray(1 << 16)), time.monotonic() + WATCHDOG_S
        while (count := self.near.receive([buffer])) != 0:
            received += bytes(buffer[: count or 0])
            if count is None:
                assert time.monotonic() < deadline
                self.step()
        return received


@pytest.fixture(params=["tcp", "tls"])
def opened(request: pytest.FixtureRequest) -> Iterator[Closing]:
    with listen("127.0.0.1") as listener:
        connecting = socket.create_connection(listener.getsockname())
        listener.setblocking(True)
        accepted = listener.accept()[0]
    near, far = Channel(connecting), FullChannel(accepted)
    if request.param == "tls":
        tls = make_credentials().contexts()
        near, far = TlsChannel(connecting, tls, "omni_actors"), FullTlsChannel(accepted, tls, None)
        for side in (near, far) * 4:
            with suppress(ssl.SSLWantReadError):
                side._tls.do_handshake()
    with closing(Ring.create(1 << 16)) as ring, closing(ReceivingLink(1, ring.claim_producer())) as link, closing(near):
        link.open(far)
        yield Closing(link, far, near, ring.claim_consumer())


def test_the_producers_node_learns_of_the_close_once_the_way_back_has_room(opened: Closing) -> None:
    opened.close_while_full()
    opened.far.full = False
    received = opened.read_to_the_end()
    assert received == ALIVE * (len(received) - 1) + CLOSED
    assert opened.link.state == "open"
    opened.near.close()
    opened.step()
    assert opened.link.state == "ended"


def test_a_producers_node_that_is_gone_before_it_learns_of_the_close_is_no_loss(opened: Closing) -> None:
    opened.close_while_full()
    opened.far.full = False
    opened.near.reset()
    opened.step()
    opened.step()
    assert opened.link.state == "ended"


def test_a_producers_node_that_is_gone_before_the_close_is_no_loss(opened: Closing) -> None:
    record = HEADER.pack(14_000 << 8 | 1, 0) + bytes(14_000)
    for _ in range(6):  # more than the ring takes: the last header waits for room
        assert opened.near.send([record]) == len(record)
        opened.step()
    deadline = time.monotonic() + WATCHDOG_S
    while not opened.link._kind:
        assert time.monotonic() < deadline
        opened.step()
    opened.near.reset()
    opened.consumer.close()
    opened.step()
    assert opened.link.state == "ended"
