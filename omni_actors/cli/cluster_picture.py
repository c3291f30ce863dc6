"""On which nodes the workers of a pipeline would run, as a picture in the terminal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console, Group, RenderableType
from rich.tree import Tree

from omni_actors.cluster.placement import PARENT, Node, PlaceMap, first_workers, place
from omni_actors.config import Pipeline
from omni_actors.config.document import Loader
from omni_actors.errors import ConfigError
from omni_actors.protocol.messages import CLIENT, CLIENT_ADDRESS, Address

NODES_EXAMPLE = "a list of nodes, such as: [{name: here, cpus: 8}, {name: g1, labels: [role=gpu], cpus: 32, gpus: 2}]"


def read_nodes(path: Path) -> list[Node]:
    """Read a YAML file that lists nodes; the first one gets the label of the parent's node. Raises ConfigError."""
    try:
        nodes = msgspec.convert(yaml.load(path.read_text(encoding="utf-8"), Loader), list[Node])
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        raise ConfigError(str(path), "(document)", " ".join(str(error).split()), NODES_EXAMPLE) from error
    names = [node.name for node in nodes]
    if not nodes or len({*names}) < len(names):
        raise ConfigError(str(path), "(document)", names, "at least one node, and each name once")
    first, *others = nodes
    if any(node.has(PARENT) for node in nodes):
        raise ConfigError(str(path), "(document)", PARENT, "other names and labels: the first node gets this label")
    return [msgspec.structs.replace(first, labels=(PARENT, *first.labels)), *others]


def placement_rows(pipeline: Pipeline, nodes: list[Node]) -> list[dict[str, Any]]:
    """Return the node and the devices of each worker, as plain data. Raises NoPlace."""
    places = place(pipeline, first_workers(pipeline), nodes)
    return [
        {"worker": str(address), "node": at.node, "devices": [f"cuda:{device}" for device in at.devices]}
        for address, at in places.items()
    ]


def print_picture(pipeline: Pipeline, nodes: list[Node]) -> None:
    """Print each node with its workers, and the links between the nodes. Raises NoPlace."""
    places = place(pipeline, first_workers(pipeline), nodes)
    parts: list[RenderableType] = []
    for node in nodes:
        workers = [(address, at) for address, at in places.items() if at.node == node.name]
        if not workers and not node.has(PARENT):
            continue
        tree = Tree(_title(node))
        for address, at in workers:
            tree.add("  ".join([str(address), *(f"cuda:{device}" for device in at.devices)]))
        if node.has(PARENT):
            tree.add("client (the parent process)")
        parts.append(tree)
    if empty := len(nodes) - len(parts):
        parts.append(f"{empty} node{'s' * (empty != 1)} without workers")
    if links := _links(pipeline, nodes, places):
        tree = Tree("links between nodes")
        for (producer, source, consumer, target), count in links.items():
            tree.add(f"{producer} on {source} → {consumer} on {target}" + f"  × {count}" * (count > 1))
        parts.append(tree)
    Console(markup=False, highlight=False, soft_wrap=True).print(Group(*parts))


def _title(node: Node) -> str:
    sizes = f"{node.cpus:g} CPU{'s' * (node.cpus != 1)}"
    if node.gpus:
        sizes += f", {node.gpus} GPU{'s' * (node.gpus != 1)}"
    return f"{node.name}  ({', '.join([*node.labels, sizes])})"


def _links(pipeline: Pipeline, nodes: list[Node], places: PlaceMap) -> Counter[tuple[str, str, str, str]]:
    """Count the links, by the stages and the nodes of both ends."""
    node_of = {address: at.node for address, at in places.items()}
    node_of[CLIENT_ADDRESS] = next(node.name for node in nodes if node.has(PARENT))
    links: Counter[tuple[str, str, str, str]] = Counter()
    for name, stage in pipeline.stages.items():
        edges = [(source, name) for source in (*stage.inputs, *[CLIENT] * bool(stage.accepts))]
        edges += [(name, CLIENT)] * (stage.emits is not None)
        for producer, consumer in edges:
            for source in _workers(producer, places):
                for target in _workers(consumer, places):
                    if node_of[source] != node_of[target]:
                        links[producer, node_of[source], consumer, node_of[target]] += 1
    return links


def _workers(stage: str, places: PlaceMap) -> list[Address]:
    return [CLIENT_ADDRESS] if stage == CLIENT else [address for address in places if address.stage == stage]
