"""The receiving end.

Rule 1: every header is checked before its payload is read. An invalid one raises RingCorrupted.
Rule 2: a frame's bytes are the consumer's until it is released. Frames are released in any order; space goes back in
order.
Rule 3: a message in fragments is put together in private memory, so that it may be larger than the ring. That memory
is kept for the next one: at most one message of it.
Rule 4: a frame is given back only when no array or view made from it is alive, because its bytes change afterwards.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from pickle import PickleBuffer
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringbuf._claim import Waiter
from ringbuf._errors import FrameBorrowed, FrameReleased, PeerDied, RingClosed, RingCorrupted
from ringbuf._producer import MAX_MESSAGE
from ringbuf._words import FIRST, LAST, PAD, PRODUCER, RECORD, WHOLE, ConsumerEnd, Segment


class FrameOwner(Protocol):
    """What a frame's bytes go back to."""

    def _released(self) -> None: ...


class Frame:
    """A message: a view of the ring or, if the message came in fragments, of private memory."""

    __slots__ = ("_base", "_data", "_end", "_owner")

    def __init__(self, base: memoryview, owner: FrameOwner, end: int) -> None:
        self._base: memoryview | None = base
        self._data: memoryview | None = None
        self._owner = owner
        self._end = end

    @property
    def data(self) -> memoryview:
        """The bytes, 64-byte aligned; writable, as they are the consumer's until ``release``, and unusable after it.

        What is made from it (a slice, ``np.frombuffer``, the arrays of a bundle's tensors) borrows the frame.
        Do not use ``np.ndarray(buffer=frame.data)``, nor ``torch.frombuffer(frame.data)`` of the whole view (a slice
        is fine): the frame cannot detect that they borrow it.
        Raises FrameReleased.
        """
        if self._data is None:
            if self._base is None:
                raise FrameReleased
            # An exporter of its own, so that whatever is made from ``data`` counts as an export of ``base`` alone.
            self._data = memoryview(PickleBuffer(self._base))
        return self._data

    def release(self) -> None:
        """Give the bytes back. Idempotent.

        Raises FrameBorrowed, and releases nothing, when a view made from the bytes is alive. Names for ``data`` itself
        and for tensors decoded from it do not count: using them afterwards raises.
        """
        base = self._base
        if base is None:
            return
        try:
            if self._data is not None:
                self._data.release()
                self._data = None
            base.release()
        except BufferError as error:
            raise FrameBorrowed("the frame") from error
        self._base = None
        self._owner._released()

    def __enter__(self) -> Frame:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except FrameBorrowed:
            if error is None:
                raise
            # The traceback keeps the locals of the calls that failed, and those keep their arrays.
            traceback.clear_frames(trace)
            try:
                self.release()
            except FrameBorrowed as borrowed:
                error.add_note(str(borrowed))  # by this function, which goes on with its error


class Record(NamedTuple):
    """A record as it lies in the ring: a whole message, or a fragment of one.

    kind, place: what ``Producer.commit_record`` takes. frame: its bytes, in the ring.
    """

    kind: int
    place: int
    frame: Frame


class Whole:
    """Private memory in which the fragments of a message are joined. total 0: a predecessor took its beginning."""

    __slots__ = ("_consumer", "_raw", "filled", "memory", "total")

    def __init__(self, total: int, consumer: Consumer) -> None:
        size = total + RECORD
        raw, consumer._spare = consumer._spare, None
        if raw is None or not size <= len(raw) <= 2 * size:
            raw = np.empty(size, np.uint8)  # the kernel allocates pages when they are written
        skip = -raw.__array_interface__["data"][0] % RECORD
        self.memory = raw.data[skip : skip + total]
        self.total, self.filled = total, 0
        self._raw, self._consumer = raw, consumer

    def _released(self) -> None:
        """Keep the memory for the next message of about this size: new pages cost as much as the copy into them."""
        self._consumer._spare = self._raw


class Consumer:
    """The reading end of a ring, made by ``Ring.claim_consumer``. Used by one thread at a time, with its frames."""

    def __init__(self, segment: Segment, end: ConsumerEnd, waiter: Waiter, fd: int) -> None:
        self._segment, self._end, self._waiter, self._fd = segment, end, waiter, fd
        self._data, self._capacity = segment.data, segment.capacity
        self._next = self._tail = end.position()
        self._unreleased: deque[Frame] = deque()
        self._spare: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        # A successor may begin inside a message whose first fragments its predecessor took.
        self._partial: Whole | None = Whole(0, self) if self._next else None
        self._closed = False

    def fileno(self) -> int:
        """The data doorbell: readable after ``park`` when there is something to receive."""
        return self._fd

    def try_recv(self) -> Frame | None:
        """Return the next message, or None if no whole message has arrived. Ends a ``park``.

        Raises RingClosed (the producer closed and all was received), RingCorrupted, MemoryError (a message in
        fragments for which there is no memory).
        """
        end = self._end
        if self._closed or end.parked:
            self._wake_up()
        while self._next != self._tail or self._load_tail():
            start = self._next
            kind, length, place, after = end.read_record(start, self._tail)
            if kind == WHOLE:
                self._partial = None
                return self._frame(start, length, after)
            whole = self._gather(start, kind, length, place)
            self._next = after
            self._reclaim(after)
            if whole is not None:
                return Frame(whole.memory, whole, after)
        return None

    def try_record(self) -> Record | None:
        """Return the next record, or None if none has arrived. Fragments are not joined. Ends a ``park``.

        For a program that passes records on to another ring (``Producer.commit_record``). Use either this or
        ``try_recv`` on a ring, not both. Raises RingClosed (the producer closed and all was received), RingCorrupted.
        """
        self._wake_up()
        while self._next != self._tail or self._load_tail():
            start = self._next
            kind, length, place, after = self._end.read_record(start, self._tail)
            if kind != PAD:
                return Record(kind, place, self._frame(start, length, after))
            self._skip(start, length)
            self._next = after
            self._reclaim(after)
        return None

    def recv(self, timeout: float | None = None, *, spin_s: float = 0.0) -> Frame:
        """Do as ``try_recv``, and block the thread until there is a message. timeout: seconds.

        spin_s: seconds to look again before sleeping. A producer whose consumer is awake need not wake it, which costs
        5 to 10 µs; in return, the consumer uses a core for so long each time the ring runs empty.
        Raises TimeoutError, PeerDied (and all that it had sent was received), and what ``try_recv`` raises.
        """
        if (frame := self.try_recv()) is not None:
            return frame
        begin = time.monotonic()
        awake_s = spin_s if timeout is None else min(spin_s, timeout)
        while time.monotonic() - begin < awake_s:
            if (frame := self.try_recv()) is not None:
                return frame
        deadline = None if timeout is None else begin + timeout
        late = False
        while (frame := self.try_recv()) is None:
            if late:
                raise TimeoutError(f"no message in the ring within {timeout:g} s")
            if not self.park():
                continue
            try:
                late = not self._waiter.wait(deadline)
            except PeerDied:
                # It may have died between publishing and ringing.
                if self.park():
                    self._end.unpark()
                    raise
        return frame

    def park(self) -> bool:
        """Announce sleep. Return True to wait until ``fileno()`` is readable, False if something has arrived already.

        A wake-up does not mean that a message is there: call ``try_recv``, and park again if it returns None.
        The doorbell does not report the producer's death: watch its process too. Raises RingClosed (closed here).
        """
        if self._closed:
            raise RingClosed("consumer")
        return self._end.park(self._next + 1)

    def close(self) -> None:
        """Stop reading: the producer gets RingClosed. Frames in the ring are released. Idempotent.

        Raises FrameBorrowed.
        """
        if self._closed:
            return
        for frame in tuple(self._unreleased):
            frame.release()
        self._closed = True
        self._partial = self._spare = None
        self._end.close()
        self._waiter.close()

    def _wake_up(self) -> None:
        """End a ``park``. Raises RingClosed (closed here)."""
        if self._closed:
            raise RingClosed("consumer")
        if self._end.parked:
            self._end.unpark()

    def _frame(self, start: int, length: int, after: int) -> Frame:
        """Return the record at ``start`` as a frame. The next record is the one at ``after``."""
        at = start % self._capacity + RECORD
        frame = Frame(self._data[at : at + length], self, after)
        self._unreleased.append(frame)
        self._next = after
        return frame

    def _load_tail(self) -> bool:
        """Return whether more has arrived. Raises RingClosed, RingCorrupted."""
        end, following = self._end, self._next
        tail = end.peer_position()
        if tail == following:
            if not end.peer_closed():
                return False
            tail = end.peer_position()
            if tail == following:
                self._partial = None
                raise RingClosed("producer")
        if not following < tail <= following + self._capacity:
            why = f"the tail left [{following}, {following + self._capacity}]"
            raise RingCorrupted(8 * PRODUCER.position, (tail,), why)
        self._tail = tail
        return True

    def _gather(self, start: int, kind: int, length: int, place: int) -> Whole | None:
        """Add a fragment, or skip padding. Return the message if it is whole."""
        if kind == PAD:
            self._skip(start, length)
            return None
        partial = self._partial
        if kind == FIRST:
            if not length < place <= MAX_MESSAGE:
                raise self._segment.corrupted(start, "the first fragment of a message of impossible size")
            partial = self._partial = Whole(place, self)
            filled = 0
        elif partial is not None and not partial.total:
            if kind == LAST:
                self._partial = None
            return None
        else:
            if partial is None or place != partial.filled or place + length > partial.total:
                raise self._segment.corrupted(start, "a fragment that continues nothing")
            if (kind == LAST) != (place + length == partial.total):
                raise self._segment.corrupted(start, "a last fragment that is not the last")
            filled = place
        at = start % self._capacity + RECORD
        partial.memory[filled : filled + length] = self._data[at : at + length]
        partial.filled = filled + length
        if kind != LAST:
            return None
        self._partial = None
        return partial

    def _skip(self, start: int, length: int) -> None:
        """Check padding. Raises RingCorrupted."""
        if (start + RECORD + length) % self._capacity:
            raise self._segment.corrupted(start, "padding that ends before the data area does")

    def _reclaim(self, after: int) -> None:
        """Give back space that no frame uses: at once, or with the frame before it."""
        if self._unreleased:
            self._unreleased[-1]._end = after
        else:
            self._end.publish(after)

    def _released(self) -> None:
        frames = self._unreleased
        after = 0
        while frames and frames[0]._base is None:
            after = frames.popleft()._end
        if after:
            self._end.publish(after)
