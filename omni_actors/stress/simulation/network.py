"""The network between simulated nodes, in virtual time.

Rules
1. Messages of one channel from one node to another arrive in order, ``delay_s`` after they were sent.
2. A cut holds back what is sent in the directions that it blocks. When it is mended, all of that arrives, as TCP
   transmits again: a connection that neither side gives up loses nothing.
3. What is on its way when a cut begins arrives.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import trio

Act: TypeAlias = Callable[[], object]
Path: TypeAlias = tuple[str, str, int]
"""From a node, to a node, by a channel."""

CONTROL = 0
"""The channel of control messages. A link has the generation of its ring."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Blocks messages between ``nodes`` and ``others``; None: all other nodes.

    into, out: whether it blocks messages to, and from, ``nodes``.
    """

    nodes: Collection[str]
    others: Collection[str] | None
    into: bool
    out: bool

    def blocks(self, source: str, target: str) -> bool:
        return (self.out and self._between(source, target)) or (self.into and self._between(target, source))

    def touches(self, node: str) -> bool:
        """Return whether it may block messages between this node and any other one."""
        return node in self.nodes or self.others is None or node in self.others

    def _between(self, inner: str, outer: str) -> bool:
        return inner in self.nodes and (outer not in self.nodes if self.others is None else outer in self.others)


class Network:
    """Delivers messages and calls functions at their times. ``run`` is its task."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Act]] = []
        self._changed = trio.lowlevel.ParkingLot()
        self._held: defaultdict[Path, list[Act]] = defaultdict(list)
        """What cuts hold back."""
        self.cuts: list[Cut] = []

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with trio.CancelScope() as waiting:
                if self._events:
                    waiting.deadline = self._events[0][0]
                await self._changed.park()
            while self._events and self._events[0][0] <= trio.current_time():
                heapq.heappop(self._events)[2]()

    def after(self, seconds: float, act: Act) -> None:
        """Call a function later."""
        event = (trio.current_time() + seconds, next(self._numbers), act)
        heapq.heappush(self._events, event)
        if self._events[0] is event:
            self._changed.unpark_all()

    def send(self, source: str, target: str, deliver: Act, channel: int = CONTROL) -> None:
        """Send a message: call ``deliver`` when it arrives."""
        if self.is_open(source, target):
            self.after(self._delay_s, deliver)
        else:
            self._held[source, target, channel].append(deliver)

    def is_open(self, source: str, target: str) -> bool:
        """Return whether messages from one node reach another one now."""
        return not any(cut.blocks(source, target) for cut in self.cuts)

    def cut(self, cut: Cut) -> None:
        """Begin a cut."""
        self.cuts.append(cut)

    def mend(self, cut: Cut) -> None:
        """End a cut."""
        self.cuts.remove(cut)
        for path in [path for path in self._held if self.is_open(path[0], path[1])]:
            for deliver in self._held.pop(path):
                self.after(self._delay_s, deliver)
