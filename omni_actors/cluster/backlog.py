"""How the parent knows how many control messages wait for a worker on another node.

Rules
1. The parent counts what it posts. The agent says how many of these messages the worker's mailbox has taken. The
   difference is never below what really waits, so the parent holds requests back before the mailbox is full.
2. The difference also has what is under way between the nodes, in both directions, and what the agent has not reported
   yet: below a ``REPORTS``-th of the capacity. Requests in flight fill a small part of half the capacity
   (``OmniSystem``), so a worker that keeps up is not taken for a congested one.
3. No I/O and no clock here. The simulation uses these classes, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

REPORTS: Final = 16
"""An agent reports each time that a mailbox has taken one part of its capacity, divided into this many parts."""


class Backlog:
    """The parent's count for one worker. capacity: how many messages may wait."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._posted = self._taken = 0

    @property
    def congested(self) -> bool:
        """Whether messages that may wait fill half of the capacity."""
        return 2 * self._waiting >= self.capacity

    @property
    def full(self) -> bool:
        """Whether no message may be posted."""
        return self._waiting >= self.capacity

    @property
    def _waiting(self) -> int:
        return self._posted - self._taken

    def on_posted(self) -> None:
        """One more message was posted."""
        self._posted += 1

    def on_taken(self, count: int) -> None:
        """Record the agent's report of how many messages the mailbox has taken since the worker's start."""
        self._taken = count


class BacklogReports:
    """The agent's side for one worker.

    capacity: of the worker's mailbox. waiting: returns how many messages wait there. report: tells the parent how many
    it has taken.
    """

    def __init__(self, capacity: int, *, waiting: Callable[[], int], report: Callable[[int], None]) -> None:
        self._step = max(1, capacity // REPORTS)
        self._waiting, self._report = waiting, report
        self._delivered = self._reported = 0

    def on_delivered(self) -> None:
        """One more message was posted to the mailbox, or dropped by it because the worker is gone."""
        self._delivered += 1
        self.on_taken()

    def on_taken(self) -> None:
        """The mailbox may have taken messages. Report it once they are enough."""
        taken = self._delivered - self._waiting()
        if taken - self._reported >= self._step:
            self._reported = taken
            self._report(taken)
