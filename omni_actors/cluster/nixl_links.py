"""Links that let the receiving end fetch large payloads with NIXL (``transfers``). All else travels as on any link.

The receiving end says CAN_FETCH when the link is open. The sending end answers with its offer, and the receiving end
with LOADED. From then on, a record of ``LEAST`` bytes or more may travel as a reference. On the wire (``link``):

    kind OFFER             the payload is what the other process needs to read from this one
    kind | BY_REFERENCE    the payload is a reference: 8 where the extent begins, 8 its stamp, 8 the record's length

Back comes FETCHED for each reference, in order, when its payload has arrived. A receiving end without NIXL never says
CAN_FETCH, so it gets no offer; a sending end without NIXL ignores CAN_FETCH.

Rule 1: records keep their order. While one is fetched, the receiving end does not read on.
Rule 2: a payload is copied in parts of TURN_BYTES, one in each step, so that other links have their turn.
Rule 3: a record travels by TCP when there is no outgoing memory for it now.
Rule 4: a fetch that fails is a loss (``LinkBroken``). One that takes too long ends NIXL on its node. Its time is
counted in checks, as that of silence is (``sending``): a time in which this process does not run counts as one check.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from omni_actors.cluster.channel import Address, Channel
from omni_actors.cluster.link import HEADER, TURN_BYTES, LinkBroken, LinkStatistics
from omni_actors.cluster.receiving import ReceivingLink
from omni_actors.cluster.sending import SendingLink
from omni_actors.cluster.transfers import MOST_OFFER, Fetch, Source, Staged, Transfers
from ringbuf import Consumer, Frame, Producer

LEAST: Final = 1 << 20
"""Payload bytes of the smallest record that is fetched."""
OFFER: Final = 0x40
BY_REFERENCE: Final = 0x80
CAN_FETCH: Final = b"\2"
LOADED: Final = b"\3"
FETCHED: Final = b"\4"
REFERENCE: Final = struct.Struct("<QQQ")


class _Copy(NamedTuple):
    """A record whose payload is being copied into outgoing memory."""

    kind: int
    place: int
    frame: Frame
    staged: Staged


class StagingLink(SendingLink):
    """Carries records out of a ring, the large ones by reference."""

    def __init__(self, link_id: int, consumer: Consumer, address: Address, transfers: Transfers) -> None:
        """Raises ValueError (no IP address)."""
        super().__init__(link_id, consumer, address)
        self._transfers = transfers
        self._has_offered = self._is_loaded = False
        self._copy: _Copy | None = None
        self._copied = 0
        self._staged: deque[Staged] = deque()
        """What the receiving end has not fetched yet, in order."""
        self.by_reference = 0

    def step(self) -> bool:
        if self._copy is not None:
            self._go_on_copying(self._copy)
        return super().step() or self._copy is not None

    def lose(self) -> None:
        super().lose()
        self._take_back()

    def close(self) -> None:
        self._take_back()
        super().close()

    def statistics(self) -> LinkStatistics:
        return super().statistics()._replace(by_reference=self.by_reference)

    def _end(self) -> None:
        super()._end()
        self._take_back()

    def _gather(self) -> bool:
        return bool(self._buffers) if self._copy is not None else super()._gather()

    def _append_record(self, kind: int, place: int, frame: Frame) -> int:
        length = len(frame.data)
        staged = self._transfers.stage(length) if self._is_loaded and length >= LEAST else None
        if staged is None:
            return super()._append_record(kind, place, frame)
        self.records += 1
        self.payload_bytes += length
        self.by_reference += 1
        self._copy, self._copied = _Copy(kind, place, frame, staged), 0
        return TURN_BYTES

    def _go_on_copying(self, copy: _Copy) -> None:
        begin, end = self._copied, min(self._copied + TURN_BYTES, len(copy.frame.data))
        with copy.frame.data[begin:end] as part:
            copy.staged.memory[begin:end] = part
        self._copied = end
        if end < len(copy.frame.data):
            return
        self._copy = None
        copy.frame.release()
        copy.staged.publish()
        self._staged.append(copy.staged)
        header = HEADER.pack(REFERENCE.size << 8 | copy.kind | BY_REFERENCE, copy.place)
        self._append(header + REFERENCE.pack(copy.staged.begin, copy.staged.stamp, end), None)

    def _note(self, said: bytes) -> None:
        for each in said:
            if each == CAN_FETCH[0] and self._transfers.is_up and not self._has_offered and not self._ending:
                self._has_offered = True
                offer = self._transfers.offer
                self._append(HEADER.pack(len(offer) << 8 | OFFER, 0) + offer, None)
            elif each == LOADED[0] and self._has_offered:
                self._is_loaded = True
            elif each == FETCHED[0]:
                if not self._staged:
                    raise LinkBroken("the other node says that it has fetched a record which it was not given")
                self._staged.popleft().release()

    def _take_back(self) -> None:
        """Take back what is staged, also from a READ that is under way."""
        if self._copy is not None:
            self._staged.append(self._copy.staged)
            self._copy.frame.release()
            self._copy = None
        while self._staged:
            self._staged.popleft().release()


class FetchingLink(ReceivingLink):
    """Carries records into a ring, and fetches those that come by reference. wake: makes the pump call ``step``."""

    def __init__(self, link_id: int, producer: Producer, transfers: Transfers, wake: Callable[[], None]) -> None:
        super().__init__(link_id, producer)
        self._transfers, self._wake = transfers, wake
        self._source: Source | None = None
        self._has_loaded = False
        self._reference: tuple[int, int, int] | None = None
        """The reference of the record that is being fetched."""
        self._target: memoryview | None = None
        """Its place in the ring, once there is one."""
        self._fetch: Fetch | None = None
        self._checks = 0
        """How many checks have found it not fetched yet."""
        self._copied = 0
        self.by_reference = 0

    def open(self, channel: Channel) -> None:
        super().open(channel)
        if self._transfers.is_up:
            self._say(CAN_FETCH)

    def step(self) -> bool:
        if self._source is not None and self._source.is_loaded and not self._has_loaded and not self._discards:
            self._has_loaded = True
            self._say(LOADED)
        more = super().step()
        if self._discards:
            self._give_up()
        return more or self._copied > 0

    def check_silence(self, sign_s: float) -> None:
        super().check_silence(sign_s)
        if self._target is not None and not self._copied:
            self._checks += 1
            # Two checks do not count: the first one comes early, and one may follow a standstill of this process.
            if (self._checks - 2) * sign_s >= self._transfers.read_s:
                self._transfers.give_up(f"nothing was fetched for {self._transfers.read_s:g} s")
            self._wake()  # there may be room by now

    def lose(self) -> None:
        super().lose()
        self._give_up()

    def close(self) -> None:
        self._give_up()
        super().close()

    def statistics(self) -> LinkStatistics:
        return super().statistics()._replace(by_reference=self.by_reference)

    def _end(self) -> None:
        super()._end()
        self._give_up()

    def _reserve(self) -> bool:
        if self._reference is not None:
            return self._go_on_fetching(self._reference)
        if self._kind < OFFER:
            return super()._reserve()
        if self._kind == OFFER:
            is_right = self._length <= MOST_OFFER and self._source is None
        else:
            is_right = self._length == REFERENCE.size and self._has_loaded and _is_reference(self._kind)
        if not is_right:
            raise LinkBroken(f"a record of kind {self._kind} and {self._length} bytes")
        self._room, self._filled = memoryview(bytearray(self._length)), 0
        return True

    def _complete(self) -> bool:
        return self._room is None or super()._complete()  # a fetched record is complete

    def _commit(self, room: memoryview) -> None:
        if self._kind < OFFER:
            super()._commit(room)
            return
        self._room = None
        if self._kind == OFFER:
            self._kind = 0
            self._source = self._transfers.load(bytes(room), self._wake)
        else:
            self._kind &= ~BY_REFERENCE
            self._reference = REFERENCE.unpack(room)
            self._length = self._reference[2]

    def _go_on_fetching(self, reference: tuple[int, int, int]) -> bool:
        """Reserve, fetch, copy, commit, as far as that goes now. Returns whether the record is in the ring."""
        assert self._source is not None
        if self._target is None:
            if not super()._reserve():
                return False
            self._target, self._room = self._room, None
            self._checks = 0
        if self._fetch is None:
            self._fetch = self._transfers.fetch(self._source, *reference, self._wake)
        if self._fetch is None or not self._fetch.is_over:
            return False
        if self._fetch.why:
            raise LinkBroken(self._fetch.why)
        assert self._target is not None
        if not self._copied:
            self._say(FETCHED)
        begin, end = self._copied, min(self._copied + TURN_BYTES, len(self._target))
        self._target[begin:end] = self._fetch.memory[begin:end]
        self._copied = end
        if end < len(self._target):
            return False
        target = self._target
        self._give_up_fetch()
        self.by_reference += 1
        super()._commit(target)
        return True

    def _give_up_fetch(self) -> None:
        """Forget the record that is being fetched. A READ that is under way goes on in incoming memory."""
        if self._fetch is not None:
            self._fetch.release()
        self._reference = self._target = self._fetch = None
        self._copied = 0

    def _give_up(self) -> None:
        self._give_up_fetch()
        if self._source is not None:
            self._transfers.drop(self._source)


def _is_reference(kind: int) -> bool:
    """Return whether a kind is that of a ring's record (``ringbuf``: WHOLE to LAST) by reference."""
    return BY_REFERENCE < kind <= BY_REFERENCE + 4
