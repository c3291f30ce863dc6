"""A request's input: what has arrived of it, and how far each stage was sent it.

Rules
1. The pieces that are there from the beginning come first, kind by kind; then live input, in the order of its arrival.
   A stage is sent the pieces of its kinds in this order, from the first one on each time it starts.
2. A stage that takes live input is sent an empty piece at the end. So no piece waits for the next one to show that it
   is not the last, and a replay sends the same chunks.
3. A segment is read when every stage that the input enters was sent all that has arrived. So a full ring, a stage that
   starts again, and a request that waits for a replica hold the iterator back.
4. Live input is retained for a replay, up to ``limits.retain_bytes`` for one request and
   ``limits.worker_retain_bytes`` for all. Beyond that, what every stage was sent is evicted, for good; but nothing
   while a stage starts again, which lacks all of it.
5. No I/O here, and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import trio

from omni_actors.config import Limits
from omni_actors.orchestrator.pieces import Input, Inputs, Segments

_END = ""
"""The kind of the empty piece that ends live input."""
_END_PIECE = Input({})


@dataclass
class RetainedInput:
    """The live input that all requests retain, in bytes, and the bounds of what is retained."""

    limits: Limits
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class Cursor:
    """How far one incarnation was sent the input."""

    position: int = 0
    """The number of pieces, of any kind, that it has or that are not for it."""
    sent: int = 0
    """The number of pieces that it was sent."""


class RequestInput:
    """The input of one request.

    Args:
        inputs: The pieces, or the live input, by kind.
        entries: For each stage that the client feeds, the kinds of input that it gets.
    """

    def __init__(self, inputs: Inputs, entries: Mapping[str, Sequence[str]]) -> None:
        self._entries = entries
        self.segments: dict[str, Segments] = {}
        """The live input, by kind."""
        self.fixed: dict[str, Sequence[Input]] = {}
        """The pieces that are there from the beginning, by kind; empty when they are not needed any more."""
        for kind, given in inputs.items():
            if isinstance(given, Segments):
                self.segments[kind], self.fixed[kind] = given, given.first
            else:
                self.fixed[kind] = given
        self._log = [(kind, piece, 0) for kind in sorted(self.fixed) for piece in self.fixed[kind]]
        """Kind, piece, and the bytes that are retained of it: 0 if the caller has it anyway."""
        self._counts: dict[str, int] = {}
        """How many pieces are for each stage from the beginning."""
        self._cursors: dict[str, Cursor] = {}
        for stage, kinds in entries.items():
            self._counts[stage] = sum([len(self.fixed.get(kind, ())) for kind in kinds])
            self._cursors[stage] = Cursor()
        self._dropped = 0
        """The number of pieces that were at the beginning of ``_log`` and are not kept any more."""
        self._arriving = set(self.segments)
        """The kinds of live input that have not ended."""
        self.live_arrived = False
        """Whether some live input has arrived."""
        self._retained = 0
        """The sum of the bytes in ``_log``."""
        self.evicting: str | None = None
        """Why pieces of live input are not kept for a replay, once a bound is exceeded."""
        self._due = dict[str, None]()
        """The stages that may lack pieces that have arrived."""
        self._reading = {kind: trio.CancelScope() for kind in self.segments}
        self._sent = trio.lowlevel.ParkingLot() if self.segments else None
        """Where ``wait_sent`` waits; None without live input, which alone is waited for."""

    # Arrival

    def append(self, kind: str, piece: Input, size: int, all_retained: RetainedInput) -> None:
        """Add a piece of live input that has arrived. size: in bytes."""
        self.live_arrived = True
        self._log.append((kind, piece, size))
        self._retained += size
        all_retained.nbytes += size
        self.make_due(stage for stage, kinds in self._entries.items() if kind in kinds)
        limits, most = all_retained.limits, all_retained.limits.worker_retain_bytes
        if self.evicting is not None:
            return
        if self._retained > limits.retain_bytes:
            self.evicting = f"more than {limits.retain_bytes} bytes of its input have arrived (limits.retain_bytes)"
        elif all_retained.nbytes > most:
            self.evicting = f"the input of all requests exceeds {most} bytes (limits.worker_retain_bytes)"

    def end(self, kind: str) -> None:
        """Record that live input of a kind has ended."""
        self._arriving.discard(kind)
        if not self._arriving:
            self._log.append((_END, _END_PIECE, 0))
            self.make_due(stage for stage in self._entries if self._is_live(stage))

    def reading(self, kind: str) -> trio.CancelScope:
        """Return what surrounds the reading of live input. ``close`` cancels it."""
        return self._reading[kind]

    # Sending

    def make_due(self, stages: Iterable[str]) -> None:
        """Note that these stages may lack pieces."""
        self._due.update(dict.fromkeys(stages))

    def restart(self, stage: str) -> None:
        """Note that a stage starts again, and lacks all of its input."""
        self._cursors[stage] = Cursor()
        self.make_due([stage])

    @property
    def due(self) -> Sequence[str]:
        """The stages that may lack pieces."""
        return tuple(self._due)

    def take_due(self, stage: str) -> None:
        """Take a stage off ``due``, if it is there."""
        self._due.pop(stage, None)

    def cursor(self, stage: str) -> Cursor:
        """Return how far the stage's incarnation was sent the input. Another one begins when the stage starts again."""
        return self._cursors[stage]

    def next_piece(self, stage: str) -> tuple[Input, bool] | None:
        """Return the next piece that a stage lacks and whether it is its last; None if no more has arrived."""
        cursor, kinds = self._cursors[stage], self._entries[stage]
        is_live = self._is_live(stage)
        while 0 <= (index := cursor.position - self._dropped) < len(self._log):
            kind, piece, _ = self._log[index]
            if kind in kinds:
                return piece, not is_live and cursor.sent + 1 == self._counts[stage]
            if kind == _END and is_live:
                return piece, True
            cursor.position += 1
        return None

    @property
    def all_sent(self) -> bool:
        """Whether no stage is being sent pieces, or is to be."""
        return not self._due

    async def wait_sent(self) -> None:
        """Wait until something was sent, or ``recheck`` was called."""
        assert self._sent is not None, "some input is live"
        await self._sent.park()

    def recheck(self) -> None:
        """Let those that ``wait_sent`` look again: another stage may need input now, or a stage may need it no more."""
        if self._sent:
            self._sent.unpark_all()

    # Memory

    def drop_sent(self, stages: Iterable[str], all_retained: RetainedInput) -> bool:
        """Drop the pieces that each of ``stages`` was sent. Return whether some are not kept any more."""
        least = min((self._cursors[stage].position for stage in stages), default=0)
        if least > self._dropped:
            self._drop(least - self._dropped, all_retained)
        return self._dropped > 0

    def close(self, all_retained: RetainedInput) -> None:
        """Send nothing more and read nothing more. The iterators are closed; nothing is kept."""
        self._due.clear()
        self._drop(len(self._log), all_retained)
        for scope in self._reading.values():
            scope.cancel()

    def _drop(self, count: int, all_retained: RetainedInput) -> None:
        freed = sum(size for *_, size in self._log[:count])
        del self._log[:count]
        self._dropped += count
        self._retained -= freed
        all_retained.nbytes -= freed
        if not self._log:
            self.fixed = {}

    def _is_live(self, stage: str) -> bool:
        return bool(self.segments) and any(kind in self.segments for kind in self._entries[stage])
