"""Two real processes, one of which may die at the worst instant."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from ringbuf import AlreadyClaimed, PeerDied, Ring
from ringbuf._claim import claim_word_of
from ringbuf._words import PRODUCER
from tests.ringbuf.descriptors import descriptors, duplicates

WATCHDOG_S = 60.0

Peer: TypeAlias = Callable[..., "subprocess.Popen[str]"]


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait(WATCHDOG_S) == -signal.SIGKILL


ECHO = """
back = others[0]
consumer, producer = ring.claim_consumer(), back.claim_producer()
try:
    while True:
        with consumer.recv(60) as frame:
            producer.send(frame.data)
except RingClosed:
    pass
"""


def test_ping_pong_loses_no_wake_up(peer: Peer) -> None:
    with Ring.create(4096) as there, Ring.create(4096) as back:
        child = peer(ECHO, there, back)
        producer, consumer = there.claim_producer(), back.claim_consumer()
        for number in range(5000):
            producer.send(number.to_bytes(8, "little"))
            with consumer.recv(WATCHDOG_S) as frame:
                assert int.from_bytes(frame.data, "little") == number
        producer.close()
        assert child.wait(WATCHDOG_S) == 0


def test_a_message_larger_than_the_ring_waits_for_its_reader(ring: Ring, peer: Peer) -> None:
    child = peer(
        """
consumer = ring.claim_consumer()
wait_until_asleep(PRODUCER)
print(ring.statistics().used, flush=True)
with consumer.recv(60) as frame:
    assert frame.data == bytes(range(256)) * 4096
""",
        ring,
    )
    ring.claim_producer().send(bytes(range(256)) * 4096, timeout=WATCHDOG_S)
    assert ring.capacity // 2 < int(line(child)) <= ring.capacity
    assert child.wait(WATCHDOG_S) == 0


def test_an_end_claimed_by_a_living_process_is_refused_and_a_dead_one_succeeded(ring: Ring, peer: Peer) -> None:
    child = peer("ring.claim_producer(); ring.claim_consumer(); print('claimed', flush=True); signal.pause()", ring)
    assert line(child) == "claimed"
    assert ring.peer_pids == (child.pid, child.pid)
    for claim in (ring.claim_producer, ring.claim_consumer):
        with pytest.raises(AlreadyClaimed) as caught:
            claim()
        assert caught.value.pid == child.pid
    kill(child)
    ring.claim_producer().send(b"succeeded")
    assert bytes(ring.claim_consumer().recv(WATCHDOG_S).data) == b"succeeded"


def test_a_dead_owner_is_succeeded_before_its_parent_reaps_it(ring: Ring, peer: Peer) -> None:
    child = peer("ring.claim_producer()", ring)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ring.peer_pids == (child.pid, None)
    ring.claim_producer()
    assert ring.peer_pids == (os.getpid(), None)


def test_a_claim_waits_for_a_process_that_claims_the_same_end_and_for_no_other(ring: Ring, peer: Peer) -> None:
    fcntl.lockf(ring.fds[0], fcntl.LOCK_EX, 1, PRODUCER.claim)
    child = peer(
        """
ring.claim_consumer()
print("consumer", flush=True)
try:
    ring.claim_producer()
except AlreadyClaimed as error:
    print(error.pid == os.getppid())
""",
        ring,
    )
    assert line(child) == "consumer"
    while child.poll() is None and not is_waiting_for_a_lock(child.pid):
        time.sleep(0.001)
    mine = claim_word_of(os.getpid())
    assert mine is not None
    ring._segment.store_claim(PRODUCER, mine)
    fcntl.lockf(ring.fds[0], fcntl.LOCK_UN, 1, PRODUCER.claim)
    assert line(child) == "True"


def is_waiting_for_a_lock(pid: int) -> bool:
    return any("->" in entry and str(pid) in entry.split() for entry in Path("/proc/locks").read_text().splitlines())


def test_producer_killed_inside_a_reservation_leaves_nothing_visible(ring: Ring, peer: Peer) -> None:
    consumer = ring.claim_consumer()
    child = peer(
        """
producer = ring.claim_producer()
producer.send(b"before")
producer.try_reserve(1000)[:] = b"x" * 1000
print("reserved", flush=True)
signal.pause()
""",
        ring,
    )
    assert line(child) == "reserved"
    kill(child)
    assert bytes(consumer.recv(WATCHDOG_S).data) == b"before"
    assert consumer.try_recv() is None
    with pytest.raises(PeerDied):
        consumer.recv(WATCHDOG_S)
    ring.claim_producer().send(b"after")
    assert bytes(consumer.recv(WATCHDOG_S).data) == b"after"
    assert ring.statistics()[2:] == (2, 11)


def test_producer_killed_between_fragments_leaves_no_part_of_the_message(ring: Ring, peer: Peer) -> None:
    consumer = ring.claim_consumer()
    child = peer(
        """
parts = ring.claim_producer().sending(b"x" * 100_000)
next(parts)
print("waits", flush=True)
signal.pause()
""",
        ring,
    )
    assert line(child) == "waits"
    assert consumer.try_recv() is None
    kill(child)
    ring.claim_producer().send(b"after")
    assert bytes(consumer.recv(WATCHDOG_S).data) == b"after"


def test_producer_killed_between_publish_and_bell_does_not_lose_the_message(ring: Ring, peer: Peer) -> None:
    consumer = ring.claim_consumer()
    child = peer(
        """
producer = ring.claim_producer()
print("claimed", flush=True)
os.eventfd_write = lambda fd, value: os.kill(os.getpid(), signal.SIGKILL)
wait_until_asleep(CONSUMER)
producer.send(b"the last words")
""",
        ring,
    )
    assert line(child) == "claimed"
    assert bytes(consumer.recv(WATCHDOG_S).data) == b"the last words"
    with pytest.raises(PeerDied):
        consumer.recv(WATCHDOG_S)


def test_a_sleeping_consumer_gets_peer_died(ring: Ring, peer: Peer) -> None:
    child = peer("ring.claim_producer(); wait_until_asleep(CONSUMER); os.kill(os.getpid(), signal.SIGKILL)", ring)
    with pytest.raises(PeerDied) as caught:
        ring.claim_consumer().recv(WATCHDOG_S)
    assert (caught.value.end, caught.value.pid) == ("producer", child.pid)


def test_a_consumer_that_outlives_several_producers_keeps_no_descriptor_of_them(ring: Ring, peer: Peer) -> None:
    before = descriptors()
    with Ring.attach(duplicates(ring), generation=0) as twin:
        consumer = twin.claim_consumer()
        for _ in range(3):
            child = peer(
                """
ring.claim_producer()
print("claimed", flush=True)
wait_until_asleep(CONSUMER)
os.kill(os.getpid(), signal.SIGKILL)
""",
                ring,
            )
            assert line(child) == "claimed"
            with pytest.raises(PeerDied) as caught:
                consumer.recv(WATCHDOG_S)
            assert caught.value.pid == child.pid
            child.communicate()
    assert descriptors() == before


def test_a_sleeping_producer_gets_peer_died(ring: Ring, peer: Peer) -> None:
    child = peer(
        """
consumer = ring.claim_consumer()
print("claimed", flush=True)
wait_until_asleep(PRODUCER)
os.kill(os.getpid(), signal.SIGKILL)
""",
        ring,
    )
    assert line(child) == "claimed"
    with pytest.raises(PeerDied) as caught:
        ring.claim_producer().send(bytes(100_000), timeout=WATCHDOG_S)
    assert (caught.value.end, caught.value.pid) == ("consumer", child.pid)


def test_frames_that_a_killed_consumer_held_come_again(ring: Ring, peer: Peer) -> None:
    producer = ring.claim_producer()
    for message in (b"released", b"held", b"unread"):
        producer.send(message)
    child = peer(
        """
consumer = ring.claim_consumer()
consumer.recv().release()
frame = consumer.recv()
print(bytes(frame.data).decode(), flush=True)
signal.pause()
""",
        ring,
    )
    assert line(child) == "held"
    kill(child)
    consumer = ring.claim_consumer()
    assert [bytes(consumer.recv(WATCHDOG_S).data) for _ in range(2)] == [b"held", b"unread"]


def test_a_forked_child_that_closes_the_ring_leaves_its_parents_ends_open(ring: Ring, peer: Peer) -> None:
    """In a process of its own: a child of pytest would go on with the tests."""
    child = peer(
        """
producer, consumer = ring.claim_producer(), ring.claim_consumer()
pid = os.fork()
if not pid:
    ring.close()
    os._exit(0)
assert os.waitpid(pid, 0) == (pid, 0)
producer.send(b"still open")
print(bytes(consumer.recv(60).data).decode())
""",
        ring,
    )
    out, _ = child.communicate(timeout=WATCHDOG_S)
    assert (child.returncode, out) == (0, "still open\n")
