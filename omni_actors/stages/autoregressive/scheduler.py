"""Who is in the batch, and what the next forward brings on: continuous batching, of whatever is decoded.

Rules
1. A sequence waits for a row, in order of arrival; then it has row i of the cache, i its place in ``rows``. It may
   leave from both.
2. A step is some pieces of prompts (``prefill_chunks``), then one forward that brings on every sequence whose next
   position is ready. So a long prompt slows the others down, but never stops them, and a sequence that waits for
   input delays no other.
3. A prompt is prefilled by itself, in pieces of ``prefill`` positions whose cuts depend on nothing else, not even on
   when its input comes: alone or in company, a sequence starts from the same numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Generic, TypeVar

from omni_actors.stages.autoregressive.cache import SlottedCache

__all__ = ["Scheduler", "Sequence"]


class Sequence:
    """What a batch needs to know of one. An engine keeps both counts up to date."""

    prefill_left = 0
    """Positions of the prompt that the model has not seen, those included whose input has not come."""
    ready = 0
    """Positions whose input is here and that the model has not seen."""
    arrival_order = 0
    """In the order of arrival; the batch's own."""


S = TypeVar("S", bound=Sequence)


class Scheduler(Generic[S]):
    """The sequences of one engine and their rows in its cache."""

    def __init__(self, cache: SlottedCache, max_rows: int, prefill: int) -> None:
        self.rows: list[S] = []
        self._waiting: deque[S] = deque()
        self._cache, self._max_rows, self._prefill = cache, max_rows, prefill
        self._added = 0

    @property
    def busy(self) -> bool:
        """Whether a step would bring a sequence on."""
        room = self._max_rows - len(self.rows)
        return any(self._due(sequence) for sequence in chain(self.rows, islice(self._waiting, room)))

    def add(self, sequence: S) -> None:
        self._added += 1
        sequence.arrival_order = self._added
        self._waiting.append(sequence)

    def remove(self, sequence: S) -> None:
        """Free its row. Harmless for one that was never added, or is gone."""
        if sequence in self.rows:
            row = self.rows.index(sequence)
            self._cache.remove_row(row)
            self.rows[row] = self.rows[-1]
            self.rows.pop()
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def prefill_chunks(self) -> Iterator[tuple[int, int]]:
        """One step's pieces of prompts, a row and a number of positions each: up to ``prefill`` in all, one at least.

        Each is to be brought on before the next one is asked for.
        """
        spent = 0
        while (piece := self.next_prefill_chunk()) and (not spent or spent + piece[1] <= self._prefill):
            spent += piece[1]
            yield piece

    def next_prefill_chunk(self) -> tuple[int, int] | None:
        """Whose prompt comes next, its row and how many positions; None where no prompt has a whole piece."""
        while self._waiting and len(self.rows) < self._max_rows:
            self.rows.append(self._waiting.popleft())
            self._cache.add_row()
        due = [
            (sequence.arrival_order, row)
            for row, sequence in enumerate(self.rows)
            if sequence.prefill_left and self._due(sequence)
        ]
        if not due:
            return None
        _, row = min(due)
        return row, self._due(self.rows[row])

    def decode_rows(self) -> list[int]:
        """The rows that have one position to be decoded."""
        return [row for row, sequence in enumerate(self.rows) if not sequence.prefill_left and sequence.ready]

    def _due(self, sequence: S) -> int:
        """Positions that may be brought on now: a whole piece of the prompt, or one; 0 where input is missing."""
        due = min(sequence.prefill_left, self._prefill) or 1
        return due if sequence.ready >= due else 0
