"""The places of a running pipeline's workers, as nodes come and go.

Rules
1. A worker keeps its place over its restarts, as long as its node lives.
2. When a node is lost, all its workers are placed anew together, when the first of them is started again. So larger
   units get their places first, and a worker that was lost later does not take the place of one.
3. A place is kept until it is released: its replica was removed, sleeps, or was given up.
4. A worker without a place waits until something changes: a node joins or is lost, or a place is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio
from msgspec import structs

from omni_actors.cluster.placement import Node, Place, PlaceMap, first_workers, place, place_each
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
        self._unplaced = dict.fromkeys(first_workers(pipeline))
        """The workers without a place that will need one: those that have not begun, and those of lost nodes."""
        self._waiting = set[Address]()
        """The workers in ``wait_place`` for which there is no place."""
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, lost ones included."""
        return tuple(self._nodes.values())

    def of(self, address: Address) -> Place | None:
        """Return the place that a worker has, whether it runs or not; None if it has none."""
        return self._places.get(address)

    def would_help(self, node: Node) -> bool:
        """Return whether a node without workers would give one that waits a place if it were as ``node`` says."""
        if not self._waiting or any(at.node == node.name for at in self._places.values()):
            return False
        nodes = [node if each.name == node.name else each for each in self.nodes]
        found = place_each(self._pipeline, self._waiting, nodes, self._places)
        return any(not isinstance(at, NoPlace) and at.node == node.name for at in found.values())

    def plan(self) -> None:
        """Give all workers that the pipeline has at first their places together. Raises NoPlace."""
        self._take(place(self._pipeline, first_workers(self._pipeline), self.nodes, self._places))

    def find(self, address: Address) -> Place:
        """Return the place of a worker that is to be started; it is the same until its node is lost. Raises NoPlace.

        All workers without a place get theirs at the same time, those for which there is one.
        """
        if address not in self._places:
            found = place_each(self._pipeline, {address: None, **self._unplaced}, self.nodes, self._places)
            self._take({each: at for each, at in found.items() if not isinstance(at, NoPlace)})
            if isinstance(why := found[address], NoPlace):
                raise why
        return self._places[address]

    def _take(self, places: PlaceMap) -> None:
        self._places |= places
        for address in places:
            self._unplaced.pop(address, None)

    def release(self, address: Address) -> None:
        """Let others have the place of a worker that is not started again, unless ``find`` is called again."""
        self._places.pop(address, None)
        self._unplaced.pop(address, None)
        self._changed.unpark_all()

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> Place:
        """Return the place of a worker, as ``find`` does, as soon as there is one. It is no checkpoint if it has one.

        on_waiting: called with the reason, in words, each time that it waits.
        """
        while True:
            try:
                return self.find(address)
            except NoPlace as error:
                on_waiting(str(error))
            self._waiting.add(address)
            try:
                await self._changed.park()
            finally:
                self._waiting.discard(address)

    def join(self, node: Node) -> None:
        """Use a node from now on: a new one, or one that was lost and is back."""
        self._nodes[node.name] = node
        self._changed.unpark_all()

    def lose(self, name: str) -> None:
        """Start no worker on a node any more. The places there are lost; the caller ends the workers."""
        if name in self._nodes:  # else it has not joined
            self._nodes[name] = structs.replace(self._nodes[name], alive=False)
        for address in [address for address, at in self._places.items() if at.node == name]:
            del self._places[address]
            self._unplaced[address] = None
        self._changed.unpark_all()  # a reason changes; a worker that waits for a colocated one may move with it

    def forget(self, name: str) -> None:
        """Forget a lost node: it is not mentioned any more when a worker has no place."""
        self._nodes.pop(name, None)
