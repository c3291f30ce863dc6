"""A node whose own process stands still does not take that for the silence of another one.

The tests let the pump's clock jump, in the pump's thread: between reading and looking at the clock.
"""

from __future__ import annotations

import fcntl
import queue
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from omni_actors.cluster.handshake import Acceptor
from omni_actors.cluster.link import ALIVE, HEADER, SIGNS
from omni_actors.cluster.nixl_links import BY_REFERENCE, CAN_FETCH, FETCHED, LEAST, LOADED, OFFER, REFERENCE
from omni_actors.cluster.poller import Poller
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.transfers import Fetch, Source, Transfers
from ringbuf import Consumer, Ring
from tests.cluster.linked_rings import LONG_S, SECRET, WATCHDOG_S, Losses, open_pump
from tests.cluster.strangers import authenticated

STANDSTILL_S = 10 * LONG_S
MESSAGE = b"the first record"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(WATCHDOG_S)
        yield made


def accept(listener: socket.socket) -> socket.socket:
    connection = listener.accept()[0]
    connection.settimeout(WATCHDOG_S)
    return connection


def read(connection: socket.socket, count: int) -> bytes:
    """Return the next bytes. With a timeout, MSG_WAITALL does not wait for all of them."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more, "the other side closed the connection"
        data += more
    return data


def stand_still(pump: Pump, connection: socket.socket, said: bytes) -> None:
    """Let a pump stand still on whose one link, which opens, the other side says something meanwhile."""

    def do() -> None:
        [dial] = pump._dialing._dials.values()
        assert dial.opening is not None
        connection.sendall(said)
        give_up = time.monotonic() + WATCHDOG_S
        while unread(dial.opening.fileno()) < len(said):
            assert time.monotonic() < give_up
            time.sleep(0.001)
        pump._pass_deadlines(time.monotonic() + STANDSTILL_S)

    pump._call(do)


def unread(fd: int) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    return int(count)


@pytest.mark.parametrize(
    ("moment", "said", "handshake_s"),
    [
        ("answer", True, 0.9 * LONG_S),
        ("answer", True, 0.1 * LONG_S),  # the time of the attempt is over after the standstill; the answer is read
        ("answer", False, 0.9 * LONG_S),
        ("sign", True, 0.9 * LONG_S),
        ("sign", False, 0.9 * LONG_S),
    ],
)
def test_a_standstill_while_a_link_opens_costs_no_connection(
    listener: socket.socket, moment: str, said: bool, handshake_s: float
) -> None:
    """moment: what is awaited during the standstill. said: whether it comes meanwhile, or afterwards."""
    with open_pump(silent_s=LONG_S, handshake_s=handshake_s) as (near, losses), Ring.create(4096) as ring:
        producer = ring.claim_producer()
        producer.send(MESSAGE)
        near.send(7, ring.claim_consumer(), listener.getsockname())
        with accept(listener) as connection:
            acceptor = Acceptor(SECRET)
            for awaited in ("answer", "sign"):
                answer = acceptor.receive(read(connection, acceptor.wanted)) or ALIVE
                if awaited == moment:
                    stand_still(near, connection, answer if said else b"")
                if awaited != moment or not said:
                    connection.sendall(answer)
            assert read(connection, HEADER.size + len(MESSAGE))[HEADER.size :] == MESSAGE
        assert not [why for _, why in losses.all() if "no connection" in why]
        near.close(7)


def test_a_node_that_does_not_answer_is_noticed_in_the_time_that_this_process_runs(listener: socket.socket) -> None:
    """After 1.2 times the time of silence. A standstill counts as a fifth of it."""
    with open_pump(silent_s=LONG_S, handshake_s=STANDSTILL_S) as (near, losses), Ring.create(4096) as ring:
        near.send(7, ring.claim_consumer(), listener.getsockname())
        with accept(listener):
            now, found = time.monotonic(), []
            for passed_s in (0.1 * LONG_S, STANDSTILL_S, *[0.1 * LONG_S] * 8, 0.2 * LONG_S, 0.0):
                now += passed_s
                near._call(lambda at=now: near._pass_deadlines(at))
                found.append(losses.all())
        why = "no connection to {}:{}: no answer".format(*listener.getsockname())
        assert found == [*[[]] * 11, [(7, why)]]
        near.close(7)


class SlowTransfers(Transfers):
    """Transfers without a process. The one READ is over when the test ends it. given_up: why it was given up."""

    read_s = 2 * LONG_S / SIGNS

    def __init__(self) -> None:
        self.is_up = True
        self.sources: queue.SimpleQueue[Source] = queue.SimpleQueue()
        self.fetches: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self.given_up: list[str] = []

    def watch(self, poller: Poller) -> None:
        pass

    def close(self) -> None:
        pass

    def load(self, offer: bytes, wake: Callable[[], None]) -> Source:
        source = Source(1, wake)
        self.sources.put(source)
        return source

    def drop(self, source: Source) -> None:
        pass

    def fetch(self, source: Source, begin: int, stamp: int, length: int, wake: Callable[[], None]) -> Fetch:
        fetch = Fetch(self, begin, memoryview(bytearray(length)), wake)
        self.fetches.put(fetch)
        return fetch

    def give_incoming(self, begin: int) -> None:
        pass

    def give_up(self, why: str) -> None:
        self.given_up.append(why)


class Fetching(NamedTuple):
    """A pump that fetches a record of LEAST bytes on link 3, and the other end of the link's connection."""

    pump: Pump
    losses: Losses
    transfers: SlowTransfers
    fetch: Fetch
    consumer: Consumer
    connection: socket.socket


@pytest.fixture
def fetching() -> Iterator[Fetching]:
    transfers = SlowTransfers()
    with open_pump(silent_s=LONG_S, transfers=transfers) as (pump, losses), Ring.create(4 * LEAST) as ring:
        consumer = ring.claim_consumer()
        pump.receive(3, ring.claim_producer())
        connection, _ = authenticated(pump.address, 3)
        with connection:
            connection.sendall(HEADER.pack(1 << 8 | OFFER, 0) + b"x")
            source = transfers.sources.get(timeout=WATCHDOG_S)
            source.is_loaded = True
            pump._call(source.wake)
            assert read(connection, 3) == ALIVE + CAN_FETCH + LOADED
            connection.sendall(HEADER.pack(REFERENCE.size << 8 | BY_REFERENCE | 1, 0) + REFERENCE.pack(0, 1, LEAST))
            fetch = transfers.fetches.get(timeout=WATCHDOG_S)
            yield Fetching(pump, losses, transfers, fetch, consumer, connection)
        pump.close(3)


def test_a_record_is_fetched_although_this_process_stands_still_for_longer_than_that_may_take(
    fetching: Fetching,
) -> None:
    """The news that it is there waits until the process runs again."""
    pump, losses, transfers, fetch, consumer, connection = fetching
    pump._call(lambda: pump._pass_deadlines(time.monotonic() + STANDSTILL_S))
    assert not transfers.given_up
    pump._call(fetch.end)
    with consumer.recv(WATCHDOG_S) as frame:
        assert frame.data == bytes(LEAST)
    assert read(connection, 2) == ALIVE + FETCHED
    assert not losses.all()


def test_a_fetch_that_takes_too_long_is_given_up_in_the_time_that_this_process_runs(fetching: Fetching) -> None:
    """It may take two checks' time. The first check comes early, and one after a standstill."""
    now, found = time.monotonic(), []
    for passed_s in (LONG_S / SIGNS, STANDSTILL_S, LONG_S / SIGNS, LONG_S / SIGNS):
        now += passed_s + 0.001
        fetching.pump._call(lambda at=now: fetching.pump._pass_deadlines(at))
        found.append(list(fetching.transfers.given_up))
    assert found == [[], [], [], ["nothing was fetched for 120 s"]]
