"""Nodes with TLS: a peer with the system's certificate is let in and no other one, in bounded time and number."""

from __future__ import annotations

import os
import random
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import trio
from cryptography import x509

from omni_actors.cluster.channel import Address, Tls
from omni_actors.cluster.handshake import Connector
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.strangers import MOST_STRANGERS
from omni_actors.cluster.tls import Credentials, make_credentials
from omni_actors.errors import ConfigError
from ringbuf import RingClosed
from tests.cluster.linked_rings import LONG_S, SECRET, WATCHDOG_S, LinkedRings, Losses, linked_rings, open_pump
from tests.cluster.long_answers import ask_long, check_exact, long_answers
from tests.cluster.strangers import client_hello, connect, forwarder, give_up_link, wait_closed
from tests.cluster.subprocess_cluster import open_on_nodes
from tests.support.echo_systems import read, until, wait_restarted
from tests.support.open_descriptors import open_descriptors

NODES = {"first": "a", "second": "b"}


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return make_credentials()


@pytest.fixture(scope="module")
def tls(credentials: Credentials) -> Tls:
    return credentials.contexts()


@pytest.fixture
def rings(tls: Tls) -> Iterator[LinkedRings]:
    with linked_rings(1 << 18, tls=tls) as made:
        yield made


def check_alive(rings: LinkedRings) -> None:
    """The link moves records, and no record is there that was not sent."""
    for size in (0, 1, 1000, 100_000):
        message = random.randbytes(size)
        rings.producer.send(message, timeout=WATCHDOG_S)
        with rings.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == message
    assert rings.consumer.try_recv() is None
    assert rings.far.statistics().keys() == {rings.link_id}


def credulous(credentials: Credentials | None) -> ssl.SSLContext:
    """Return the context of a client that trusts everybody. credentials: what it presents; None: nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if credentials is None else credentials.contexts().client
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def refused(address: Address, context: ssl.SSLContext) -> bool:
    """Whether a client that knows the secret is refused by its certificate."""
    with socket.create_connection(address, WATCHDOG_S) as plain:
        try:
            with context.wrap_socket(plain) as stranger:
                stranger.sendall(Connector(SECRET, "link", 99).hello)
                return stranger.recv(1) == b""
        except (ssl.SSLError, ConnectionResetError, BrokenPipeError):
            return True


def test_links_carry_records_of_all_sizes(rings: LinkedRings) -> None:
    check_alive(rings)
    rings.producer.close()
    with pytest.raises(RingClosed):
        rings.consumer.recv(WATCHDOG_S)


def test_nothing_crosses_the_network_in_the_clear(tls: Tls) -> None:
    """A forwarder between the nodes sees neither the payload nor the handshake inside of TLS."""
    seen = bytearray()
    with open_pump(tls=tls) as (far, _), open_pump(tls=tls) as (near, losses), forwarder(far.address, seen) as address:
        made = LinkedRings(near, far, near_bytes=1 << 16, far_bytes=1 << 16)
        made.receive()
        near.send(made.link_id, made.near_ring.claim_consumer(), address)
        made.producer.send(b"a secret of the user" * 100)
        with made.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == b"a secret of the user" * 100
        made.close()
        assert not losses.all()
    assert len(seen) > 2000
    assert b"secret" not in seen
    assert b"omnilnk" not in seen


@pytest.mark.parametrize("credentials_of_the_stranger", ["none", "others"])
def test_a_client_without_the_certificate_is_refused(
    rings: LinkedRings, credentials: Credentials, credentials_of_the_stranger: str
) -> None:
    others = None if credentials_of_the_stranger == "none" else make_credentials()
    assert refused(rings.far.address, credulous(others))
    assert not refused(rings.far.address, credulous(credentials))
    check_alive(rings)


def test_a_server_without_the_certificate_is_not_trusted(tls: Tls) -> None:
    """Both nodes know the secret, and have certificates of their own."""
    losses = Losses()
    stranger = Pump(SECRET, "127.0.0.1", losses, make_credentials().contexts(), silent_s=LONG_S)
    try:
        with open_pump(tls=tls) as (far, far_losses):
            made = LinkedRings(stranger, far, near_bytes=1 << 16, far_bytes=1 << 16)
            made.receive()
            made.send()
            give_up_link(stranger, "certificate verify failed")
            link_id, why = losses.next()
            assert link_id == made.link_id
            assert "certificate verify failed" in why
            assert far.statistics()[made.link_id].state == "opening"
            assert not far_losses.all()
            made.close()
    finally:
        stranger.stop()


def test_a_node_with_another_secret_is_refused_although_it_has_the_certificate(tls: Tls) -> None:
    losses = Losses()
    stranger = Pump(bytes(32), "127.0.0.1", losses, tls)
    try:
        with open_pump(tls=tls) as (far, _):
            made = LinkedRings(stranger, far, near_bytes=1 << 16, far_bytes=1 << 16)
            made.receive()
            made.send()
            assert losses.next() == (made.link_id, "the handshake failed: the other side has another secret")
            made.close()
    finally:
        stranger.stop()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(1000),
        bytes(100_000),
        Connector(SECRET, "link", 7).hello,
        b"\x16\x03\x01\xff\xff" + bytes(1000),
        client_hello() + b"\x17\x03\x03\x00\x20" + bytes(1000),
    ],
    ids=["HTTP", "zeros", "the handshake without TLS", "a record that is too long", "data inside of TLS's handshake"],
)
def test_what_is_no_tls_is_refused(rings: LinkedRings, said: bytes) -> None:
    stranger = connect(rings.far.address)
    with suppress(ConnectionResetError, BrokenPipeError):
        stranger.sendall(said)
    wait_closed(stranger)
    check_alive(rings)


def test_random_bytes_are_refused(rings: LinkedRings) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source, hello = random.Random(seed), client_hello()
    for _ in range(100):
        stranger = connect(rings.far.address)
        begin = hello[: source.randrange(len(hello))]
        with suppress(ConnectionResetError, BrokenPipeError):
            stranger.sendall(begin + source.randbytes(len(hello)))
        stranger.close()
    check_alive(rings)


def test_handshakes_of_tls_that_stop_half_way_end_in_time(tls: Tls) -> None:
    hello = client_hello()
    with open_pump(tls=tls, handshake_s=0.3) as (pump, _), ExitStack() as closing:
        strangers = [closing.enter_context(connect(pump.address)) for _ in range(10)]
        for number, stranger in enumerate(strangers):
            with suppress(ConnectionResetError, BrokenPipeError):  # its time may be over
                stranger.sendall(hello[: len(hello) * number // 9])  # from nothing to all of it
        for stranger in strangers:
            wait_closed(stranger)
        assert not pump.statistics()


def test_handshakes_of_tls_that_stop_half_way_are_bounded_in_number(rings: LinkedRings) -> None:
    before, hello = len(open_descriptors()), client_hello()
    strangers = list[socket.socket]()
    for _ in range(4 * MOST_STRANGERS):
        stranger = connect(rings.far.address)
        stranger.sendall(hello)
        strangers.append(stranger)
        check_alive(rings)
        assert len(open_descriptors()) - len(strangers) <= before + MOST_STRANGERS + 8
    wait_closed(strangers[0])  # the oldest had to make room
    for stranger in strangers:
        stranger.close()


@pytest.mark.slow
async def test_a_system_of_two_nodes_with_tls(credentials: Credentials) -> None:
    """Its control connections and its links refuse who has no certificate, and half-open ones keep no agent out."""
    async with open_on_nodes(long_answers(), NODES, tls=credentials) as cluster:
        check_exact(first := ask_long(cluster.omni), await read(first))
        for address in (cluster.spawner.address, *(agent.links for agent in cluster.spawner.agents.values())):
            assert await trio.to_thread.run_sync(refused, address, credulous(None))
            assert await trio.to_thread.run_sync(refused, address, credulous(make_credentials()))
        with ExitStack() as closing:
            hello = client_hello()
            for number in range(MOST_STRANGERS + 8):
                stranger = closing.enter_context(connect(cluster.spawner.address))
                stranger.sendall(hello if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
            os.kill(cluster.agents.pids["a"], signal.SIGKILL)
            await wait_restarted(cluster.omni, "first", 2)
            await until(lambda: cluster.omni.health().nodes["a"].state == "alive")
        check_exact(after := ask_long(cluster.omni), await read(after))


def test_the_certificate_is_valid_by_any_clock(credentials: Credentials) -> None:
    """A node whose clock stands at its beginning joins, too."""
    certificate = x509.load_pem_x509_certificate(credentials.certificate)
    assert certificate.not_valid_before_utc.timestamp() == 0
    assert certificate.not_valid_after_utc.year == 9999


def test_the_key_is_in_no_text(credentials: Credentials) -> None:
    assert "KEY" not in repr(credentials)


def test_without_its_library_there_is_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"cluster\.tls.*pip install '\.\[cluster\]'"):
        make_credentials()
