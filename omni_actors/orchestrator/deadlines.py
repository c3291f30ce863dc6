"""Ends requests at their deadlines, with one task for all of them.

Rules
1. A request is registered with its first deadline, and until ``remove``. Its deadline may move, both ways.
2. A deadline that has moved or was removed stays in the heap as a stale entry, which is skipped when its time comes.
   The heap is built anew when most of it is stale, so it has at most about twice as many entries as there are requests.
3. A trio cancel scope for each request would need a task for each, which costs more than all else here.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import trio

from omni_actors.orchestrator.request import Request

STALE = 64
"""Stale entries that the heap may have, however few requests there are."""


class Deadlines:
    """The deadlines of the open requests, on trio's clock."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[Request, tuple[float, int]] = {}
        self._requests: dict[int, Request] = {}
        """The request of each entry that is not stale."""
        self._heap: list[tuple[float, int]] = []
        self._moved = trio.lowlevel.ParkingLot()
        """Woken when the earliest deadline has become earlier."""

    def set(self, request: Request, deadline: float) -> None:
        """Register a request, or move its deadline."""
        before = self._entries.get(request)
        if before is not None:
            if before[0] == deadline:
                return
            del self._requests[before[1]]
        entry = self._entries[request] = deadline, next(self._numbers)
        self._requests[entry[1]] = request
        heapq.heappush(self._heap, entry)
        if self._heap[0] == entry:
            self._moved.unpark_all()
        elif len(self._heap) > 2 * len(self._entries) + STALE:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def remove(self, request: Request) -> None:
        """Forget a request. Does nothing to one that is not registered."""
        if (entry := self._entries.pop(request, None)) is not None:
            del self._requests[entry[1]]

    @trio.lowlevel.enable_ki_protection
    async def run(self, expire: Callable[[Request], None]) -> None:
        """Call ``expire`` for each request whose deadline has come, which is then forgotten; until cancelled."""
        while True:
            self._expire(trio.current_time(), expire)
            with trio.move_on_at(self._heap[0][0] if self._heap else float("inf")):
                await self._moved.park()

    def _expire(self, now: float, expire: Callable[[Request], None]) -> None:
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            if (request := self._requests.get(number)) is not None:
                self.remove(request)
                expire(request)
