"""Continuous-batching scheduler: it decides which positions the next forward computes, of any kind of sequence.

Rules
1. A sequence waits for a row in order of priority, the lowest number first, and then of arrival. Then it has row i of
   the cache, where i is its index in ``rows``, until it leaves: no other sequence takes the row. A sequence may leave
   while it waits and while it has a row.
2. A step is some prefill chunks (``prefill_chunks``), then one decode forward for every sequence whose next position
   has its input (``decode_rows``). So a long prompt slows other sequences but never stops them, and a sequence that
   waits for input delays no other.
3. A prefill that has begun is continued before another one begins. Those that have not begun come in order of priority.
   So a sequence that has been computed is never kept waiting by later ones of a higher priority.
4. Sequences that are added together get rows together, are prefilled in the order in which they were added, decode in
   the same forwards, and leave together.
5. Each prompt is prefilled in a forward of its own, in chunks of ``prefill`` positions. Where the cuts fall depends on
   nothing else, not even on when the input arrives. So a sequence starts from the same numbers in any batch.

Chunked prefill follows Sarathi-Serve (Agrawal et al., 2024), iteration-level batching Orca (Yu et al., 2022).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from typing import Generic, TypeVar

from omni_actors.stages.autoregressive.cache import SlottedCache


class ScheduledSequence:
    """What the scheduler needs to know of one sequence. The engine keeps ``prefill_left`` and ``ready`` up to date."""

    prefill_left = 0
    """Prompt positions that are not computed yet, whether their input has arrived or not."""
    ready = 0
    """Positions that are not computed yet and whose input has arrived."""
    priority = 0
    """A lower number comes first."""
    arrival_order = 0
    has_begun = False
    """Whether a position was computed. Set by the scheduler, as ``arrival_order`` is."""
    others: Sequence[ScheduledSequence] = ()
    """The sequences that were added together with this one. Set by the scheduler."""

    @property
    def order(self) -> tuple[int, int]:
        """The sequence's place among those that wait."""
        return self.priority, self.arrival_order

    @property
    def group(self) -> Sequence[ScheduledSequence]:
        """The sequence and those that were added together with it."""
        return self, *self.others


S = TypeVar("S", bound=ScheduledSequence)


class Scheduler(Generic[S]):
    """The sequences of one engine and their rows in its cache.

    cache: the scheduler adds and removes its rows. max_rows: sequences that have a row at once. prefill: the positions
    of a prefill chunk, and roughly those that one step spends on prompts.
    """

    def __init__(self, cache: SlottedCache, max_rows: int, prefill: int) -> None:
        self.rows: list[S] = []
        self._waiting: list[S] = []
        """In the order in which they get rows."""
        self._cache, self._max_rows, self._prefill = cache, max_rows, prefill
        self._arrivals = count()

    @property
    def busy(self) -> bool:
        """Whether a step would compute a position."""
        return any(self._computable(sequence) for sequence in chain(self.rows, islice(self._waiting, self._admissible)))

    def add(self, *sequences: S) -> None:
        """Queue a sequence for a row, or several of one priority that are computed together, ``max_rows`` at most."""
        for sequence in sequences:
            sequence.arrival_order = next(self._arrivals)
            sequence.others = [each for each in sequences if each is not sequence]
            insort(self._waiting, sequence, key=lambda each: each.order)

    def remove(self, sequence: S) -> None:
        """Remove a sequence and those that were added with it; free their rows. Does nothing if it is unknown."""
        for each in sequence.group:
            if each in self.rows:
                row = self.rows.index(each)
                self._cache.remove_row(row)
                self.rows[row] = self.rows[-1]
                self.rows.pop()
            elif each in self._waiting:
                self._waiting.remove(each)
            each.others = ()

    def prefill_chunks(self) -> Iterator[tuple[int, int]]:
        """Yield one step's prefill chunks as (row, positions): at least one, and up to ``prefill`` positions in all.

        The engine computes each chunk, and updates the sequence's counts, before it asks for the next one.
        """
        spent = 0
        while (chunk := self.next_prefill_chunk()) and (not spent or spent + chunk[1] <= self._prefill):
            spent += chunk[1]
            for each in self.rows[chunk[0]].group:
                each.has_begun = True
            yield chunk

    def next_prefill_chunk(self) -> tuple[int, int] | None:
        """Give free rows to waiting sequences; return the first sequence's next chunk as (row, positions).

        None: the input of no whole chunk has arrived.
        """
        for _ in range(self._admissible):
            self.rows.append(self._waiting.pop(0))
            self._cache.add_row()
        ready = [row for row, sequence in enumerate(self.rows) if sequence.prefill_left and self._computable(sequence)]
        if not ready:
            return None
        row = min(ready, key=lambda row: (not self.rows[row].has_begun, self.rows[row].order))
        return row, self._computable(self.rows[row])

    def decode_rows(self) -> list[int]:
        """Return the rows, in increasing order, whose sequences have a position to decode."""
        return [row for row, each in enumerate(self.rows) if not each.prefill_left and self._computable(each)]

    @property
    def _admissible(self) -> int:
        """The sequences that wait and can get a row now."""
        free, found = self._max_rows - len(self.rows), 0
        while found < len(self._waiting) and (end := found + len(self._waiting[found].group)) <= free:
            found = end
        return found

    def _computable(self, sequence: S) -> int:
        """Return the positions of the sequence's next forward: a whole prefill chunk or 1; 0 if input is missing."""
        if not sequence.prefill_left:
            return int(all(each.ready and not each.prefill_left for each in sequence.group))
        wanted = min(sequence.prefill_left, self._prefill)
        return wanted if sequence.ready >= wanted else 0
