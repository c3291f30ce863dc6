"""The rings of an edge between two simulated workers on different nodes, and the link between the rings.

Rules
1. Each node has a ring of its own. The link carries records from the producer's ring to the consumer's, in order.
2. As ``supervisor.edges`` sees it, this is one ring: its ``close`` reaches the other nodes through the network.
3. A link that breaks ends for good. Records that are on their way are lost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

import trio

from omni_actors.protocol.messages import Address
from omni_actors.stress.simulation.network import Network
from omni_actors.supervisor.edges import InputEdge, receive_frames
from ringbuf import Consumer, EndName, Producer, Ring, RingStatistics

WINDOW = 8
"""The most records on their way: what the buffers of a TCP connection hold."""


class EdgeRings:
    """The rings of one edge, on one node or on two. ``run`` is the task of the link.

    nodes: of the producer and of the consumer. parent: the parent's node. send: sends a message to a node.
    """

    def __init__(
        self,
        ends: tuple[Address, Address],
        nodes: tuple[str, str],
        *,
        parent: str,
        capacity: int,
        generation: int,
        network: Network,
        send: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self.ends, self.nodes, self.generation = ends, nodes, generation
        self._parent, self._network, self._send = parent, network, send
        self.rings = {node: Ring.create(capacity, generation=generation) for node in dict.fromkeys(nodes)}
        self.is_closed = self.is_broken = False
        """Closed by the parent; ended by the network."""
        self._dead: EndName | None = None
        """The end whose worker is dead."""
        self._scope = trio.CancelScope()
        self._running = False
        self._to_close: list[Ring] = []
        self._arrived: deque[bytes] = deque()
        self._changed = trio.lowlevel.ParkingLot()
        self._on_the_way = 0

    @property
    def has_link(self) -> bool:
        return len(self.rings) == 2

    # as ``supervisor.edges`` sees it

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors of the ring on the parent's node; none if there is no such ring."""
        return self.rings[self._parent].fds if self._parent in self.rings else ()

    def claim_producer(self) -> Producer:
        """Claim the client's end."""
        return self.rings[self._parent].claim_producer()

    def claim_consumer(self) -> Consumer:
        """Claim the client's end."""
        return self.rings[self._parent].claim_consumer()

    def close_end(self, end: EndName) -> None:
        """Note that the worker of an end is dead. ``close`` closes the end."""
        self._dead = end

    def statistics(self) -> RingStatistics:
        return self.rings[self.nodes[0]].statistics()

    def close(self) -> None:
        """Close the ring on the parent's node now, and the others when the agents get to know."""
        self.is_closed = True
        for node in self.rings:
            if node == self._parent:
                self.close_at(node)
            else:
                self._send(node, partial(self.close_at, node))

    # on its nodes

    def descriptors_at(self, node: str) -> tuple[int, ...]:
        """Return copies of the descriptors of a node's ring; the caller closes them."""
        return tuple(os.dup(fd) for fd in self.rings[node].fds)

    def close_at(self, node: str) -> None:
        """Close a node's ring, and the dead worker's end of it, so that the other worker neither waits nor fills up."""
        ring = self.rings[node]
        if ring.closed or ring in self._to_close:
            return
        self._scope.cancel()
        self._to_close.append(ring)
        if not self._running:
            self._close_rings()

    def _close_rings(self) -> None:
        for ring in self._to_close:
            if self._dead is not None:
                ring.close_end(self._dead)
            ring.close()
        self._to_close.clear()

    def break_link(self) -> None:
        """End the link: both of its ends are closed."""
        self.is_broken = True
        self._scope.cancel()

    async def run(self) -> None:
        """Carry records until the link ends."""
        if self._scope.cancel_called:
            return
        self._running = True
        source, target = (self.rings[node] for node in self.nodes)
        consumer, producer = source.claim_consumer(), target.claim_producer()
        output = InputEdge(producer, lambda reason: None)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._put, output)
                    await self._take(consumer)
                    while self._on_the_way:
                        await self._changed.park()
                    nursery.cancel_scope.cancel()
        finally:
            self._running = False
            consumer.close()
            producer.close()
            self._close_rings()

    async def _take(self, consumer: Consumer) -> None:
        """Send the records of the producer's ring, until that is closed."""
        async with aclosing(receive_frames(consumer)) as frames:
            async for frame in frames:
                with frame:
                    record = bytes(frame.data)
                self._on_the_way += 1
                self._network.send(*self.nodes, partial(self._arrive, record), channel=self.generation)
                while self._on_the_way >= WINDOW:
                    await self._changed.park()

    def _arrive(self, record: bytes) -> None:
        self._arrived.append(record)
        self._changed.unpark_all()

    async def _put(self, output: InputEdge) -> None:
        """Put the records that arrive into the consumer's ring, and wait for room there."""
        while True:
            while not self._arrived:
                await self._changed.park()
            try:
                await output.send([memoryview(self._arrived.popleft())])
            except trio.ClosedResourceError:  # the consumer has closed its ring
                self._scope.cancel()
            self._on_the_way -= 1
            self._changed.unpark_all()
