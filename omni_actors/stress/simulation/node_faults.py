"""Ends nodes and cuts the network of a simulated cluster."""

from __future__ import annotations

import random
from functools import partial

import trio
from msgspec import structs

from omni_actors.cluster.placement import PARENT, Node
from omni_actors.config import Cluster, Pipeline
from omni_actors.stress.simulation.agent import LEASE_S
from omni_actors.stress.simulation.cluster import LINK_SILENT_S, SimulatedCluster
from omni_actors.stress.simulation.journal import Journal
from omni_actors.stress.simulation.network import Cut

ZONES = ("zone=a", "zone=b", "zone=c")
RARE, RARE_NODES = "rare", 3
"""A label that few nodes have, so that their loss leaves a stage without a place."""
DRIFT = 0.04
"""How much slower or faster than the parent's the clock of a node may run."""
CUT_S = (0.5, LEASE_S / 2, LEASE_S * 1.05, LINK_SILENT_S + 1, 60.0)
DOWN_S = (0.0, 12.0, 60.0)
DELAY_S = (0.0, 0.0, 0.001, 0.05)


def draw_nodes(draw: random.Random, count: int) -> list[Node]:
    """Return nodes of three zones with CPUs and GPUs; the first is the parent's."""
    nodes = [Node(name="n0", labels=(PARENT,), cpus=draw.choice((1, 4)))]
    rare = draw.sample(range(1, count), min(RARE_NODES, count - 1))
    for number in range(1, count):
        labels = (ZONES[number % len(ZONES)], *[RARE] * (number in rare))
        nodes.append(Node(name=f"n{number}", labels=labels, cpus=draw.choice((1, 2, 8)), gpus=draw.choice((0, 1, 2))))
    return nodes


def on_nodes(draw: random.Random, pipeline: Pipeline) -> Pipeline:
    """Return the pipeline as placement is to see it: with labels, colocated and spread stages, and devices."""
    names = list(pipeline.stages)
    labels = {name: draw.choice((*ZONES, RARE, RARE, PARENT)) for name in names if draw.random() < 0.4}
    colocate: tuple[tuple[str, ...], ...] = ()
    if draw.random() < 0.3:
        together = draw.sample(names, 2)
        labels = {name: label for name, label in labels.items() if name != together[1]}
        colocate = (tuple(together),) if labels.get(together[0]) != PARENT else ()
    spread = tuple(name for name in names if draw.random() < 0.4)
    stages = {
        name: structs.replace(stage, device="cuda" if labels.get(name) in ZONES and draw.random() < 0.5 else "cpu")
        for name, stage in pipeline.stages.items()
    }
    return structs.replace(pipeline, stages=stages, cluster=Cluster(nodes=labels, colocate=colocate, spread=spread))


class NodeFaults:
    """Draws the faults of nodes and of the network."""

    def __init__(self, draw: random.Random, journal: Journal, cluster: SimulatedCluster) -> None:
        self._draw, self._journal, self._cluster = draw, journal, cluster

    def _victims(self) -> list[str]:
        """One node, often one with workers, or all nodes with a label."""
        cluster = self._cluster
        busy = sorted({node for node in cluster.node_of.values() if node != cluster.parent})
        kind = self._draw.random()
        if busy and kind < 0.6:
            return [self._draw.choice(busy)]
        if kind < 0.7:
            return [self._draw.choice(list(cluster.agents))]
        label = self._draw.choice((*ZONES, RARE, RARE))
        return [node.name for node in cluster.placements.nodes if node.has(label)]

    def kill_agent(self) -> None:
        """SIGKILL of an agent. A new one is started when the node is fenced."""
        for node in self._victims()[:1]:
            if self._cluster.agents[node].alive:
                self._journal.injected("agent killed")
                self._journal.note(f"the agent of {node} is killed")
                self._cluster.agents[node].end()

    def lose_nodes(self) -> None:
        """Power off nodes for a time. Their peers notice it by silence, or by closed connections."""
        nodes, silent = self._victims(), self._draw.random() < 0.5
        down_s = self._draw.choice(DOWN_S)
        self._journal.injected("node lost, silently" if silent else "node lost")
        self._journal.note(f"{', '.join(nodes)} lost for {down_s:g} s, {silent=}")
        for node in nodes:
            self._cluster.down.add(node)
            if self._cluster.agents[node].alive:
                self._cluster.agents[node].end(silent=silent)
            self._cluster.network.after(down_s, partial(self._cluster.down.discard, node))

    def cut_off(self) -> None:
        """Cut nodes off from all others, in one direction or both."""
        how = self._draw.choice(("both ways", "into", "out of"))
        self._journal.injected(f"partition, {how}")
        self._cut(Cut(self._victims(), None, into=how != "out of", out=how != "into"))

    def cut_links(self) -> None:
        """Cut two nodes with workers off from each other; both still reach the parent."""
        busy = sorted({*self._cluster.node_of.values()})
        if len(busy) > 1:
            one, other = self._draw.sample(busy, 2)
            if self._cluster.parent not in (one, other):
                self._journal.injected("partition of two nodes")
                self._cut(Cut([one], [other], into=self._draw.random() < 0.7, out=self._draw.random() < 0.7))

    def _cut(self, cut: Cut) -> None:
        network, seconds = self._cluster.network, self._draw.choice(CUT_S)
        self._journal.note(f"{', '.join(cut.nodes)} cut off for {seconds:g} s at {trio.current_time():g}: {cut}")
        self._cluster.touch([*cut.nodes, *(cut.others or ())])
        network.cut(cut)
        network.after(seconds, partial(network.mend, cut))
        network.after(LINK_SILENT_S, partial(self._cluster.break_cut_links, cut))
