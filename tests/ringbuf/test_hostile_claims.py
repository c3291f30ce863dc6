"""Claims that no process made, and doorbells that ring at the wrong time."""

from __future__ import annotations

import os
import threading

import pytest

from ringbuf import AlreadyClaimed, PeerDied, Ring
from ringbuf._claim import claim_word_of
from ringbuf._words import CONSUMER, PRODUCER
from tests.ringbuf.descriptors import descriptors, duplicates


@pytest.mark.parametrize("start", [0, 1, 5000, 2**42 - 1], ids="start {}".format)
def test_claims_of_no_process(start: int, ring: Ring) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert thread.native_id is not None
    before = descriptors()
    try:
        for pid in (0, 1, os.getpid(), os.getppid(), thread.native_id, 2**22 - 1):
            word = start << 22 | pid
            if word == claim_word_of(pid):
                continue  # the first process, where it started as early as that
            ring._segment.words[PRODUCER.claim] = ring._segment.words[CONSUMER.claim] = word
            with Ring.attach(duplicates(ring), generation=0) as twin:
                consumer = twin.claim_consumer()
                if word:
                    with pytest.raises(PeerDied) as caught:
                        consumer.recv(timeout=60)
                    assert (caught.value.end, caught.value.pid) == ("producer", pid)
                else:
                    with pytest.raises(TimeoutError):
                        consumer.recv(timeout=0)
                producer = twin.claim_producer()
                producer.send(b"claimed")
                consumer.recv(timeout=0).release()
            ring._segment.words[PRODUCER.closed] = ring._segment.words[CONSUMER.closed] = 0
    finally:
        stop.set()
        thread.join()
    assert descriptors() == before


def test_the_claim_of_a_living_thread_is_not_a_process_to_watch(ring: Ring) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        word = claim_word_of(thread.native_id)
        assert word is not None
        ring._segment.words[PRODUCER.claim] = word
        with pytest.raises(TimeoutError):
            ring.claim_consumer().recv(timeout=0)
        with pytest.raises(AlreadyClaimed):
            ring.claim_producer()
    finally:
        stop.set()
        thread.join()


def test_a_claim_of_another_living_process_is_respected(ring: Ring) -> None:
    word = claim_word_of(os.getppid())
    assert word is not None
    ring._segment.words[PRODUCER.claim] = word
    with pytest.raises(AlreadyClaimed) as caught:
        ring.claim_producer()
    assert (caught.value.end, caught.value.pid) == ("producer", os.getppid())
    with pytest.raises(TimeoutError):
        ring.claim_consumer().recv(timeout=0)


def test_spurious_bells(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    for _ in range(1000):
        os.eventfd_write(consumer.fileno(), 1)
        os.eventfd_write(producer.fileno(), 3)
        with pytest.raises(TimeoutError):
            consumer.recv(timeout=0)
    with pytest.raises(TimeoutError):
        producer.send(bytes(2 * ring.capacity), timeout=0)
    assert consumer.try_recv() is None
    producer.send(b"message")
    assert bytes(consumer.recv(timeout=0).data) == b"message"


def test_a_bell_at_its_limit_still_wakes(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    assert consumer.park()
    os.eventfd_write(consumer.fileno(), 2**64 - 2)
    producer.send(b"message")
    assert bytes(consumer.recv(timeout=60).data) == b"message"
    producer.close()


def test_a_bell_that_never_stops_ringing_ends_no_later_than_the_timeout(ring: Ring) -> None:
    bells = [os.eventfd(2**32 - 1, os.EFD_SEMAPHORE | os.EFD_NONBLOCK) for _ in range(2)]
    with Ring.attach([os.dup(ring.fds[0]), *bells], generation=0) as twin:
        producer, consumer = twin.claim_producer(), twin.claim_consumer()
        with pytest.raises(TimeoutError):
            consumer.recv(timeout=0.01)
        with pytest.raises(TimeoutError):
            producer.send(bytes(2 * ring.capacity), timeout=0.01)


def test_a_message_without_a_bell_is_found_at_the_timeout(ring: Ring) -> None:
    """The word that announces the consumer's sleep was overwritten."""
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    wait = consumer._waiter.wait

    def wait_without_a_ring(deadline: float | None) -> bool:
        ring._segment.words[CONSUMER.waits] = 0
        producer.send(b"message")
        return wait(deadline)

    consumer._waiter.wait = wait_without_a_ring  # type: ignore[method-assign]
    assert bytes(consumer.recv(timeout=0.01).data) == b"message"
