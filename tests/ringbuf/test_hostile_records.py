"""Records that hold what the protocol never writes.

The consumer raises RingCorrupted or another error of the ring, or it receives what was sent. It never raises another
error, hangs, or reads outside the segment.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringbuf import Ring, RingClosed, RingCorrupted
from ringbuf._producer import MAX_MESSAGE
from ringbuf._words import CONSUMER, FIRST, HEADER, PRODUCER, RECORD
from tests.ringbuf.prepared_rings import CAPACITY, emptied, filled

ANY_WORD = st.integers(0, 2**64 - 1)
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
            return  # a message of MAX_MESSAGE may exceed the memory
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


def test_a_fragment_of_the_largest_message_takes_no_memory_in_advance(ring: Ring) -> None:
    ring.claim_producer().send(b"begin")
    ring._segment.words[HEADER // 8] = 5 << 8 | FIRST
    ring._segment.words[HEADER // 8 + 2] = MAX_MESSAGE
    consumer = ring.claim_consumer()
    process = psutil.Process()
    before = process.memory_info().rss
    with suppress(MemoryError):  # not every machine has that much address space
        assert consumer.try_recv() is None
    assert process.memory_info().rss - before < MAX_MESSAGE // 8


def test_padding_that_ends_early_is_refused(ring: Ring) -> None:
    ring.claim_producer().send(b"a message")
    ring._segment.words[HEADER // 8] = 9 << 8 | 5
    with pytest.raises(RingCorrupted, match="padding") as caught:
        ring.claim_consumer().try_recv()
    assert caught.value.offset == HEADER
