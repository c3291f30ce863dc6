"""What fails while a record is fetched with NIXL costs its link, and nothing else: no torn record, no process, no room.

A READ is under way for as long as the NIXL process that serves it is stopped.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from omni_actors.cluster.link import ALIVE, HEADER
from omni_actors.cluster.nixl_links import BY_REFERENCE, CAN_FETCH, FETCHED, LEAST, LOADED, OFFER, REFERENCE
from omni_actors.cluster.transfers import INCOMING, OUTGOING, NixlUnavailable, Transfers
from ringbuf import Ring, RingClosed
from tests.cluster.linked_rings import WATCHDOG_S, LinkedRings, open_pump
from tests.cluster.nixl_rings import ROOT, NixlRings, nixl_rings, wait_until, why_no_nixl
from tests.cluster.strangers import accept_and_shake_hands, authenticated

pytestmark = pytest.mark.skipif(why_no_nixl() is not None, reason=str(why_no_nixl()))

MESSAGE = random.randbytes(4 << 20)


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def process_of(transfers: Transfers | None) -> int:
    assert transfers is not None
    return transfers._process.pid


def goes_on_or_was_aborted(transfers: Transfers | None) -> bool:
    """UCX may abort a NIXL process whose peer was killed ("Endpoint timeout"). Nothing else may end it."""
    assert transfers is not None
    return transfers.is_up or transfers._process.returncode == -signal.SIGABRT


def take_extents(transfers: Transfers | None) -> dict[int, int]:
    assert transfers is not None
    return {**transfers._outgoing._taken, **transfers._incoming._taken}


@contextmanager
def reading() -> Iterator[NixlRings]:
    """Yield rings while MESSAGE is being read; the process that serves the READ is stopped."""
    with nixl_rings() as rings:
        rings.negotiate()
        rings.producer.send(MESSAGE)
        with rings.consumer.recv(WATCHDOG_S) as frame:  # NIXL has a connection
            assert frame.data == MESSAGE
        server = process_of(rings.transfers[0])
        os.kill(server, signal.SIGSTOP)
        rings.producer.send(MESSAGE)
        far = rings.transfers[1]
        assert far is not None
        wait_until(lambda: bool(far._fetches))
        try:
            yield rings
        finally:
            if far_lives(server):
                os.kill(server, signal.SIGCONT)


def far_lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def check_works(rings: NixlRings, by_reference: int) -> None:
    """Check that a new link carries records, and how many of its two large ones go by reference."""
    rings.renew()
    if by_reference:
        rings.negotiate()
    for message in (b"first", MESSAGE, MESSAGE, b"last"):
        rings.producer.send(message, timeout=WATCHDOG_S)
    for message in (b"first", MESSAGE, MESSAGE, b"last"):
        with rings.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == message
    assert rings.by_reference() == (by_reference, by_reference)
    wait_until(lambda: not take_extents(rings.transfers[0]))


def test_a_killed_node_is_a_loss_and_its_nixl_process_ends() -> None:
    """SIGKILL of the node whose memory is read, and of the one that reads, in the middle of the READ."""
    with ExitStack() as stack:
        far_transfers = Transfers()
        far, losses = stack.enter_context(open_pump(transfers=far_transfers))
        ring = stack.enter_context(Ring.create(1 << 26))
        consumer = ring.claim_consumer()
        far.receive(7, ring.claim_producer())
        arguments = ["send", *map(str, far.address), str(len(MESSAGE))]
        node, said = start_node(stack, *arguments)
        server = int(said[0])
        while not far.statistics()[7].by_reference:
            consumer.recv(WATCHDOG_S).release()
        os.kill(server, signal.SIGSTOP)
        is_reading = False
        while not is_reading:  # first comes what was on its way
            try:
                consumer.recv(1.0).release()
            except TimeoutError:
                is_reading = bool(far_transfers._fetches)
        node.kill()
        assert losses.next()[0] == 7
        wait_until(lambda: not far_lives(server))
        assert consumer.try_recv() is None
        far.close(7)
        with pytest.raises(RingClosed):
            consumer.recv(WATCHDOG_S)
        assert goes_on_or_was_aborted(far_transfers)
        assert not losses.all()


def test_a_killed_reader_is_a_loss_and_gives_the_outgoing_memory_back() -> None:
    """The NIXL process that serves the READ is stopped meanwhile."""
    with ExitStack() as stack:
        transfers = Transfers()
        near, losses = stack.enter_context(open_pump(transfers=transfers))
        ring = stack.enter_context(Ring.create(1 << 26))
        node, said = start_node(stack, "receive")
        producer = ring.claim_producer()
        near.send(7, ring.claim_consumer(), ("127.0.0.1", int(said[0])))
        producer.send(b"")
        wait_until(lambda: near._links[7]._is_loaded)  # type: ignore[attr-defined]
        producer.send(MESSAGE)
        wait_until(lambda: near.statistics()[7].by_reference == 1 and not take_extents(transfers))
        os.kill(process_of(transfers), signal.SIGSTOP)
        producer.send(MESSAGE)
        wait_until(lambda: near.statistics()[7].by_reference == 2)
        assert take_extents(transfers)
        node.kill()
        assert losses.next()[0] == 7
        os.kill(process_of(transfers), signal.SIGCONT)
        assert not take_extents(transfers)
        wait_until(lambda: not far_lives(int(said[1])))
        assert goes_on_or_was_aborted(transfers)
        assert not losses.all()
        near.close(7)


def start_node(stack: ExitStack, *arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Start a node, and return its process with what it says first."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.nixl_rings", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process, process.stdout.readline().split()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_nixl_process_is_a_loss_and_links_use_tcp_from_then_on(victim: int) -> None:
    with reading() as rings:
        os.kill(process_of(rings.transfers[victim]), signal.SIGKILL)
        link_id, why = rings.far_losses.next()
        assert link_id == 7
        if victim == 1 or not why.startswith("the READ failed: "):
            assert why == "NIXL has ended on this node"
        assert victim == 1 or goes_on_or_was_aborted(rings.transfers[1])
        assert rings.consumer.try_recv() is None
        if victim == 1:
            os.kill(process_of(rings.transfers[0]), signal.SIGCONT)
        check_works(rings, 0)


def test_a_ring_that_is_closed_while_its_record_is_read_is_left_alone() -> None:
    with reading() as rings:
        far = rings.transfers[1]
        rings.far.close(7)
        rings.far_ring.close()  # unmapped
        assert far is not None
        assert len(take_extents(far)) == 1  # the READ goes on in incoming memory
        os.kill(process_of(rings.transfers[0]), signal.SIGCONT)
        wait_until(lambda: not take_extents(far))
        check_works(rings, 2)


def test_memory_that_is_used_again_is_not_taken_for_the_old_record() -> None:
    """The sending end closes its link, and stages another record at the same place, before the READ is served."""
    with reading() as rings:
        (before,) = take_extents(rings.transfers[0])
        rings.near.close(7)
        assert not take_extents(rings.transfers[0])
        other = LinkedRings(rings.near, rings.far, near_bytes=1 << 26, far_bytes=1 << 26, link_id=8)
        other.receive()
        other.send()
        wait_until(lambda: rings.near._links[8]._is_loaded)  # type: ignore[attr-defined]
        other.producer.send(bytes(len(MESSAGE)))
        wait_until(lambda: list(take_extents(rings.transfers[0])) == [before])
        os.kill(process_of(rings.transfers[0]), signal.SIGCONT)
        assert rings.far_losses.next() == (7, "the other node has taken the record back")
        assert rings.consumer.try_recv() is None
        with other.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == bytes(len(MESSAGE))
        other.close()
        check_works(rings, 2)


def test_a_read_that_takes_too_long_ends_the_nixl_process() -> None:
    with reading() as rings:
        far = rings.transfers[1]
        assert far is not None
        far.read_s = 1.0  # not before: the first one includes the connection
        assert rings.far_losses.next() == (7, "NIXL has ended on this node")
        os.kill(process_of(rings.transfers[0]), signal.SIGCONT)
        check_works(rings, 0)


REFERENCE_KIND = BY_REFERENCE | 1


@pytest.mark.parametrize(
    ("begin", "stamp", "length", "why"),
    [
        (0, 5, LEAST, "the other node has taken the record back"),
        (OUTGOING, 5, LEAST, f"an extent at {OUTGOING} with {LEAST} bytes, beyond the memory"),
        (OUTGOING - 64, 5, 1, f"an extent at {OUTGOING - 64} with 1 bytes, beyond the memory"),
        (2**64 - 1, 2**64 - 1, 1, f"an extent at {2**64 - 1} with 1 bytes, beyond the memory"),
        (0, 5, INCOMING, f"a record of {INCOMING} bytes, where {INCOMING - 64} can be fetched"),
        (0, 5, 1 << 40, f"a record of {1 << 40} bytes, where the ring takes {(1 << 27) - 64}"),
    ],
)
def test_a_reference_that_no_node_sends_is_a_loss(begin: int, stamp: int, length: int, why: str) -> None:
    with nixl_rings() as rings:
        near = rings.transfers[0]
        assert near is not None
        said = HEADER.pack(REFERENCE.size << 8 | REFERENCE_KIND, 0) + REFERENCE.pack(begin, stamp, length)
        assert loss_by(rings, near.offer, said) == why
        check_works(rings, 2)


@pytest.mark.parametrize(
    "said",
    [
        HEADER.pack(REFERENCE.size << 8 | BY_REFERENCE, 0),
        HEADER.pack(REFERENCE.size << 8 | BY_REFERENCE | 5, 0),
        HEADER.pack(REFERENCE.size - 1 << 8 | REFERENCE_KIND, 0),
        HEADER.pack(1 << 8 | OFFER, 0),
        HEADER.pack(1 << 8 | OFFER | 1, 0),
    ],
)
def test_a_header_that_no_node_sends_is_a_loss(said: bytes) -> None:
    with nixl_rings() as rings:
        near = rings.transfers[0]
        assert near is not None
        assert loss_by(rings, near.offer, said + bytes(64)).startswith("a record of kind ")
        check_works(rings, 2)


def loss_by(rings: NixlRings, offer: bytes, said: bytes) -> str:
    """Say something on an authenticated link that has made an offer. Returns why it is lost."""
    with Ring.create(1 << 28) as ring:
        consumer = ring.claim_consumer()
        rings.far.receive(3, ring.claim_producer())
        connection, _ = authenticated(rings.far.address, 3)
        with connection:
            connection.sendall(HEADER.pack(len(offer) << 8 | OFFER, 0) + offer)
            heard = b""
            while LOADED not in heard:
                heard += connection.recv(64)
            assert heard[:2] == ALIVE + CAN_FETCH
            connection.sendall(said)
            link_id, why = rings.far_losses.next()
        assert link_id == 3
        assert consumer.try_recv() is None
        rings.far.close(3)
    return why


def test_a_receiving_end_that_has_fetched_what_it_was_not_given_is_a_loss() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        open_pump(transfers=Transfers()) as (near, losses),
        Ring.create(4096) as ring,
    ):
        near.send(7, ring.claim_consumer(), listener.getsockname())
        with accept_and_shake_hands(listener) as connection:
            connection.sendall(ALIVE + FETCHED)
            link_id, why = losses.next()
        assert (link_id, why[:20]) == (7, "the other node says ")
        near.close(7)


def test_nixl_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_transport")
    with pytest.raises(NixlUnavailable, match=r"NIXL \(cluster.transport\) does not work here: \w+"):
        Transfers()
