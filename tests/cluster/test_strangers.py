"""Connections of strangers: none is accepted, none ends the pump, and they cost bounded descriptors and memory."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from omni_actors.cluster.handshake import Connector
from omni_actors.cluster.pump import Pump
from tests.cluster.linked_rings import WATCHDOG_S, LinkedRings, Losses, linked_rings, open_pump
from tests.cluster.strangers import FLOOD, Cost, authenticated, connect, wait_closed, wait_forgotten
from tests.support.open_descriptors import open_descriptors


@pytest.fixture(scope="module")
def rings() -> Iterator[LinkedRings]:
    with linked_rings() as made:
        yield made


def check_alive(rings: LinkedRings) -> None:
    """The link moves records, and no record is there that was not sent."""
    message = random.randbytes(1000)
    rings.producer.send(message, timeout=WATCHDOG_S)
    with rings.consumer.recv(WATCHDOG_S) as frame:
        assert frame.data == message
    assert rings.consumer.try_recv() is None
    assert rings.far.statistics().keys() == {rings.link_id}
    assert not rings.far._accepting._early, "no stranger is taken for a node"


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(1000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(1000),
        bytes(100_000),
        Connector(bytes(32), "link", 77).hello + bytes(32),
    ],
    ids=["nothing", "HTTP", "TLS", "zeros", "hello and a wrong proof"],
)
def test_what_is_no_handshake_is_refused(rings: LinkedRings, said: bytes) -> None:
    stranger = connect(rings.far.address)
    with suppress(ConnectionResetError, BrokenPipeError):
        stranger.sendall(said)
        if not said:
            stranger.close()
            return
    wait_closed(stranger)
    check_alive(rings)


def test_random_bytes_are_refused(rings: LinkedRings) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(100):
        stranger = connect(rings.far.address)
        hello = Connector(bytes(32), "link", 7).hello
        said = hello[: source.randrange(len(hello))] + source.randbytes(200)
        with suppress(ConnectionResetError, BrokenPipeError):
            stranger.sendall(said)
        wait_closed(stranger)
    check_alive(rings)


def test_a_handshake_that_is_cut_at_any_byte_is_dropped() -> None:
    with linked_rings(handshake_s=WATCHDOG_S) as rings:
        connection, said = authenticated(rings.far.address, 99)
        connection.close()
        wait_forgotten(rings.far, 99)
        for end in range(len(said)):
            with connect(rings.far.address) as stranger:
                stranger.sendall(said[:end])
        check_alive(rings)


def test_a_recorded_handshake_is_refused(rings: LinkedRings) -> None:
    with linked_rings(link_id=8, handshake_s=WATCHDOG_S) as other:
        connection, said = authenticated(other.far.address, 5)
        connection.close()
        wait_forgotten(other.far, 5)
        stranger = connect(other.far.address)
        stranger.sendall(said[:56])
        assert len(stranger.recv(200)) == 72
        stranger.sendall(said[56:] + bytes(100))
        wait_closed(stranger)
        check_alive(other)
    check_alive(rings)


def test_a_second_connection_for_a_link_is_refused(rings: LinkedRings) -> None:
    connection, _ = authenticated(rings.far.address, rings.link_id)
    wait_closed(connection)
    check_alive(rings)


def test_another_role_is_refused(rings: LinkedRings) -> None:
    connection, _ = authenticated(rings.far.address, rings.link_id, role="control")
    wait_closed(connection)
    check_alive(rings)


def test_a_node_with_another_secret_is_refused_at_once() -> None:
    losses = Losses()
    stranger = Pump(bytes(32), "127.0.0.1", losses)
    try:
        with open_pump() as (far, far_losses):
            made = LinkedRings(stranger, far, near_bytes=1 << 16, far_bytes=1 << 16)
            made.receive()
            made.send()
            assert losses.next() == (7, "the handshake failed: the other side has another secret")
            assert far.statistics()[7].state == "opening"
            assert not far_losses.all()
            made.close()
    finally:
        stranger.stop()


def test_silent_strangers_are_dropped_in_time() -> None:
    with open_pump(handshake_s=1.0) as (pump, _):
        strangers = [connect(pump.address) for _ in range(3)]
        with suppress(ConnectionResetError, BrokenPipeError):  # its time may be over
            strangers[0].send(Connector(bytes(32), "link", 7).hello)
        for stranger in strangers:
            wait_closed(stranger)


def test_a_link_that_is_not_expected_is_dropped_in_time() -> None:
    with open_pump(handshake_s=WATCHDOG_S) as (pump, _):
        connection, _ = authenticated(pump.address, 3)
        wait_forgotten(pump, 3)
        wait_closed(connection)
        assert not pump.statistics()


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_flood_of_connections_costs_little(rings: LinkedRings, count: int) -> None:
    """Records go on crossing the link meanwhile, and a node that connects gets its turn."""
    host, port = rings.far.address
    cost = Cost()
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, host, str(port), str(count)])
    try:
        while flood.poll() is None:
            check_alive(rings)
            cost.check()
        assert flood.returncode == 0
    finally:
        flood.kill()
        flood.wait()
    made = LinkedRings(rings.near, rings.far, near_bytes=1 << 16, far_bytes=1 << 16, link_id=1000)
    made.receive()
    made.send()
    made.producer.send(b"late")
    with made.consumer.recv(WATCHDOG_S) as frame:
        assert frame.data == b"late"
    made.close()
    check_alive(rings)


def test_nothing_is_left_of_pumps_and_strangers() -> None:
    before = open_descriptors()
    with linked_rings(handshake_s=WATCHDOG_S) as made:
        check_alive(made)
        strangers = [connect(made.far.address) for _ in range(100)]
        authenticated(made.far.address, 55)[0].close()
        wait_forgotten(made.far, 55)
        check_alive(made)
    for stranger in strangers:
        stranger.close()
    assert open_descriptors() == before
