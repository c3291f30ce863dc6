"""A version stands for a layout: other bytes in shared memory need another version, which both sides check."""

from __future__ import annotations

import hashlib
import os

from ringbuf import Snapshot, _snapshot, _words
from tests.ringbuf.prepared_rings import SENT, begun

RINGS = {2: "11c28a3fdbc3c6cd"}
SNAPSHOTS = {1: "7d8df28ac6bf46a7"}
"""By version, a digest of memory with known contents. If it changes, increase ``VERSION``, and put its digest here."""


def digest(memory_fd: int) -> str:
    return hashlib.sha256(os.pread(memory_fd, os.fstat(memory_fd).st_size, 0)).hexdigest()[:16]


def test_the_layout_of_a_ring_is_that_of_its_version() -> None:
    """With records of every kind, frames that were released and some that were not, and closed ends."""
    with begun(checksums=True) as ring:
        producer, consumer = ring.claim_producer(), ring.claim_consumer()
        for message in (*SENT, bytes(range(256)) * 9):
            producer.send(message)
        for _ in range(2):
            consumer.recv().release()
        assert not producer.try_send(bytes(producer.max_reserve))
        assert producer.park()
        ring.close_end("consumer")
        ring.abandon()
        assert {_words.VERSION: digest(ring.fds[0])} == RINGS


def test_the_layout_of_a_snapshot_is_that_of_its_version() -> None:
    snapshot, fd = Snapshot.create(100)
    for message in (b"first", b"second", b"third"):
        snapshot.write(memoryview(message))
    found = digest(fd)
    snapshot.close()
    os.close(fd)
    assert {_snapshot.VERSION: found} == SNAPSHOTS
