"""Which node each worker runs on: pure functions.

Rules
1. Colocated workers with the same number form a *unit*. All workers of a unit run on one node.
2. A node has room for a unit if it is alive, has the labels of all stages of the group, and has devices for one more
   worker of each stage of the unit.
3. ``devices`` are counted on each node by itself: the n-th worker of a stage on a node gets the devices that the n-th
   worker of the stage gets on one machine (``config/devices.py``). Different stages may use one device.
4. Among the nodes with room, the first difference decides: devices left for all workers of the group that may be added
   to units on the node; fewer workers of the same stage, for stages in ``spread``; fewer workers on the same devices;
   CPUs left for all threads; more rings to workers on the node (the client is on the parent's node); fewer devices of
   any kind; more CPUs left; the earlier place in the list.
5. Larger units are placed first. The workers of one unit are a subset of those of each larger unit of their group, so
   the order costs nothing: all workers get a place if there are places for all.
6. A worker that has a place keeps it. A unit of which some workers have places joins them.

CPUs are a preference, as on one machine: threads that exceed the CPUs of a node are slow, and they run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from omni_actors.config import Cluster, Pipeline, Stage
from omni_actors.config.devices import DeviceLayoutError, Layout, configured_devices, stage_layout
from omni_actors.errors import NoPlace
from omni_actors.protocol.messages import Address

PARENT = "parent"
"""The label of the parent's node."""


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node as placement sees it.

    Attributes:
        name: Its name, which is unique and is one of its labels.
        labels: Its further labels. The parent's node has the label "parent".
        cpus: How many CPUs its workers may use.
        gpus: How many CUDA devices it has.
        alive: Whether workers can be started there now.
    """

    name: str
    labels: tuple[str, ...] = ()
    cpus: Annotated[float, Meta(ge=0)] = 1.0
    gpus: Annotated[int, Meta(ge=0)] = 0
    alive: bool = True

    def has(self, label: str) -> bool:
        """Return whether the node has a label. Its name is one."""
        return label == self.name or label in self.labels


class Place(NamedTuple):
    """Where a worker runs.

    slot: its number among the workers of its stage on the node. devices: as in CUDA_VISIBLE_DEVICES there.
    """

    node: str
    slot: int
    devices: tuple[str, ...]


PlaceMap: TypeAlias = Mapping[Address, Place]


def first_workers(pipeline: Pipeline) -> list[Address]:
    """Return the addresses of all workers that a pipeline has at first, stage by stage.

    >>> from omni_actors import config
    >>> [str(each) for each in first_workers(config.load("echo", {"stages.first.replicas": 2}))]
    ['first.0', 'first.1', 'second.0']
    """
    return [Address(name, number) for name, stage in pipeline.stages.items() for number in range(stage.workers)]


def place(
    pipeline: Pipeline, wanted: Collection[Address], nodes: Sequence[Node], held: PlaceMap | None = None
) -> dict[Address, Place]:
    """Return a place for each wanted worker, by the rules above. The same arguments give the same places.

    Args:
        pipeline: The stages and their ``cluster`` section. Without one, every worker runs on the parent's node.
        wanted: The workers that need a place.
        nodes: All nodes. Their order decides between equals.
        held: The workers that have places already. Those on nodes that are not alive are ignored.

    Raises:
        NoPlace: No node has room for a unit; it has the reason of each node.

    >>> from omni_actors import config
    >>> echo = config.load("echo", {"cluster": {"nodes": {"second": "big"}}})
    >>> nodes = [Node(name="here", labels=("parent",)), Node(name="there", labels=("big",), cpus=8)]
    >>> {str(address): at.node for address, at in place(echo, first_workers(echo), nodes).items()}
    {'first.0': 'here', 'second.0': 'there'}
    """
    plan = _Plan(pipeline, nodes, held or {})
    for unit in plan.units(wanted):
        plan.place_unit(unit)
    return {address: plan.places[address] for address in wanted}


def may_leave_parent(pipeline: Pipeline, stage: str) -> bool:
    """Return whether workers of a stage may run on another node than the parent's, now or later.

    >>> from omni_actors import config
    >>> echo = config.load("echo", {"cluster": {"nodes": {"second": "parent"}}})
    >>> [name for name in echo.stages if may_leave_parent(echo, name)]
    ['first']
    """
    if (cluster := pipeline.cluster) is None:
        return False
    group = next((group for group in cluster.colocate if stage in group), (stage,))
    return all(cluster.nodes.get(name) != PARENT for name in group)


def place_each(
    pipeline: Pipeline, wanted: Collection[Address], nodes: Sequence[Node], held: PlaceMap
) -> dict[Address, Place | NoPlace]:
    """Return a place for each wanted worker as ``place`` does, or why there is none for its unit."""
    plan, refused = _Plan(pipeline, nodes, held), dict[Address, NoPlace]()
    for unit in plan.units(wanted):
        try:
            plan.place_unit(unit)
        except NoPlace as error:
            refused |= dict.fromkeys(unit, error)
    return {address: refused.get(address) or plan.places[address] for address in wanted}


Unit: TypeAlias = tuple[Address, ...]


class _Plan:
    """The places so far."""

    def __init__(self, pipeline: Pipeline, nodes: Sequence[Node], held: PlaceMap) -> None:
        self._pipeline, self._nodes = pipeline, nodes
        cluster = pipeline.cluster or Cluster(nodes=dict.fromkeys(pipeline.stages, PARENT))
        self._labels, self._spread = cluster.nodes, set(cluster.spread)
        self._group_of = {name: group for group in cluster.colocate for name in group}
        alive = {node.name for node in nodes if node.alive}
        self.places = {address: at for address, at in held.items() if at.node in alive}
        self._on = defaultdict[str, list[Address]](list)
        for address, at in self.places.items():
            self._on[at.node].append(address)

    def units(self, wanted: Iterable[Address]) -> list[Unit]:
        """Return the units of workers without a place: the largest first, then in the order of ``wanted``."""
        units = defaultdict[tuple[tuple[str, ...], int], list[Address]](list)
        for address in wanted:
            if address not in self.places:
                units[self._group(address), address.replica].append(address)
        return sorted((tuple(unit) for unit in units.values()), key=lambda unit: -len(unit))

    def _group(self, address: Address) -> tuple[str, ...]:
        return self._group_of.get(address.stage, (address.stage,))

    def place_unit(self, unit: Unit) -> None:
        """Give all workers of a unit places on the best node. Raises NoPlace."""
        mates = (Address(stage, unit[0].replica) for stage in self._group(unit[0]))
        pinned = next((self.places[mate].node for mate in mates if mate in self.places), None)
        reasons: dict[str, str] = {}
        found: list[tuple[Node, list[Place]]] = []
        for node in self._nodes:
            room = self._places_on(node, unit, pinned)
            if isinstance(room, str):
                reasons[node.name] = room
            else:
                found.append((node, room))
        if not found:
            raise NoPlace(unit[0].stage, unit[0].replica, reasons)
        node, places = min(found, key=lambda each: self._cost(unit, *each))  # the first of equals
        for address, at in zip(unit, places, strict=True):
            self.places[address] = at
            self._on[node.name].append(address)

    def _places_on(self, node: Node, unit: Unit, pinned: str | None) -> list[Place] | str:
        """Return the places of a unit on a node, or why it has no room."""
        if not node.alive:
            return "it is lost"
        if pinned not in (None, node.name):
            return f"a colocated worker is on {pinned!r}"
        for stage in self._group(unit[0]):
            label = self._labels.get(stage)
            if label is not None and not node.has(label):
                return f"it does not have the label {label!r}" + f" of {stage!r}" * (len(self._group(unit[0])) > 1)
        places = []
        for address in unit:
            at = self._place_on(node, address)
            if at is None:
                return f"it has no devices for another worker of {address.stage!r}"
            places.append(at)
        return places

    def _place_on(self, node: Node, address: Address) -> Place | None:
        """Return the place of a worker with the lowest free slot of its stage on a node; None: there are no devices."""
        stage = self._pipeline.stages[address.stage]
        taken = {self.places[each].slot for each in self._on[node.name] if each.stage == address.stage}
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        layout = self._layout(node, stage, slot + 1)
        return None if layout is None else Place(node.name, slot, layout[slot])

    def _layout(self, node: Node, stage: Stage, workers: int) -> Layout | None:
        """Return the devices on a node of so many workers of a stage; None: it has too few."""
        if not configured_devices(stage):
            return ((),) * workers
        if node.gpus < stage.devices_per_replica:  # names of devices are not checked by ``stage_layout``
            return None
        try:
            return stage_layout(stage, workers, [str(number) for number in range(node.gpus)])
        except DeviceLayoutError:
            return None

    def _cost(self, unit: Unit, node: Node, places: Sequence[Place]) -> tuple[float, ...]:
        """Return what a node costs a unit, by rule 4: the smallest is the best."""
        here = self._on[node.name]
        stages = Counter(address.stage for address in here)
        devices = {device for at in places for device in at.devices}
        shared = sum(not devices.isdisjoint(self.places[each].devices) for each in here)
        cpus_left = node.cpus - sum(self._threads(each) for each in (*here, *unit))
        return (
            self._crowds(unit, node),
            sum(stages[address.stage] for address in unit if address.stage in self._spread),
            shared,
            cpus_left < 0,
            -self._rings(unit, node, stages),
            node.gpus,
            -cpus_left,
        )

    def _crowds(self, unit: Unit, node: Node) -> bool:
        """Return whether a unit leaves too few devices on a node for the workers that may be added to units there."""
        group = self._group(unit[0])
        units = {each.replica for each in (*self._on[node.name], *unit) if each.stage in group}
        return any(self._layout(node, self._pipeline.stages[stage], len(units)) is None for stage in group)

    def _rings(self, unit: Unit, node: Node, stages: Mapping[str, int]) -> int:
        """Return how many rings would join the unit with the workers that are on the node, and with the client."""
        rings = 0
        for address in unit:
            stage = self._pipeline.stages[address.stage]
            consumers = (name for name, each in self._pipeline.stages.items() if address.stage in each.inputs)
            rings += sum(stages.get(name, 0) for name in (*stage.inputs, *consumers))
            if node.has(PARENT):
                rings += bool(stage.accepts) + (stage.emits is not None)
        return rings

    def _threads(self, address: Address) -> int:
        return self._pipeline.stages[address.stage].threads or 1
