"""The places of a running pipeline's workers, as nodes come and go.

Rules
1. A worker keeps its place over its restarts, as long as its node lives.
2. When a node is lost, its workers are placed anew, each when it is started again.
3. A place without a running worker (of a replica that was removed, or waits for its restart) is given away only if
   there is no other place.
4. A worker without a place waits until something changes: a node joins, or another worker ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import trio
from msgspec import structs

from omni_actors.cluster.placement import Node, Place, first_workers, place
from omni_actors.config import Pipeline
from omni_actors.errors import NoPlace
from omni_actors.protocol.messages import Address


class Placements:
    """Gives the workers of one pipeline their places.

    nodes: those of the cluster, in the order of preference between equals.
    """

    def __init__(self, pipeline: Pipeline, nodes: Iterable[Node]) -> None:
        self._pipeline = pipeline
        self._nodes = {node.name: node for node in nodes}
        self._places: dict[Address, Place] = {}
        self._unplaced = set(first_workers(pipeline))
        """The workers without a place that will need one: those that have not begun, and those of lost nodes."""
        self._running: set[Address] = set()
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, lost ones included."""
        return tuple(self._nodes.values())

    def of(self, address: Address) -> Place | None:
        """Return the place that a worker has, whether it runs or not; None if it has none."""
        return self._places.get(address)

    def plan(self) -> None:
        """Give all workers that the pipeline has at first their places together. Raises NoPlace."""
        self._places |= place(self._pipeline, first_workers(self._pipeline), self.nodes, self._places)
        self._unplaced -= self._places.keys()

    def find(self, address: Address) -> Place:
        """Return the place of a worker that is to be started; it is the same until its node is lost. Raises NoPlace.

        Colocated workers without a place get their places at the same time.
        """
        if address not in self._places:
            mates = self._mates(address, self._unplaced)
            try:
                found = place(self._pipeline, [address, *mates], self.nodes, self._places)
            except NoPlace:
                found = self._give_away(address)
            self._places |= found
            self._unplaced -= found.keys()
        return self._places[address]

    def _give_away(self, address: Address) -> dict[Address, Place]:
        """Find a place among those of workers that do not run, which lose theirs. Raises NoPlace."""
        running = {each: at for each, at in self._places.items() if each in self._running}
        idle = [each for each in (*self._places, *self._unplaced) if each not in self._running]
        mates = self._mates(address, idle)
        found = place(self._pipeline, [address, *mates], self.nodes, running)
        taken = {(each.stage, at.node, at.slot) for each, at in found.items()}
        for each in idle:
            at = self._places.get(each)
            if at is not None and (each.stage, at.node, at.slot) in taken:
                del self._places[each]
                self._unplaced.add(each)
        return found

    def _mates(self, address: Address, among: Collection[Address]) -> list[Address]:
        """Return the workers that are colocated with one, in the order of their stages."""
        groups = self._pipeline.cluster.colocate if self._pipeline.cluster is not None else ()
        group = next((each for each in groups if address.stage in each), ())
        mates = [Address(stage, address.replica) for stage in group if stage != address.stage]
        return [each for each in mates if each in among]

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> Place:
        """Return the place of a worker, as ``find`` does, as soon as there is one. It is no checkpoint if it has one.

        on_waiting: called with the reason, in words, each time that it waits.
        """
        while True:
            try:
                return self.find(address)
            except NoPlace as error:
                on_waiting(str(error))
            await self._changed.park()

    def started(self, address: Address) -> None:
        """Note that a worker runs at its place."""
        self._running.add(address)

    def ended(self, address: Address) -> None:
        """Note that nothing of a worker is left."""
        self._running.discard(address)
        self._changed.unpark_all()

    def join(self, node: Node) -> None:
        """Use a node from now on: a new one, or one that was lost and is back."""
        self._nodes[node.name] = node
        self._changed.unpark_all()

    def lose(self, name: str) -> None:
        """Start no worker on a node any more. The places there are lost; the caller ends the workers."""
        self._nodes[name] = structs.replace(self._nodes[name], alive=False)
        for address in [address for address, at in self._places.items() if at.node == name]:
            del self._places[address]
            self._unplaced.add(address)
