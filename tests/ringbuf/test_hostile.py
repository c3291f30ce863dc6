"""Shared memory that holds what the protocol never writes, and descriptors of something else.

What may come of it: RingCorrupted and the other errors of the ring, what was sent, or nothing. Never another error, a
hang, or a byte of anywhere else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringbuf import (
    AlreadyClaimed,
    Consumer,
    PeerDied,
    Producer,
    Ring,
    RingClosed,
    RingCorrupted,
    WrongGeneration,
)
from ringbuf._claim import _claim_word
from ringbuf._producer import MAX_MESSAGE
from ringbuf._words import CONSUMER, FIRST, HEADER, PRODUCER, RECORD
from tests.ringbuf.descriptors import descriptors, duplicates

CAPACITY = 4096
GENERATION = 7
SENT = tuple(bytes([65 + n]) * size for n, size in enumerate((100, 0, 700, 64)))
ALLOWED = (RingCorrupted, WrongGeneration, RingClosed, PeerDied, AlreadyClaimed, TimeoutError)
SINGLE = (0, 1, 2, 3, 4, 48, 49, *PRODUCER[1:], *CONSUMER[1:])
"""Every word of the header."""
PATTERNS = (0x01, 0x80, 0xFF)
ANY_WORD = st.integers(0, 2**64 - 1)


def begun(checksums: bool = False) -> Ring:
    """A ring whose next record will be a PAD: three messages go, and the end of the data area is near."""
    ring = Ring.create(CAPACITY, generation=GENERATION, checksums=checksums)
    ring._segment.words[PRODUCER.position] = ring._segment.words[CONSUMER.position] = CAPACITY - 384
    return ring


def use(producer: Producer, consumer: Consumer) -> None:
    """Whatever the two ends do, as far as the first error. What comes is what was sent."""
    for message in SENT:
        producer.try_send(message)
    if (view := producer.try_reserve(8)) is not None:
        view[:] = SENT[0][:8]
        del view
        producer.abandon()
    frames = []
    try:
        frames.append(consumer.recv(timeout=0))
        assert frames[0].data in SENT
        while (frame := consumer.try_recv()) is not None:
            assert frame.data in SENT
            frames.append(frame)
        for frame in reversed(frames):
            frame.release()
        for number, _ in enumerate(producer.sending(b"big" * CAPACITY)):
            frame = consumer.try_recv()
            assert frame is None
            if number > 100:
                return  # nobody gives space back, and nobody is told that it is so
        frame = consumer.recv(timeout=0)
        assert frame.data == b"big" * CAPACITY
        frame.release()
        consumer.park()
        consumer.try_recv()
    finally:
        for frame in frames:
            frame.release()


@pytest.mark.parametrize("stage", ["before attach", "before claims", "between messages", "while frames are held"])
def test_a_flipped_byte_of_any_header_word(stage: str) -> None:
    before = descriptors()
    outcomes: set[str] = set()
    complaints: list[RingCorrupted] = []
    for byte in (8 * word + n for word in SINGLE for n in range(8)):
        for pattern in PATTERNS:
            with begun() as ring, ExitStack() as stack:
                words = ring._segment.words

                def flip(words: memoryview = words, byte: int = byte, pattern: int = pattern) -> None:
                    words[byte // 8] ^= pattern << 8 * (byte % 8)

                try:
                    if stage == "before attach":
                        flip()
                    twin = stack.enter_context(Ring.attach(duplicates(ring), generation=GENERATION))
                    if stage == "before claims":
                        flip()
                    consumer, producer = twin.claim_consumer(), ring.claim_producer()
                    if stage == "between messages":
                        producer.send(SENT[0])
                        flip()
                        with consumer.recv(timeout=0) as frame:
                            assert frame.data == SENT[0]
                    if stage == "while frames are held":
                        producer.send(SENT[0])
                        producer.send(SENT[2])
                        stack.enter_context(consumer.recv())
                        flip()
                    ring.statistics()
                    _ = ring.peer_pids
                    use(producer, consumer)
                    outcomes.add("as sent")
                except ALLOWED as error:
                    outcomes.add(type(error).__name__)
                    complaints += [error] if isinstance(error, RingCorrupted) else []
    assert descriptors() == before
    assert {"as sent", "RingCorrupted", "RingClosed"} <= outcomes
    assert all(error.words and error.offset in range(0, HEADER + CAPACITY, 8) for error in complaints)


@pytest.mark.parametrize(
    ("word", "error", "offset"),
    [
        (0, RingCorrupted, 0),
        (1, RingCorrupted, 0),
        (2, RingCorrupted, 16),
        (3, WrongGeneration, None),
        (4, RingCorrupted, 32),
    ],
)
def test_every_bit_of_what_a_header_says_of_itself_is_looked_at(word: int, error: Any, offset: int | None) -> None:
    with Ring.create(CAPACITY, generation=GENERATION) as ring:
        right = ring._segment.words[word]
        for bit in range(64):
            if (word, bit) == (4, 0):
                continue  # a ring with checksums: that may be
            ring._segment.words[word] = right ^ 1 << bit
            with pytest.raises(error) as caught:
                Ring.attach(duplicates(ring), generation=GENERATION)
            assert offset is None or (caught.value.offset, ring._segment.words[word] in caught.value.words) == (
                offset,
                True,
            )


def test_bytes_of_the_header_that_mean_nothing_may_hold_anything() -> None:
    with begun() as ring:
        for word in range(HEADER // 8):
            if word not in SINGLE:
                ring._segment.words[word] = 2**64 - 1
        with Ring.attach(duplicates(ring), generation=GENERATION) as twin:
            use(ring.claim_producer(), twin.claim_consumer())


IMPOSSIBLE = {
    "by one": lambda position, peer: position + 1,
    "by a word": lambda position, peer: position + 8,
    "not yet": lambda position, peer: position + RECORD,
    "beyond a lap": lambda position, peer: peer + CAPACITY + RECORD,
    "backwards": lambda position, peer: peer - RECORD,
    "absurd": lambda position, peer: 1 << 63,
    "the largest": lambda position, peer: 2**64 - 1,
    "the largest multiple": lambda position, peer: 2**64 - RECORD,
    "zero": lambda position, peer: 0,
}


@pytest.mark.parametrize("wrong", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_tail(wrong: Callable[[int, int], int]) -> None:
    with begun() as ring:
        producer, consumer = ring.claim_producer(), ring.claim_consumer()
        for message in SENT:
            producer.send(message)
        consumer.recv().release()
        words = ring._segment.words
        words[PRODUCER.position] = found = wrong(words[PRODUCER.position], words[CONSUMER.position])
        with pytest.raises(RingCorrupted) as caught:
            list(emptied(consumer))
        if caught.value.offset < HEADER:
            assert (caught.value.offset, caught.value.words) == (8 * PRODUCER.position, (found,))
        assert 0 <= ring.statistics().used <= CAPACITY
        consumer.close()
        with Ring.attach(duplicates(ring), generation=GENERATION) as twin:
            twin._segment.words[PRODUCER.claim] = 0
            if found % RECORD or not words[CONSUMER.position] <= found <= words[CONSUMER.position] + CAPACITY:
                with pytest.raises(RingCorrupted):
                    twin.claim_producer()


@pytest.mark.parametrize("wrong", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_head(wrong: Callable[[int, int], int]) -> None:
    with begun() as ring:
        producer = ring.claim_producer()
        while producer.try_send(bytes(64)):
            pass
        words = ring._segment.words
        words[CONSUMER.position] = found = wrong(words[CONSUMER.position], words[PRODUCER.position])
        if wrong in (IMPOSSIBLE["not yet"], IMPOSSIBLE["backwards"]):  # the first might be, and so might the second
            assert producer.try_send(b"")
            return
        for send in (lambda: producer.try_send(b""), lambda: producer.send(bytes(2 * CAPACITY), timeout=0)):
            with pytest.raises(RingCorrupted) as caught:
                send()
            assert (caught.value.offset, caught.value.words) == (8 * CONSUMER.position, (found,))
        with pytest.raises(RingCorrupted):
            ring.claim_consumer()


@pytest.mark.parametrize("word", [48, 49])
def test_impossible_counts(word: int) -> None:
    with begun() as ring:
        ring._segment.words[word] = 2**64 - 1
        with pytest.raises(RingCorrupted) as caught:
            ring.claim_producer()
        assert caught.value.offset == 8 * 48
        assert 2**64 - 1 in caught.value.words
        assert ring.peer_pids == (None, None)


def filled(checksums: bool) -> tuple[Ring, list[int], list[bytes]]:
    """A ring, the offsets (bytes) of its records, and its messages: whole ones, a PAD, and fragments."""
    ring = begun(checksums)
    producer, segment = ring.claim_producer(), ring._segment
    messages = [*SENT, os.urandom(2100)]
    for message in messages:
        producer.send(message)
    records, position = [], segment.words[CONSUMER.position]
    while position < segment.words[PRODUCER.position]:
        at = HEADER + position % CAPACITY
        records.append(at)
        position += RECORD + -(-(segment.words[at // 8] >> 8) // RECORD) * RECORD
    kinds = [segment.words[at // 8] & 0xFF for at in records]
    assert sorted(set(kinds)) == [1, 2, 3, 4, 5]
    return ring, records, messages


def emptied(consumer: Consumer) -> Iterator[bytes]:
    while (frame := consumer.try_recv()) is not None:
        assert frame.data.nbytes <= MAX_MESSAGE
        yield bytes(frame.data)
        frame.release()


VALUES = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 5, 2**63, 2**64 - 1, 2**64 - 64, CAPACITY, MAX_MESSAGE, MAX_MESSAGE + 1]),
    st.integers(-2, 2).map(lambda step: ("add", step)),
    st.integers(-64, 64).map(lambda step: ("add", step << 8)),
    st.integers(0, 63).map(lambda bit: ("flip", bit)),
    ANY_WORD,
    st.tuples(st.integers(0, 6), st.integers(0, CAPACITY) | st.integers(0, 2**56 - 1)).map(
        lambda kind: kind[1] << 8 | kind[0]
    ),
)


def altered(word: int, change: Any) -> int:
    match change:
        case ("add", step):
            return int(word + step) % 2**64
        case ("flip", bit):
            return int(word ^ 1 << bit)
        case value:
            number: int = value
            return number


@settings(max_examples=150)
@given(data=st.data(), checksums=st.booleans())
def test_records_of_any_words(data: st.DataObject, checksums: bool) -> None:
    ring, records, _ = filled(checksums)
    with ring:
        words = ring._segment.words
        places = st.tuples(st.sampled_from(records), st.integers(0, 3)).map(lambda place: place[0] // 8 + place[1])
        anywhere = st.integers(HEADER // 8, (HEADER + CAPACITY) // 8 - 1)
        ends = st.sampled_from([PRODUCER.position, CONSUMER.position, PRODUCER.closed])
        for place in data.draw(st.lists(places | places | anywhere | ends, min_size=1, max_size=4)):
            words[place] = altered(words[place], data.draw(VALUES))
        try:
            consumer = ring.claim_consumer()
            assert sum(map(len, emptied(consumer))) <= CAPACITY
        except MemoryError:
            return  # a message of MAX_MESSAGE may be more than there is
        except (RingCorrupted, RingClosed):
            return


def test_with_checksums_no_flipped_bit_of_a_record_goes_unseen() -> None:
    ring, records, messages = filled(checksums=True)
    with ring:
        words = ring._segment.words
        producer_claim, start = words[PRODUCER.claim], words[CONSUMER.position]
        consumer = ring.claim_consumer()
        assert list(emptied(consumer)) == messages
        for at in records:
            payload = range(256, 320)  # the payload's first word
            for bit in (*range(256), *payload):
                word = at // 8 + (bit // 64 if bit < 256 else RECORD // 8)
                if bit >= 256 and (words[at // 8] & 0xFF == 5 or words[at // 8] >> 8 < 8):
                    continue
                right = words[word]
                words[word] = right ^ 1 << bit % 64
                words[CONSUMER.claim], words[CONSUMER.position] = 0, start
                received = []
                with pytest.raises(RingCorrupted) as caught:  # noqa: PT012
                    for message in emptied(ring.claim_consumer()):
                        received.append(message)  # noqa: PERF402
                words[word] = right
                assert received == messages[: len(received)]
                assert caught.value.offset == at
        assert words[PRODUCER.claim] == producer_claim


def test_a_fragment_that_promises_the_most_takes_no_memory_for_it(ring: Ring) -> None:
    ring.claim_producer().send(b"begin")
    ring._segment.words[HEADER // 8] = 5 << 8 | FIRST
    ring._segment.words[HEADER // 8 + 2] = MAX_MESSAGE
    consumer = ring.claim_consumer()
    process = psutil.Process()
    before = process.memory_info().rss
    with suppress(MemoryError):  # so much of an address space is not to be had everywhere
        assert consumer.try_recv() is None
    assert process.memory_info().rss - before < 16 << 20


def test_padding_that_ends_early_is_refused(ring: Ring) -> None:
    ring.claim_producer().send(b"a message")
    ring._segment.words[HEADER // 8] = 9 << 8 | 5
    with pytest.raises(RingCorrupted, match="padding") as caught:
        ring.claim_consumer().try_recv()
    assert caught.value.offset == HEADER


def thread_of_this_process() -> int:
    return next(int(tid) for tid in os.listdir("/proc/self/task") if int(tid) != os.getpid())


@pytest.mark.parametrize("start", [0, 1, 5000, 2**42 - 1], ids="start {}".format)
def test_claims_that_nobody_made(start: int, ring: Ring) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    before = descriptors()
    try:
        for pid in (0, 1, os.getpid(), os.getppid(), thread_of_this_process(), 2**22 - 1):
            word = start << 22 | pid
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


def test_the_claim_of_a_thread_that_lives_is_no_process_to_watch(ring: Ring) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        word = _claim_word(thread_of_this_process())
        assert word is not None
        ring._segment.words[PRODUCER.claim] = word
        with pytest.raises(TimeoutError):
            ring.claim_consumer().recv(timeout=0)
        with pytest.raises(AlreadyClaimed):
            ring.claim_producer()
    finally:
        stop.set()
        thread.join()


def test_a_claim_of_a_living_stranger_is_respected(ring: Ring) -> None:
    word = _claim_word(os.getppid())
    assert word is not None
    ring._segment.words[PRODUCER.claim] = word
    with pytest.raises(AlreadyClaimed) as caught:
        ring.claim_producer()
    assert (caught.value.end, caught.value.pid) == ("producer", os.getppid())
    with pytest.raises(TimeoutError):
        ring.claim_consumer().recv(timeout=0)


def test_bells_that_ring_for_nothing(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    for _ in range(1000):
        os.eventfd_write(consumer.fileno(), 1)
        os.eventfd_write(producer.fileno(), 3)
        with pytest.raises(TimeoutError):
            consumer.recv(timeout=0)
    with pytest.raises(TimeoutError):
        producer.send(bytes(2 * ring.capacity), timeout=0)
    assert consumer.try_recv() is None
    producer.send(b"heard")
    assert bytes(consumer.recv(timeout=0).data) == b"heard"


def test_a_bell_that_cannot_be_rung_more_is_rung_enough(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    assert consumer.park()
    os.eventfd_write(consumer.fileno(), 2**64 - 2)
    producer.send(b"heard")
    assert bytes(consumer.recv(timeout=60).data) == b"heard"
    producer.close()


def test_a_bell_that_never_stops_ringing_ends_no_later_than_the_timeout(ring: Ring) -> None:
    bells = [os.eventfd(2**32 - 1, os.EFD_SEMAPHORE | os.EFD_NONBLOCK) for _ in range(2)]
    with Ring.attach([os.dup(ring.fds[0]), *bells], generation=0) as twin:
        producer, consumer = twin.claim_producer(), twin.claim_consumer()
        with pytest.raises(TimeoutError):
            consumer.recv(timeout=0.01)
        with pytest.raises(TimeoutError):
            producer.send(bytes(2 * ring.capacity), timeout=0.01)


def test_what_comes_without_a_ring_is_found_at_the_timeout(ring: Ring) -> None:
    """Somebody wiped out that the consumer sleeps."""
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    wait = consumer._waiter.wait

    def unheard(deadline: float | None) -> bool:
        ring._segment.words[CONSUMER.waits] = 0
        producer.send(b"unheard")
        return wait(deadline)

    consumer._waiter.wait = unheard  # type: ignore[method-assign]
    assert bytes(consumer.recv(timeout=0.01).data) == b"unheard"
