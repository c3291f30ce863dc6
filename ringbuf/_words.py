"""The shared words: the only file in which the memory model needs to be understood.

Rule 1: a shared word is read and written through ``memoryview.cast("Q")`` only: one aligned 8-byte move.
(``struct.pack_into`` clears the bytes first, and a reader would see the zero.)
Rule 2: each word has one writer. A producer writes the producer's column, a consumer the consumer's.
Rule 3: positions only grow. A position is the count of bytes since the ring began; its place is position % capacity.

Segment, in bytes (one header page, then the data area). Words that change with each message and words that seldom do
are two cache lines apart, so that reading the latter costs nothing while both sides run:

    off size field           writer    ordering
      0    8 magic           creator   stored last: a reader that sees it sees all below
      8    8 version         creator
     16    8 capacity        creator   data bytes, a multiple of the page
     24    8 generation      creator
     32    8 checksums       creator   1: every record carries one
    128    8 tail            producer  SYNC DATA: stored after the record it ends
    256    8 waits for       producer  SYNC BELL: the head it sleeps for; 0 while awake
    264    8 closed          producer  stored after the last tail
    272    8 claim           producer  the owner of the end: see _claim
    384    8 messages        producer  cumulative
    392    8 payload bytes   producer  cumulative
    512    8 head            consumer  SYNC DATA: stored after the last read of what it gives back
    640    8 waits for       consumer  SYNC BELL: the tail it sleeps for; 0 while awake
    648    8 closed          consumer
    656    8 claim           consumer
   4096      data

Record (64-byte header, then the payload, then padding to the next multiple of 64):

    off size field           meaning
      0    8 kind, length    kind in the low 8 bits, payload bytes above
      8    8 sequence        the record's own position: strictly growing, and another one in each lap
     16    8 place           FIRST: bytes of the whole message. MIDDLE, LAST: offset in the message. Else 0
     24    8 checksum        CRC-32 of the words above and the payload; not written without checksums

SYNC DATA  The publisher stores its position after it wrote (or read) the bytes; the peer loads the position before it
           touches them. Total store order keeps both pairs in order; no fence is needed. A large memcpy stores past the
           cache, which that order does not cover: the C library ends it with the fence that it takes. (CPython neither
           reorders nor merges these accesses.)
SYNC BELL  A sleeper stores ``waits for`` and then loads the peer's position; a publisher stores its position and then
           loads ``waits for``. x86 does reorder a store with a later load, and then both miss each other: the sleeper
           sleeps on data that is there. A full fence between the two, on both sides, lets at least one see the other.
           A lock's release is a locked instruction, which is that fence. The lock is acquired first, without waiting;
           if a signal handler that raised in between left it acquired, it is released all the same.
           A bell is rung once for each position waited for, and only when the peer's position has reached it; positions
           never shrink, so a later sleeper for the same position finds it reached.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import zlib
from typing import Final, NamedTuple

from ringbuf._errors import EndName, RingClosed, RingCorrupted, UnsupportedMachine, WrongGeneration
from ringbuf._mapping import Mapping

if platform.machine() != "x86_64":
    raise UnsupportedMachine(platform.machine())

PAGE: Final = 4096
HEADER: Final = PAGE
RECORD: Final = 64
"""Bytes of a record's header, and the alignment of records and payloads."""
_SUMMED: Final = 24
"""The bytes of the header that the checksum covers."""

MAGIC: Final = int.from_bytes(b"ringbuf\n", "little")
VERSION: Final = 2
_MAGIC, _VERSION, _CAPACITY, _GENERATION, CHECKSUMS = 0, 1, 2, 3, 4
MESSAGES, PAYLOAD_BYTES = 48, 49

WHOLE: Final = 1
FIRST: Final = 2
MIDDLE: Final = 3
LAST: Final = 4
PAD: Final = 5
WARM: Final = 4 << 20
"""An empty ring restarts at its beginning after so many bytes. So a ring whose consumer keeps up uses no more of its
memory, and the bytes that are written next are still in the cache."""
_ENDS_MESSAGE: Final = (WHOLE, LAST)


class Column(NamedTuple):
    """Indices of the words that one end writes."""

    end: EndName
    position: int
    waits: int
    closed: int
    claim: int


PRODUCER: Final = Column(end="producer", position=16, waits=32, closed=33, claim=34)
CONSUMER: Final = Column(end="consumer", position=64, waits=80, closed=81, claim=82)


class Segment(Mapping):
    """The mapping of a ring. ``data`` is the data area."""

    def __init__(self, memory_fd: int) -> None:
        size = os.fstat(memory_fd).st_size
        if size < HEADER + PAGE or size % PAGE:
            raise RingCorrupted(0, (), f"a segment of {size} bytes contains no ring")
        super().__init__(memory_fd, size, offset=HEADER, what="the ring's memory")
        self.capacity = size - HEADER

    def initialise(self, generation: int, checksums: bool) -> None:
        words = self.words
        words[_VERSION], words[_CAPACITY], words[_GENERATION] = VERSION, self.capacity, generation
        words[CHECKSUMS] = checksums
        words[_MAGIC] = MAGIC

    def validate(self, generation: int) -> None:
        """Raises RingCorrupted, WrongGeneration."""
        found = self.words[: CHECKSUMS + 1].tolist()
        if found[_MAGIC] != MAGIC or found[_VERSION] != VERSION:
            raise RingCorrupted(0, found, "magic and version are not of this ring")
        if found[_CAPACITY] != self.capacity:
            raise RingCorrupted(8 * _CAPACITY, found[2:3], f"the segment has {self.capacity} data bytes")
        if found[CHECKSUMS] not in (0, 1):
            raise RingCorrupted(8 * CHECKSUMS, found[4:5], "the checksum flag is neither 0 nor 1")
        if found[_GENERATION] != generation:
            raise WrongGeneration(generation, found[_GENERATION])

    def has_checksums(self) -> bool:
        return self.words[CHECKSUMS] != 0

    def claim_of(self, column: Column) -> int:
        return self.words[column.claim]

    def store_claim(self, column: Column, claim: int) -> None:
        """Called with the claim lock held."""
        self.words[column.claim] = claim

    def is_closed(self, column: Column) -> bool:
        return self.words[column.closed] != 0

    def check_positions(self) -> None:
        """Check head, tail and counts: the next owner of an end continues from them. Raises RingCorrupted."""
        head, tail = self.words[CONSUMER.position], self.words[PRODUCER.position]
        if not head <= tail <= head + self.capacity or (head | tail) % RECORD or tail >> 63:
            raise RingCorrupted(8 * PRODUCER.position, (tail,), f"no tail to the head {head:#x}")
        if max(counts := self.counts()) >> 63:
            raise RingCorrupted(8 * MESSAGES, counts, "counts that no ring reaches")

    def counts(self) -> tuple[int, int]:
        """(messages, payload bytes) since the ring was created. Each is right, but they are not read at one instant."""
        return self.words[MESSAGES], self.words[PAYLOAD_BYTES]

    def used(self) -> int:
        """Return the bytes between head and tail. Head is loaded first: it cannot pass a tail that is loaded later."""
        head = self.words[CONSUMER.position]
        return max(0, min(self.words[PRODUCER.position] - head, self.capacity))

    def checksum(self, position: int, length: int) -> int:
        """Return the CRC-32 of the record at ``position``: its header and ``length`` bytes of payload (0 for a PAD)."""
        at = position % self.capacity
        header, payload = self.data[at : at + _SUMMED], self.data[at + RECORD : at + RECORD + length]
        return zlib.crc32(payload, zlib.crc32(header))

    def corrupted(self, position: int, why: str) -> RingCorrupted:
        """Return the error for an invalid record."""
        offset = HEADER + position % self.capacity
        return RingCorrupted(offset, self.words[offset >> 3 : (offset >> 3) + 4].tolist(), why)

    def span(self) -> tuple[int, int]:
        """Return the address and the size in bytes of the mapping."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)), len(self._map)

    def fence(self) -> threading.Lock:
        """Return a lock of this end's own; releasing it is a full memory fence."""
        return threading.Lock()


def peek_claims(memory_fd: int) -> tuple[int, int, int] | None:
    """Return generation and both claims of a ring that is not mapped here; None if the memory contains no ring."""
    words = memoryview(os.pread(memory_fd, HEADER, 0))
    if len(words) < HEADER or (header := words.cast("Q"))[_MAGIC] != MAGIC:
        return None
    return header[_GENERATION], header[PRODUCER.claim], header[CONSUMER.claim]


class Bell:
    """An eventfd, or a named ring's pipe, that one end rings and the other sleeps at. A ring of the bell is 8 bytes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def ring(self) -> None:
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:  # the count is at its limit, so the bell has been rung
            return

    def clear(self) -> None:
        """Set the count to 0. What remains in a pipe that was rung more than 64 times ends later sleeps early."""
        try:
            os.read(self.fd, 512)
        except BlockingIOError:
            return


class End:
    """One claimed end: it publishes its position, and watches and wakes its peer. Both ends use the same protocol."""

    def __init__(self, segment: Segment, mine: Column, peer: Column, bell: Bell, peer_bell: Bell) -> None:
        self._segment, self._words, self._capacity = segment, segment.words, segment.capacity
        self._checksums = segment.has_checksums()
        self._mine, self._peer = mine, peer
        self._position = mine.position
        self._peer_position, self._peer_waits, self._peer_closed = peer.position, peer.waits, peer.closed
        self._bell, self._peer_bell = bell, peer_bell
        fence = segment.fence()
        self._acquire, self._release = fence.acquire, fence.release
        self._rung = 0
        self.parked = False

    def position(self) -> int:
        return self._words[self._position]

    def peer_position(self) -> int:
        return self._words[self._peer_position]  # SYNC DATA: pairs with publish

    def peer_closed(self) -> bool:
        """Return whether the peer has closed. Its position is then final: load it once more."""
        return self._words[self._peer_closed] != 0

    def publish(self, position: int) -> None:
        words = self._words
        words[self._position] = position  # SYNC DATA: pairs with peer_position; all bytes below are written, or read
        self._acquire(False)
        self._release()  # SYNC BELL: pairs with park
        wanted = words[self._peer_waits]
        if wanted and wanted != self._rung and position >= wanted:
            self._peer_bell.ring()
            self._rung = wanted  # only now: a signal handler that raises before the ring must not cost the wake-up

    def park(self, wanted: int) -> bool:
        """Announce sleep until the peer's position is ``wanted`` (> 0). Return False if it is, or the peer closed."""
        words = self._words
        words[self._mine.waits] = wanted
        self._acquire(False)
        self._release()  # SYNC BELL: pairs with publish and wake
        if words[self._peer_position] >= wanted or words[self._peer_closed]:
            words[self._mine.waits] = 0
            return False
        self.parked = True
        return True

    def unpark(self) -> None:
        """End a sleep: empty the bell. A late ring for this sleep ends the next one early, which is harmless."""
        self._words[self._mine.waits] = 0
        self.parked = False
        self._bell.clear()

    def wake(self) -> None:
        """Wake a sleeping peer after an end was closed or claimed, although no position has changed."""
        self._acquire(False)
        self._release()  # SYNC BELL: pairs with park
        if self._words[self._peer_waits]:
            self._peer_bell.ring()

    def close(self) -> None:
        self._words[self._mine.closed] = 1
        self.wake()


class ProducerEnd(End):
    """Writes records."""

    wanted: int
    """The head that makes room for the record that ``allocate`` refused last."""

    def __init__(self, segment: Segment, bell: Bell, peer_bell: Bell) -> None:
        super().__init__(segment, PRODUCER, CONSUMER, bell, peer_bell)
        self._tail, self._head, self.wanted = self.position(), self.peer_position(), 0
        self._messages, self._payload_bytes = segment.counts()

    def allocate(self, length: int) -> int | None:
        """Return the position for a record of ``length`` payload bytes, or None. Raises RingClosed, RingCorrupted.

        A record never crosses the end of the data area: a PAD fills the rest, visible with the record that follows it.
        """
        words, capacity, tail = self._words, self._capacity, self._tail
        if words[self._peer_closed]:
            raise RingClosed(self._peer.end)
        need = RECORD + (length + RECORD - 1) // RECORD * RECORD
        offset = tail % capacity
        start = tail
        if offset + need > capacity or (need <= offset >= WARM and self.head() == tail):
            start += capacity - offset
        self.wanted = wanted = start + need - capacity
        if self._head < wanted and self.head() < wanted:
            return None
        if start != tail:
            at = (HEADER + offset) >> 3
            words[at] = (capacity - offset - RECORD) << 8 | PAD
            words[at + 1] = tail
            words[at + 2] = 0
            if self._checksums:
                words[at + 3] = self._segment.checksum(tail, 0)
        return start

    def publish_record(self, start: int, kind: int, length: int, place: int) -> None:
        """Publish the record at ``start``, whose payload is written."""
        words = self._words
        at = (HEADER + start % self._capacity) >> 3
        words[at] = length << 8 | kind
        words[at + 1] = start
        words[at + 2] = place
        if self._checksums:
            words[at + 3] = self._segment.checksum(start, length)
        # This end is the only writer of the counts, too.
        self._payload_bytes = words[PAYLOAD_BYTES] = self._payload_bytes + length
        if kind in _ENDS_MESSAGE:
            self._messages = words[MESSAGES] = self._messages + 1
        self._tail = tail = start + RECORD + (length + RECORD - 1) // RECORD * RECORD
        self.publish(tail)

    def head(self) -> int:
        """Return the consumer's position. Raises RingCorrupted."""
        head = self.peer_position()
        if not self._head <= head <= self._tail or head % RECORD:
            raise RingCorrupted(8 * CONSUMER.position, (head,), f"the head left [{self._head}, {self._tail}]")
        self._head = head
        return head


class ConsumerEnd(End):
    """Reads records."""

    def __init__(self, segment: Segment, bell: Bell, peer_bell: Bell) -> None:
        super().__init__(segment, CONSUMER, PRODUCER, bell, peer_bell)

    def read_record(self, position: int, tail: int) -> tuple[int, int, int, int]:
        """Return (kind, length, place, position of the next) of a record below ``tail``. Raises RingCorrupted."""
        words, capacity = self._words, self._capacity
        offset = position % capacity
        at = (HEADER + offset) >> 3
        first, sequence, place = words[at], words[at + 1], words[at + 2]
        kind, length = first & 0xFF, first >> 8
        after = position + RECORD + (length + RECORD - 1) // RECORD * RECORD
        if sequence != position or not WHOLE <= kind <= PAD or after > tail or offset + after - position > capacity:
            raise self._segment.corrupted(position, f"no record of position {position} below {tail}")
        if self._checksums and words[at + 3] != self._segment.checksum(position, 0 if kind == PAD else length):
            raise self._segment.corrupted(position, "the record's checksum is another")
        return kind, length, place, after
