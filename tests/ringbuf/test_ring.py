"""The ring's own life: making, attaching, claiming, checking, closing."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

import ringbuf
from ringbuf import AlreadyClaimed, Ring, RingClosed, RingCorrupted, RingMisuse, WrongGeneration
from ringbuf._words import CONSUMER, HEADER, PRODUCER
from tests.ringbuf.descriptors import descriptors, duplicates
from tests.support.open_descriptors import few_descriptors


def test_a_ring_has_no_name() -> None:
    with Ring.create() as ring:
        assert os.readlink(f"/proc/self/fd/{ring.fds[0]}") == "/memfd:ringbuf (deleted)"
        assert os.fstat(ring.fds[0]).st_nlink == 0
        assert os.fstat(ring.fds[0]).st_mode & 0o777 == 0o600


def test_capacity_is_rounded_up_to_a_page() -> None:
    for asked, given in ((1, 4096), (4096, 4096), (4097, 8192)):
        with Ring.create(asked) as ring:
            assert ring.capacity == given
            assert os.fstat(ring.fds[0]).st_size == HEADER + given
    with pytest.raises(ValueError, match="positive"):
        Ring.create(0)


def test_closing_frees_every_descriptor_and_is_idempotent() -> None:
    before = descriptors()
    ring = Ring.create()
    twin = Ring.attach(duplicates(ring), generation=0)
    ring.claim_producer()
    twin.claim_consumer()
    for one in (ring, twin):
        one.close()
        one.close()
        for call in (one.statistics, one.claim_producer, one.claim_consumer, lambda one=one: one.peer_pids):
            with pytest.raises(RingMisuse):
                call()
    assert descriptors() == before


def test_the_end_of_a_dead_process_is_closed_without_a_free_descriptor() -> None:
    """The peer is woken, and gets what was sent before."""
    with Ring.create() as ring, Ring.attach(duplicates(ring), generation=0) as twin:
        ring.claim_producer().send(b"last")
        consumer = twin.claim_consumer()
        with consumer.recv(timeout=1.0) as frame:
            assert bytes(frame.data) == b"last"
        assert consumer.park()
        with few_descriptors():
            twin.close_end("producer")
        assert select.select([consumer.fileno()], [], [], 0)[0]
        with pytest.raises(RingClosed):
            consumer.try_recv()
    with Ring.create() as ring:
        producer = ring.claim_producer()
        ring.close_end("consumer")
        with pytest.raises(RingClosed):
            producer.try_send(b"more")


def test_a_ring_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        Ring.create()
    assert descriptors() == before


@pytest.mark.parametrize("free", [1, 2])
def test_a_ring_without_descriptors_for_its_bells_leaves_nothing(free: int) -> None:
    before = descriptors()
    with few_descriptors(free), pytest.raises(OSError, match="Too many open files"):
        Ring.create()
    assert descriptors() == before


def test_descriptors_are_not_inherited(ring: Ring) -> None:
    fds = duplicates(ring)
    for fd in fds:
        os.set_inheritable(fd, True)
    with Ring.attach(fds, generation=0) as twin:
        for fd in (*ring.fds, *twin.fds):
            assert not os.get_inheritable(fd)


def test_an_end_is_claimed_once(ring: Ring) -> None:
    with Ring.attach(duplicates(ring), generation=0) as twin:
        assert ring.peer_pids == (None, None)
        ring.claim_producer()
        twin.claim_consumer()
        for one in (ring, twin):
            assert one.peer_pids == (os.getpid(), os.getpid())
            for end, claim in (("producer", one.claim_producer), ("consumer", one.claim_consumer)):
                with pytest.raises(AlreadyClaimed) as caught:
                    claim()
                assert (caught.value.end, caught.value.pid) == (end, os.getpid())


def test_a_closed_end_is_not_claimed_again(ring: Ring) -> None:
    ring.claim_producer().close()
    with pytest.raises(RingClosed):
        ring.claim_producer()


def test_both_mappings_see_one_ring(ring: Ring) -> None:
    with Ring.attach(duplicates(ring), generation=0) as twin:
        ring.claim_producer().send(b"through")
        assert twin.statistics() == ring.statistics()
        with twin.claim_consumer().recv() as frame:
            assert bytes(frame.data) == b"through"
        assert twin.statistics() == ring.statistics()
        assert ring.statistics() == (ring.capacity, 0, 1, 7)


def test_another_generation_is_refused() -> None:
    before = descriptors()
    with Ring.create(generation=7) as ring:
        with pytest.raises(WrongGeneration) as caught:
            Ring.attach(duplicates(ring), generation=8)
        assert (caught.value.expected, caught.value.found) == (8, 7)
        with Ring.attach(duplicates(ring), generation=7) as twin:
            assert twin.generation == 7
    assert descriptors() == before


@pytest.mark.parametrize(("word", "offset"), [(0, 0), (1, 0), (2, 16)])
def test_a_header_of_another_layout_is_refused(ring: Ring, word: int, offset: int) -> None:
    before = descriptors()
    ring._segment.words[word] += 1
    with pytest.raises(RingCorrupted) as caught:
        Ring.attach(duplicates(ring), generation=0)
    assert caught.value.offset == offset
    assert ring._segment.words[word] in caught.value.words
    assert descriptors() == before


def test_descriptors_of_something_else_are_refused_and_closed(ring: Ring) -> None:
    before = descriptors()
    with pytest.raises(RingCorrupted):
        Ring.attach(list(reversed(duplicates(ring))), generation=0)
    with pytest.raises(ValueError, match="unpack"):
        Ring.attach(duplicates(ring) + duplicates(ring), generation=0)
    assert descriptors() == before


RECORD_WORDS = {
    "a fragment of nothing": (0, 0x503),
    "no kind": (0, 0x500),
    "unknown kind": (0, 0x506),
    "longer than the ring": (0, (1 << 40) | 1),
    "beyond the tail": (0, (65 << 8) | 1),
    "another position": (1, 128),
}


@pytest.mark.parametrize(("word", "value"), RECORD_WORDS.values(), ids=RECORD_WORDS.keys())
def test_a_corrupted_record_is_refused_with_its_place_and_words(ring: Ring, word: int, value: int) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    producer.send(b"12345")
    at = HEADER // 8 + word
    ring._segment.words[at] = value
    for receive in (consumer.try_recv, consumer.try_recv, *[consumer.try_record] * (value != 0x503)):
        with pytest.raises(RingCorrupted) as caught:
            receive()
        assert caught.value.offset == HEADER
        assert caught.value.words[word] == value
        assert len(caught.value.words) == 4


def test_a_record_that_crosses_the_end_of_the_data_area_is_refused(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    while ring.statistics().used < ring.capacity - 128:
        producer.send(bytes(64))
    while ring.statistics().used:
        consumer.recv().release()
    for message in (b"last of the lap", b"first of the next"):
        producer.send(message.ljust(64))
    ring._segment.words[(HEADER + ring.capacity - 128) // 8] = 128 << 8 | 1
    with pytest.raises(RingCorrupted) as caught:
        consumer.try_recv()
    assert caught.value.offset == HEADER + ring.capacity - 128


@pytest.mark.parametrize("total", [0, 5, 1 << 63], ids=["empty", "no more than the fragment", "absurd"])
def test_a_first_fragment_with_an_impossible_total_is_refused(ring: Ring, total: int) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    producer.send(b"12345")
    first = HEADER // 8
    ring._segment.words[first] = 5 << 8 | 2
    ring._segment.words[first + 2] = total
    with pytest.raises(RingCorrupted, match="impossible size"):
        consumer.try_recv()


def test_a_fragment_that_continues_an_abandoned_message_is_refused(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    parts = producer.sending(bytes(2 * ring.capacity))
    next(parts)
    parts.close()
    assert consumer.try_recv() is None
    filled = ring.statistics().payload_bytes
    producer.send(b"another")
    at = ring._segment.words[PRODUCER.position]
    with consumer.recv() as frame:
        assert bytes(frame.data) == b"another"
    producer.send(b"forged")
    record = (HEADER + at % ring.capacity) // 8
    ring._segment.words[record] = 6 << 8 | 3
    ring._segment.words[record + 2] = filled
    with pytest.raises(RingCorrupted, match="continues nothing"):
        consumer.try_recv()


@pytest.mark.parametrize("tail", [1 << 40, (1 << 64) - 64])
def test_a_tail_that_left_the_ring_is_refused(ring: Ring, tail: int) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    producer.send(b"a")
    consumer.recv().release()
    ring._segment.words[PRODUCER.position] = tail
    with pytest.raises(RingCorrupted):
        consumer.try_recv()


def test_a_head_that_left_the_ring_is_refused(ring: Ring) -> None:
    producer = ring.claim_producer()
    while producer.try_send(bytes(64)):
        pass
    ring._segment.words[CONSUMER.position] = 1 << 40
    with pytest.raises(RingCorrupted) as caught:
        producer.try_send(bytes(64))
    assert (caught.value.offset, caught.value.words) == (8 * CONSUMER.position, (1 << 40,))


def test_another_machine_is_refused_at_import() -> None:
    script = "import platform; platform.machine = lambda: 'aarch64'; import ringbuf"
    environment = {**os.environ, "PYTHONPATH": str(Path(ringbuf.__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 1
    assert (
        "UnsupportedMachine: ringbuf relies on the total store order of x86-64; this machine is 'aarch64'"
        in result.stderr
    )
