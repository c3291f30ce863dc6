"""The sending end.

Rule 1: a record becomes visible when the tail is published. A producer that dies inside a reservation, or abandons it,
leaves no trace.
Rule 2: a record is contiguous; where it would cross the end of the data area, a PAD record fills the rest. So a record
of up to half the ring always fits into an empty ring. A larger message is sent in fragments.
Rule 3: the next FIRST or WHOLE undoes an unfinished run of fragments: the consumer drops those that it has.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from ringbuf._buffers import Buffer, Deferred, Flat, SendBuffer, flat
from ringbuf._claim import Waiter
from ringbuf._errors import FrameBorrowed, MessageTooLarge, RingClosed, RingMisuse
from ringbuf._words import FIRST, LAST, MIDDLE, RECORD, WHOLE, ProducerEnd, Segment

MAX_MESSAGE = 1 << 32
"""Bytes. The largest message, which the consumer may have to join in private memory."""
FRAGMENT = 256 << 10
"""Payload bytes of a fragment: both ends' copies of one then meet in the cache."""


class Producer:
    """The writing end of a ring, made by ``Ring.claim_producer``. Used by one thread at a time."""

    max_reserve: int
    """The most bytes that ``try_reserve`` and ``try_send`` take."""

    def __init__(self, segment: Segment, end: ProducerEnd, waiter: Waiter, fd: int) -> None:
        self._end, self._waiter, self._fd = end, waiter, fd
        self._data, self._capacity = segment.data, segment.capacity
        self.max_reserve = self._capacity // 2 - RECORD
        self._fragment = min(FRAGMENT, self._capacity // 4 - RECORD)
        self._reserved: memoryview | None = None
        self._start = 0
        self._sending_now = False
        self._closed = False

    def fileno(self) -> int:
        """The space doorbell: readable when it is worth resuming ``sending``."""
        return self._fd

    def try_reserve(self, n: int) -> memoryview | None:
        """Return ``n`` writable bytes, contiguous and 64-byte aligned, to fill before ``commit``; None: no room.

        Do not keep an array made from it beyond ``commit``: the bytes are the consumer's then.
        Raises MessageTooLarge (n > max_reserve), RingMisuse (one is open, or a message is being sent), RingClosed,
        RingCorrupted.
        """
        self._check_idle()
        self._check_size(n)
        start = self._end.allocate(n)
        if start is None:
            return None
        at = start % self._capacity + RECORD
        self._start = start
        self._reserved = self._data[at : at + n]
        return self._reserved

    def reserve(self, n: int, timeout: float | None = None, *, spin_s: float = 0.0) -> memoryview:
        """Do as ``try_reserve``, and block the thread until there is room. timeout: seconds. spin_s: as in ``send``.

        Raises TimeoutError, PeerDied, and what ``try_reserve`` raises.
        """
        self._block(self._reserving(n, spin_s), timeout)
        assert self._reserved is not None
        return self._reserved

    @property
    def position(self) -> int:
        """Where the newest message ends, for ``has_passed``."""
        return self._end.position()

    def has_passed(self, position: int) -> bool:
        """Return whether the consumer has released all messages up to ``position``, or has closed.

        A message in fragments counts as released when its last fragment was joined. Raises RingCorrupted.
        """
        return self._end.head() >= position or self._end.peer_closed()

    @property
    def consumer_closed(self) -> bool:
        """Whether the consumer has closed: nothing more can be sent."""
        return self._end.peer_closed()

    def park(self) -> bool:
        """After ``try_reserve`` or ``try_send`` found no room: announce sleep until there is, and look again.

        Returns True to wait until ``fileno()`` is readable, False if there is room already. After a wake-up, try again.
        The doorbell does not report the consumer's death: watch its process too.
        """
        self._check_idle()
        end = self._end
        return end.peer_position() < end.wanted and end.park(end.wanted)

    def commit(self) -> None:
        """Send what was reserved; its view is released. Copies from a device into it must be complete.

        Raises RingMisuse (nothing was reserved), FrameBorrowed (an array made from the view is alive), RingClosed
        (the consumer closed).
        """
        self.commit_record(WHOLE, 0)

    def commit_record(self, kind: int, place: int) -> None:
        """Do as ``commit``, with the kind and the place of a record of another ring (``Consumer.try_record``).

        So messages pass from ring to ring without being joined in between. The caller keeps the order of the records;
        the consumer checks it. Raises ValueError (no such kind or place; the reservation stays open), and what
        ``commit`` raises.
        """
        if not WHOLE <= kind <= LAST or not 0 <= place <= MAX_MESSAGE:
            raise ValueError(f"a record of kind {kind} and place {place}")
        reserved = self._reserved
        if reserved is None:
            raise RingMisuse("nothing is reserved")
        n = reserved.nbytes
        self._drop(reserved)
        if self._end.peer_closed():
            raise RingClosed("consumer")
        self._end.publish_record(self._start, kind, n, place)

    def abandon(self) -> None:
        """Discard the open reservation; nothing is sent. Does nothing without a reservation."""
        if self._reserved is not None:
            self._drop(self._reserved)

    def try_send(self, *buffers: Buffer) -> bool:
        """Send one message, gathered from ``buffers``. Return False, and send nothing, if there is no room now.

        Raises MessageTooLarge (more than max_reserve: use ``sending``), TypeError (not contiguous), RingMisuse,
        RingClosed, RingCorrupted.
        """
        self._check_idle()
        pieces = tuple(map(flat, buffers))
        total = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        self._check_size(total)
        return self._try_record(pieces, total, WHOLE, 0)

    def sending(self, *buffers: Buffer) -> Generator[None, None, None]:
        """Send one message of any size; yields each time it has to wait for space.

        The caller waits until ``fileno()`` is readable (waking early is harmless) and resumes. The message is sent
        when the iteration is over. Closing the iteration earlier discards the message. Nothing else can be sent
        meanwhile, and the buffers must not change.
        Raises RingClosed, RingMisuse (a reservation, or another message, is under way), MessageTooLarge (MAX_MESSAGE).
        """
        return self._sending(tuple(map(flat, buffers)), 0.0)

    def send(self, *buffers: Buffer, timeout: float | None = None, spin_s: float = 0.0) -> None:
        """Do as ``sending``, and block the thread until the message is sent. timeout: seconds.

        spin_s: seconds to look again before sleeping, as in ``Consumer.recv``.
        Raises TimeoutError and PeerDied (the message was not sent), and what ``sending`` raises.
        """
        if self._closed or self._sending_now or self._reserved is not None or self._end.parked:
            self._check_idle()
        pieces = [flat(each) for each in buffers]
        total = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        if total > self.max_reserve or not self._try_record(pieces, total, WHOLE, 0):
            self._block(self._sending(pieces, spin_s), timeout)

    def close(self) -> None:
        """Stop sending: the consumer gets RingClosed after the last message. Idempotent. Raises FrameBorrowed."""
        if self._closed:
            return
        self.abandon()
        self._closed = True
        self._end.close()
        self._waiter.close()

    def _check_idle(self) -> None:
        if self._closed:
            raise RingClosed("producer")
        if self._reserved is not None:
            raise RingMisuse("a reservation is open: commit or abandon it first")
        if self._sending_now:
            raise RingMisuse("a message is being sent: finish or close that iteration first")
        if self._end.parked:
            self._end.unpark()

    def _drop(self, reserved: memoryview) -> None:
        try:
            reserved.release()
        except BufferError as error:
            raise FrameBorrowed("the reservation") from error
        self._reserved = None

    def _check_size(self, n: int) -> None:
        if n < 0:
            raise ValueError(f"a message of {n} bytes")
        if n > self.max_reserve:
            raise MessageTooLarge(n, self.max_reserve, "use sending(), which takes any size")

    def _try_record(self, pieces: Sequence[Flat], length: int, kind: int, place: int) -> bool:
        start = self._end.allocate(length)
        if start is None:
            return False
        data = self._data
        at = start % self._capacity + RECORD
        for piece in pieces:
            end = at + len(piece)
            if isinstance(piece, Deferred):
                piece.copy_into(data[at:end])
            else:
                data[at:end] = piece
            at = end
        self._end.publish_record(start, kind, length, place)
        return True

    def _sending(self, pieces: Sequence[Flat], spin_s: float) -> Generator[None, None, None]:
        self._check_idle()
        self._sending_now = True
        try:
            total = sum(map(len, pieces))
            if total <= self.max_reserve:
                while not self._try_record(pieces, total, WHOLE, 0):
                    yield from self._wait_space(spin_s)
                return
            if total > MAX_MESSAGE:
                raise MessageTooLarge(total, MAX_MESSAGE, "no ring takes that")
            sent = 0
            for part in _regroup(pieces, self._fragment):
                length = sum(map(len, part))
                kind = FIRST if not sent else LAST if sent + length == total else MIDDLE
                while not self._try_record(part, length, kind, sent or total):
                    yield from self._wait_space(spin_s)
                sent += length
        finally:
            self._sending_now = False

    def _reserving(self, n: int, spin_s: float) -> Generator[None, None, None]:
        while self.try_reserve(n) is None:
            yield from self._wait_space(spin_s)

    def _wait_space(self, spin_s: float) -> Generator[None, None, None]:
        """Wait for room: awake for ``spin_s``, then parked. The caller sleeps whenever this yields."""
        end = self._end
        until = time.monotonic() + spin_s
        while time.monotonic() < until:
            if end.peer_position() >= end.wanted:
                return
        if end.park(end.wanted):
            try:
                yield
            finally:
                if not self._closed:
                    end.unpark()
        if self._closed:
            raise RingClosed("producer")

    def _block(self, parts: Generator[None, None, None], timeout: float | None) -> None:
        """Sleep each time that ``parts`` has to wait. Look once more after ``timeout``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        late = False
        try:
            for _ in parts:
                if late:
                    raise TimeoutError(f"no space in the ring within {timeout:g} s")
                late = not self._waiter.wait(deadline)
        finally:
            parts.close()


def _regroup(pieces: Sequence[Flat], size: int) -> Generator[list[SendBuffer], None, None]:
    """Yield the same bytes in groups of ``size`` bytes; the last group may be smaller."""
    group: list[SendBuffer] = []
    room = size
    for buffer in pieces:
        piece = buffer if isinstance(buffer, Deferred) else memoryview(buffer)
        at, end = 0, len(piece)
        while at < end:
            stop = min(at + room, end)
            part = piece.part(at, stop) if isinstance(piece, Deferred) else piece[at:stop]
            group.append(part)
            at += len(part)
            room -= len(part)
            if not room:
                yield group
                group, room = [], size
    if group:
        yield group
