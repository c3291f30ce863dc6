"""Journals: what resumable stages have decided for a request, so that a new incarnation can go on (``stages.base``).

Rules
1. A journal has one entry per chunk of its stage, from chunk 0 on. An entry is never changed.
2. The decisions travel in the chunk that they belong to. A stage also passes on, with its own next chunk, what it has
   received of journals upstream. So when the client has a chunk, the parent has every decision that the chunk depends
   on, whichever workers die.
3. The living stages downstream may have more chunks than the client. Before the stage starts again, all of them are
   asked for the entries that they have (``messages.Switch``). From then on they ignore what is left in the rings of
   dead workers, so none of them receives a decision that the parent does not have. A stage that has finished answers,
   too: its last chunks may still be in a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import ringbuf
from omni_actors.protocol.messages import Decided, Decisions

SLICE_DECISIONS = 10_000
"""The most decisions in one slice, at most 9 bytes each: below the largest control message. No entry has more
(``stages.base.MOST_DECISIONS``)."""


class JournalCorrupted(ringbuf.RingError):
    """Decisions are missing before those that a message or a chunk contains, or one output has too many."""


class Journal:
    """The decisions of one stage for one request."""

    def __init__(self) -> None:
        self.entries: list[Decisions] = []

    def add(self, decided: Decided) -> Decided | None:
        """Add entries; known ones are skipped. Return the new ones.

        Raises JournalCorrupted: one is missing, or fits into no control message. Nothing was added.
        """
        known = len(self.entries)
        if decided.first > known:
            raise JournalCorrupted(f"decisions of {decided.stage!r} from {decided.first} on, where {known} are known")
        new = decided.entries[known - decided.first :]
        if (longest := max(map(len, new), default=0)) > SLICE_DECISIONS:
            raise JournalCorrupted(f"an output of {decided.stage!r} has {longest} decisions")
        self.entries += new
        return Decided(decided.stage, known, new) if new else None


def slices(stage: str, first: int, entries: Sequence[Decisions]) -> Iterator[Decided]:
    """Cut entries, the first of which has number ``first``, so that each part fits into a control message."""
    begin = size = 0
    for end, entry in enumerate(entries):
        if size and size + len(entry) + 1 > SLICE_DECISIONS:
            yield Decided(stage, first + begin, tuple(entries[begin:end]))
            begin, size = end, 0
        size += len(entry) + 1
    if entries:
        yield Decided(stage, first + begin, tuple(entries[begin:]))
