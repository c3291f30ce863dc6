"""The rings of an agent: whole ones between its workers, and parts of those that have an end on another node.

Rules
1. The pump has the end of a ring whose worker is on another node. A link joins it with the other part of the ring.
2. A ring for which there is no memory is missing. A worker that is to be connected to it cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_actors.cluster.control import CloseRing, MakeRing
from omni_actors.cluster.pump import Pump
from ringbuf import Ring, RingStatistics


class AgentRings:
    """All rings of an agent, by generation. pump: carries records to and from other nodes."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._rings: dict[int, Ring] = {}
        self._missing: dict[int, str] = {}

    def make(self, order: MakeRing) -> None:
        """Make a ring, and begin its link. Raises PumpStopped."""
        number = order.generation
        try:
            ring = self._rings[number] = Ring.create(order.capacity, generation=number)
            if order.link == "in":
                self._pump.receive(number, ring.claim_producer())
            elif order.link is not None:
                self._pump.send(number, ring.claim_consumer(), order.link)
        except (OSError, MemoryError) as error:
            self.close(CloseRing(number, None))
            self._missing[number] = str(error) or "out of memory"

    def fds(self, generation: int) -> Sequence[int]:
        """Return the descriptors of a ring for ``Connect``. Raises OSError (there was no memory for it)."""
        if (why := self._missing.get(generation)) is not None:
            raise OSError(why)
        ring = self._rings.get(generation)
        if ring is None:
            raise OSError(f"ring {generation} is closed already")
        return ring.fds

    def close(self, order: CloseRing) -> None:
        """Close a ring, with the end of its dead worker. The end of a living worker gets RingClosed."""
        self._missing.pop(order.generation, None)
        if (ring := self._rings.pop(order.generation, None)) is not None:
            self._pump.close(order.generation)
            if order.dead is not None:
                ring.close_end(order.dead)
            ring.close()

    def close_all(self) -> None:
        """Close everything. Called when no worker is left."""
        for number in list(self._rings):
            self.close(CloseRing(number, None))

    def statistics(self) -> dict[int, RingStatistics]:
        """Return the counters of each ring."""
        return {number: ring.statistics() for number, ring in self._rings.items()}
