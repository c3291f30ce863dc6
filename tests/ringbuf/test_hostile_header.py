"""Headers that hold what the protocol never writes.

Each end raises RingCorrupted or another error of the ring, or transfers what was sent. It never raises another error,
hangs, or accesses memory outside the segment.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

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
from ringbuf._words import CONSUMER, HEADER, PRODUCER, RECORD
from tests.ringbuf.descriptors import descriptors, duplicates
from tests.ringbuf.prepared_rings import CAPACITY, GENERATION, SENT, begun, emptied

ALLOWED = (RingCorrupted, WrongGeneration, RingClosed, PeerDied, AlreadyClaimed, TimeoutError)
SINGLE = (0, 1, 2, 3, 4, 48, 49, *PRODUCER[1:], *CONSUMER[1:])
"""Every word of the header."""
PATTERNS = (0x01, 0x80, 0xFF)


def use(producer: Producer, consumer: Consumer) -> None:
    """Use both ends until the first error. Every received message is one that was sent."""
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
                return  # the overwritten words keep the consumer from giving space back, which no error shows
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
def test_every_bit_of_the_headers_constants_is_checked(word: int, error: Any, offset: int | None) -> None:
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


def test_positions_that_no_ring_reaches_are_refused() -> None:
    with begun() as ring:
        ring._segment.words[PRODUCER.position] = ring._segment.words[CONSUMER.position] = 1 << 63
        for claim in (ring.claim_producer, ring.claim_consumer):
            with pytest.raises(RingCorrupted, match="no tail"):
                claim()


def test_unused_bytes_of_the_header_may_hold_anything() -> None:
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
        if wrong in (IMPOSSIBLE["not yet"], IMPOSSIBLE["backwards"]):  # positions that are possible
            assert producer.try_send(b"")
            return
        for send in (lambda: producer.try_send(b""), lambda: producer.send(bytes(2 * CAPACITY), timeout=0)):
            with pytest.raises(RingCorrupted) as caught:
                send()
            assert (caught.value.offset, caught.value.words) == (8 * CONSUMER.position, (found,))
        with pytest.raises(RingCorrupted):
            ring.claim_consumer()


def test_a_head_that_was_farther_before() -> None:
    with begun() as ring:
        producer, consumer = ring.claim_producer(), ring.claim_consumer()
        producer.send(b"x")
        consumer.recv().release()
        assert producer.has_passed(producer.position)
        ring._segment.words[CONSUMER.position] -= RECORD
        with pytest.raises(RingCorrupted, match="the head left"):
            producer.has_passed(producer.position)


@pytest.mark.parametrize("word", [48, 49])
def test_impossible_counts(word: int) -> None:
    with begun() as ring:
        ring._segment.words[word] = 2**64 - 1
        with pytest.raises(RingCorrupted) as caught:
            ring.claim_producer()
        assert caught.value.offset == 8 * 48
        assert 2**64 - 1 in caught.value.words
        assert ring.peer_pids == (None, None)
