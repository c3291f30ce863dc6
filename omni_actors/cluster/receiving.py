"""The end of a link on the consumer's node: records go from the socket to the ring's memory (rules in ``link``).

A read asks for the rest of the record under way, straight into its place in the ring, and in the same call for what
follows it: for the next header alone after a large record, else for up to READ_AHEAD bytes, which may be many small
records. Those pass the read-ahead buffer of this process.
"""

from __future__ import annotations

from typing import Final

from omni_actors.cluster.channel import Channel
from omni_actors.cluster.link import ALIVE, CLOSED, HEADER, READ_AHEAD, TURN_BYTES, Link, LinkBroken
from ringbuf import MessageTooLarge, Producer, RingClosed

_LARGE: Final = 32 << 10
"""The least payload bytes of a large record."""


class ReceivingLink(Link):
    """Carries records into a ring."""

    def __init__(self, link_id: int, producer: Producer) -> None:
        super().__init__(link_id)
        self._producer = producer
        self._ahead = memoryview(bytearray(READ_AHEAD))
        self._begin = self._stop = 0
        """Where in it bytes begin and stop that are not stored yet."""
        self._room: memoryview | None = None
        """The reservation that is being filled."""
        self._filled = 0
        self._kind = self._length = self._place = 0
        self._was_large = False
        self._discards = False
        """The consumer has closed the ring: what still arrives is dropped."""
        self._to_say = b""
        """Single bytes for the other node that the socket has not taken yet."""

    def open(self, channel: Channel) -> None:
        if channel.send([ALIVE]) is None:
            raise ConnectionError("a new connection takes no byte")
        super().open(channel)

    def bell(self) -> int:
        return self._producer.fileno()

    def step(self) -> bool:
        if self._to_say:
            try:
                self._say(b"")
            except OSError:
                if not self._discards:
                    raise
                self._end()  # as in ``_discard``
                return False
        moved = 0
        while True:
            if not self._discards and not self._store_ahead():
                return False
            if self.state != "open":
                return False
            if not self.readable or moved >= TURN_BYTES:
                return self.readable
            count = self._discard() if self._discards else self._fill()
            if count is None:
                return False
            if not count:
                if not self._discards:
                    raise LinkBroken("the other node closed the connection")
                self._end()
                return False
            moved += count

    def check_silence(self, sign_s: float) -> None:
        if not self._discards:
            self._say(b"" if self._to_say else ALIVE)

    def close(self) -> None:
        super().close()
        self._room = None
        self._producer.close()

    def _fill(self) -> int | None:
        """Receive into the reservation, and behind it into the read-ahead buffer. Returns as ``Channel.receive``."""
        window = HEADER.size if self._was_large else READ_AHEAD
        if self._room is None:
            at = self._stop
            count = self._receive([self._ahead[at:window]])
            self._stop += count or 0
            return count
        rest = self._room[self._filled :]
        count = self._receive([rest, self._ahead[:window]])
        if count is not None:
            self._filled += min(count, len(rest))
            self._begin, self._stop = 0, max(0, count - len(rest))
        rest.release()
        return count

    def _store_ahead(self) -> bool:
        """Move what was read ahead into the ring. Returns False when that has no room: the doorbell will ring."""
        try:
            while True:
                if self._room is None and not self._next_header():
                    return True
                if self._room is None and not self._reserve():
                    return False
                if not self._complete():
                    return True
        except RingClosed as error:
            if error.end == "producer":
                raise
            self._discards = True
            self._room = None
            self._producer.abandon()
            try:
                self._say(CLOSED)
            except OSError:  # the other side is gone; it has nothing to lose
                self._end()
                return False
            return True

    def _say(self, what: bytes) -> None:
        """Send single bytes back, as far as the socket takes them now; the rest later. ``CLOSED`` is the last one."""
        self._to_say += what
        while self._to_say and (sent := self.channel.send([self._to_say])) is not None:
            self._to_say = self._to_say[sent:]
        if self._discards and not self._to_say:
            self.channel.finish()

    def _next_header(self) -> bool:
        """Take a header that was read ahead, unless one waits for room. Returns False: there is none, or no more."""
        if self._kind:
            return True
        begin, end = self._begin, self._stop
        if end - begin < HEADER.size:
            if begin and end > begin:
                self._ahead[: end - begin] = bytes(self._ahead[begin:end])
            self._begin, self._stop = 0, end - begin
            return False
        first, self._place = HEADER.unpack_from(self._ahead, begin)
        self._begin = begin + HEADER.size
        if not first:
            self._producer.close()
            self._end()
            return False
        self._kind, self._length = first & 0xFF, first >> 8
        if not self._kind:
            raise LinkBroken(f"a record of kind 0 and {self._length} bytes")
        return True

    def _reserve(self) -> bool:
        while True:
            try:
                self._room = self._producer.try_reserve(self._length)
            except MessageTooLarge as error:
                raise LinkBroken(f"a record of {error.size} bytes, where the ring takes {error.limit}") from error
            if self._room is not None:
                self._filled = 0
                return True
            if self._producer.park():
                return False

    def _complete(self) -> bool:
        """Copy what was read ahead, and commit the record if it is complete. Returns whether it is."""
        room = self._room
        assert room is not None
        size = min(len(room) - self._filled, self._stop - self._begin)
        room[self._filled : self._filled + size] = self._ahead[self._begin : self._begin + size]
        self._filled += size
        self._begin += size
        if self._filled < len(room):
            return False
        self._commit(room)
        return True

    def _commit(self, room: memoryview) -> None:
        length = len(room)
        kind, self._kind, self._room = self._kind, 0, None
        try:
            self._producer.commit_record(kind, self._place)
        except ValueError as error:
            raise LinkBroken(str(error)) from error
        self.records += 1
        self.payload_bytes += length
        self._was_large = length >= _LARGE

    def _discard(self) -> int | None:
        try:
            return self._receive([self._ahead])
        except OSError:  # it has closed the connection, and nothing that it sent is missed
            return 0
