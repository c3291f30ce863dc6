"""A ring with at least one end on another node, as the supervisor uses it.

Rules
1. If neither end is on the parent's node, the parent has no memory of it: it has no descriptors here, and its counters
   are those that the agents report.
2. If one end is, the parent has that part of it, and its pump has the other end of this part.
3. The end of a dead worker on another node is closed by the agent there, when the ring is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from omni_actors.cluster.control import CloseRing
from omni_actors.cluster.remote_agent import RemoteAgent
from omni_actors.supervisor.nodes import LinkState
from ringbuf import Consumer, EndName, Producer, Ring, RingStatistics


class ClusterRing:
    """One ring. See ``supervisor.process.EdgeRing``.

    here: the part on the parent's node, if there is one. agents: the agent of each end that is on another node.
    on_close: called once, before the part on the parent's node is closed.
    """

    def __init__(
        self,
        generation: int,
        capacity: int,
        *,
        here: Ring | None,
        agents: Mapping[EndName, RemoteAgent],
        on_close: Callable[[], None],
    ) -> None:
        self._generation, self._capacity = generation, capacity
        self._here, self._agents, self._on_close = here, agents, on_close
        self._dead: EndName | None = None

    @property
    def fds(self) -> Sequence[int]:
        return () if self._here is None else self._here.fds

    def claim_producer(self) -> Producer:
        assert self._here is not None, "the client's ends are on the parent's node"
        return self._here.claim_producer()

    def claim_consumer(self) -> Consumer:
        assert self._here is not None, "the client's ends are on the parent's node"
        return self._here.claim_consumer()

    def close_end(self, end: EndName) -> None:
        if self._here is not None and end not in self._agents:
            self._here.close_end(end)
        else:
            self._dead = end

    def statistics(self) -> RingStatistics:
        if self._here is not None:
            return self._here.statistics()
        counters = (agent.statistics(self._generation) for agent in self._agents.values())
        return next((each for each in counters if each), RingStatistics(self._capacity, 0, 0, 0))

    def link(self, parent: str) -> LinkState:
        """Return the state of its link, if its ends are on two nodes. parent: the name of the parent's node."""
        nodes = [self._agents[end].node if end in self._agents else parent for end in ("producer", "consumer")]
        sent, arrived = self._counters("producer"), self._counters("consumer")
        return LinkState(
            from_node=nodes[0],
            to_node=nodes[1],
            messages=arrived.messages,
            payload_bytes=arrived.payload_bytes,
            waiting_bytes=sent.used,
        )

    def _counters(self, end: EndName) -> RingStatistics:
        """Return the counters of the part at one end. Those of another node are zero until it has reported some."""
        agent = self._agents.get(end)
        found = agent.statistics(self._generation) if agent is not None else None
        if agent is None and self._here is not None:
            found = self._here.statistics()
        return found or RingStatistics(self._capacity, 0, 0, 0)

    def close(self) -> None:
        self._on_close()
        for agent in dict.fromkeys(self._agents.values()):
            ends: list[EndName] = [end for end, each in self._agents.items() if each is agent]
            agent.post(CloseRing(self._generation, self._dead if self._dead in ends else None))
        if self._here is not None:
            self._here.close()
