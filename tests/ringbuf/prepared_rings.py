"""Rings in chosen states, for tests that overwrite their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ringbuf import Consumer, Ring
from ringbuf._producer import MAX_MESSAGE
from ringbuf._words import CONSUMER, HEADER, PRODUCER, RECORD

CAPACITY = 4096
GENERATION = 7
SENT = tuple(bytes([65 + n]) * size for n, size in enumerate((100, 0, 700, 64)))


def begun(checksums: bool = False) -> Ring:
    """Return a ring whose next record will be a PAD: three messages fit before the end of the data area."""
    ring = Ring.create(CAPACITY, generation=GENERATION, checksums=checksums)
    ring._segment.words[PRODUCER.position] = ring._segment.words[CONSUMER.position] = CAPACITY - 384
    return ring


def filled(checksums: bool) -> tuple[Ring, list[int], list[bytes]]:
    """Return a ring, the byte offsets of its records, and its messages: whole ones, a PAD, and fragments."""
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
