"""Large records cross a link with NIXL (UCX over TCP) as they were sent, in order, and leave nothing behind."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from omni_actors.cluster.nixl_links import LEAST
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.tls import make_credentials
from omni_actors.cluster.transfers import MOST_OFFER, OUTGOING, STAMP, Transfers
from ringbuf import Ring, RingClosed
from tests.cluster.linked_rings import SECRET, WATCHDOG_S, open_pump
from tests.cluster.nixl_rings import RING_BYTES, ROOT, NixlRings, nixl_rings, wait_until, why_no_nixl
from tests.support.open_descriptors import open_descriptors

pytestmark = pytest.mark.skipif(why_no_nixl() is not None, reason=str(why_no_nixl()))

SIZES = (LEAST, LEAST - 1, 0, LEAST + 1, 100, 8 << 20, 3, 5_000_001, RING_BYTES // 2 - STAMP, 1, 2 << 20)


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def send_and_receive(rings: NixlRings, messages: list[bytes]) -> None:
    """Send messages, and check that they arrive as they are, in order."""
    received: list[bytes] = []

    def receive() -> None:
        for _ in messages:
            with rings.consumer.recv(WATCHDOG_S) as frame:
                received.append(bytes(frame.data))

    thread = threading.Thread(target=receive)
    thread.start()
    for message in messages:
        rings.producer.send(message, timeout=WATCHDOG_S)
    thread.join()
    assert [len(each) for each in received] == [len(each) for each in messages]
    assert received == messages


def test_records_of_all_sizes_arrive_in_order_in_another_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.nixl_rings", "receive"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().split()[0])
        with open_pump(transfers=Transfers()) as (near, losses), Ring.create(RING_BYTES) as ring:
            producer = ring.claim_producer()
            near.send(7, ring.claim_consumer(), ("127.0.0.1", port))
            producer.send(b"")
            process.stdout.readline()
            wait_until(lambda: near._links[7]._is_loaded)  # type: ignore[attr-defined]
            messages = [random.randbytes(size) for size in SIZES]
            sender = threading.Thread(target=lambda: [producer.send(each, timeout=WATCHDOG_S) for each in messages])
            sender.start()
            said = [process.stdout.readline().split() for _ in messages]
            sender.join()
            assert [each[0] for each in said] == [hashlib.sha256(each).hexdigest() for each in messages]
            assert int(said[-1][1]) == sum(size >= LEAST for size in SIZES)
            assert not losses.all()
            near.close(7)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_large_records_travel_by_reference_and_small_ones_do_not() -> None:
    with nixl_rings() as rings:
        rings.negotiate()
        send_and_receive(rings, [random.randbytes(size) for size in SIZES])
        statistics = [pump.statistics()[7] for pump in (rings.near, rings.far)]
        large = sum(size >= LEAST for size in SIZES)
        assert statistics[0] == statistics[1] == ("open", len(SIZES), sum(SIZES), large)


def test_the_end_of_the_producer_follows_its_last_record() -> None:
    with nixl_rings() as rings:
        rings.negotiate()
        message = random.randbytes(4 << 20)
        rings.producer.send(message)
        rings.producer.close()
        with rings.consumer.recv(WATCHDOG_S) as frame:
            assert frame.data == message
        with pytest.raises(RingClosed, match="producer"):
            rings.consumer.recv(WATCHDOG_S)
        wait_until(lambda: rings.near.statistics()[7].state == "ended")
        assert not [*rings.near_losses.all(), *rings.far_losses.all()]
        assert is_empty(rings)


def test_a_slow_consumer_holds_the_sender_back_and_nothing_is_lost() -> None:
    """All of the way is full: the ring there, outgoing memory, the socket, and the ring here."""
    size = 3 << 19
    with nixl_rings(far_bytes=4 << 20) as rings:
        rings.negotiate()
        sent, is_held_back = 0, False
        while not is_held_back or sent * size <= OUTGOING:  # beyond it, some travel by TCP for want of outgoing memory
            try:
                rings.producer.send(sent.to_bytes(4, "little"), bytes(size - 4), timeout=1.0)
                sent, is_held_back = sent + 1, False
            except TimeoutError:
                is_held_back = True
        for number in range(sent):
            with rings.consumer.recv(WATCHDOG_S) as frame:
                assert (len(frame.data), int.from_bytes(frame.data[:4], "little")) == (size, number)
        by_reference = rings.by_reference()
        assert 0 < by_reference[0] == by_reference[1]
        wait_until(lambda: is_empty(rings))
        assert not [*rings.near_losses.all(), *rings.far_losses.all()]


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
def test_a_node_without_nixl_gets_all_by_tcp(near: bool, far: bool) -> None:
    with nixl_rings(near=near, far=far) as rings:
        send_and_receive(rings, [random.randbytes(size) for size in (1, LEAST, 8 << 20, 2)])
        assert [pump.statistics()[7].by_reference for pump in (rings.near, rings.far)] == [0, 0]
        assert not [*rings.near_losses.all(), *rings.far_losses.all()]


@pytest.mark.parametrize("offer", [b"", b"no offer", bytes(MOST_OFFER)])
def test_a_node_whose_offer_cannot_be_loaded_gets_all_by_tcp(offer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with nixl_rings() as rings:
        near = rings.transfers[0]
        assert near is not None
        near.offer = offer
        rings.renew()
        send_and_receive(rings, [b"first"])
        wait_until(lambda: "not fetched with NIXL" in caplog.text)
        send_and_receive(rings, [random.randbytes(size) for size in (1, LEAST, 8 << 20, 2)])
        assert rings.by_reference() == (0, 0)


def test_links_come_and_go_without_growth() -> None:
    """200 links one after the other, over one NIXL connection."""
    message = random.randbytes(LEAST)
    shared_memory = sorted(os.listdir("/dev/shm"))
    with nixl_rings() as rings:
        pids = [each._process.pid for each in rings.transfers if each is not None]

        def measure() -> tuple[int, list[int], list[int]]:
            wait_until(lambda: is_empty(rings))
            fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
            return len(open_descriptors()), fds, [private_bytes(pid) for pid in pids]

        for number in range(200):
            rings.renew(near_bytes=4 << 20, far_bytes=4 << 20)
            rings.negotiate()
            send_and_receive(rings, [message, b"small", message])
            assert rings.by_reference() == (2, 2)
            if number == 99:
                before = measure()
        after = measure()
        assert sorted(os.listdir("/dev/shm")) == shared_memory
        assert after[0] == before[0]
        assert after[1] == before[1]
        assert max(now - then for now, then in zip(after[2], before[2], strict=True)) < 8 << 20
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_links_share_the_memory() -> None:
    """Three links with records of which two fill the outgoing memory."""
    with nixl_rings() as rings:
        links = [rings]
        for link_id in (8, 9):
            links.append(NixlRings((rings.near, rings.far), rings.transfers, link_id))
            links[-1].receive()
            links[-1].send()
        for each in links:
            each.negotiate()
        messages = [random.randbytes(30 << 20) for _ in range(3)]
        threads = [threading.Thread(target=send_and_receive, args=(each, messages)) for each in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in links:
            assert each.near.statistics()[each.link_id].records == 3
        assert is_empty(rings)
        assert not [*rings.near_losses.all(), *rings.far_losses.all()]
        for each in links[1:]:
            each.close()


def is_empty(rings: NixlRings) -> bool:
    """Return whether no extent of either pump is taken."""
    return not any(
        transfers._outgoing._taken or transfers._incoming._taken for transfers in rings.transfers if transfers
    )


def private_bytes(pid: int) -> int:
    """Return the resident memory of a process without what it shares, such as the staging memory."""
    resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def test_a_pump_with_tls_refuses_nixl() -> None:
    transfers = Transfers()
    with pytest.raises(ValueError, match="not encrypted"):
        Pump(SECRET, "127.0.0.1", lambda link_id, why: None, make_credentials().contexts(), transfers=transfers)
    assert transfers._process.returncode is not None
