"""Finds the route of a request: a pure function of the stage graph.

A stage takes part in a request if a kind of input that the request brings reaches the stage, directly or through other
stages, and if the stage reaches a modality that the request asks for. So one graph serves written questions, spoken
questions and texts to be read aloud: they enter and leave at different stages and share the stages between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from graphlib import TopologicalSorter

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.messages import CLIENT
from omni_actors.stage_graph import downstream_stages


@dataclass(frozen=True)
class Node:
    """A stage of the graph."""

    accepts: tuple[str, ...] = ()
    """The kinds of input that it takes from clients."""
    inputs: tuple[str, ...] = ()
    """The stages that feed it."""
    emits: str | None = None
    """The modality that it sends to clients; None if it sends them nothing."""


@dataclass(frozen=True)
class Route:
    """The stages that one request uses."""

    stages: tuple[str, ...]
    """In topological order, upstream first."""
    sources: Mapping[str, tuple[str, ...]]
    """For each stage, what feeds it: ``CLIENT`` and stages."""
    targets: Mapping[str, tuple[str, ...]]
    """For each stage, what it feeds: ``CLIENT`` and stages."""
    entries: Mapping[str, tuple[str, ...]]
    """For each stage that the client feeds, the kinds of input that it gets."""

    def downstream_of(self, stages: Iterable[str]) -> tuple[str, ...]:
        """Return the stages that one of ``stages`` feeds, directly or through others, in topological order."""
        return downstream_stages(stages, self.sources)

    def upstream_of(self, stage: str) -> tuple[str, ...]:
        """Return the stages that feed ``stage``, directly or through others, in topological order."""
        return tuple(each for each in self.stages if stage in self.downstream_of([each]))


def topological(nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """Return the names of the stages, upstream first. Raises graphlib.CycleError."""
    return tuple(TopologicalSorter({name: node.inputs for name, node in nodes.items()}).static_order())


def plan(nodes: Mapping[str, Node], kinds: Iterable[str], modalities: Iterable[str]) -> Route:
    """Return the route of a request.

    nodes: the stage graph.
    kinds: the kinds of input that the request brings.
    modalities: the modalities that it asks for.

    Raises InvalidRequest if a kind or modality is unknown, if a kind reaches no modality that is asked for, or if a
    modality is reached from no kind that is brought.
    """
    kinds, modalities = frozenset(kinds), frozenset(modalities)
    order = topological(nodes)
    _require_known(kinds, {kind for node in nodes.values() for kind in node.accepts}, "input")
    _require_known(modalities, {node.emits for node in nodes.values() if node.emits}, "modalities")
    reached = _reached(nodes, kinds)
    needed: set[str] = set()
    for name in reversed(order):
        if nodes[name].emits in modalities or any(name in nodes[target].inputs for target in needed):
            needed.add(name)
    stages = tuple(name for name in order if name in reached and name in needed)
    entries = {name: tuple(sorted(kinds & set(nodes[name].accepts))) for name in stages}
    entries = {name: accepted for name, accepted in entries.items() if accepted}
    unused = kinds - {kind for accepted in entries.values() for kind in accepted}
    unmet = modalities - {nodes[name].emits for name in stages}
    if unused or unmet:
        raise InvalidRequest(
            f"no route from input {_words(unused or kinds)} to output {_words(unmet or modalities)}", param="modalities"
        )
    downstream = {name: [target for target in stages if name in nodes[target].inputs] for name in stages}
    sources = {name: _ends(name in entries, nodes[name].inputs, stages) for name in stages}
    targets = {name: _ends(nodes[name].emits in modalities, downstream[name], stages) for name in stages}
    return Route(stages=stages, sources=sources, targets=targets, entries=entries)


def reachable(nodes: Mapping[str, Node], kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the modalities that input of one of these kinds leads to, upstream first."""
    return tuple(modality for name in _reached(nodes, kinds) if (modality := nodes[name].emits))


def _reached(nodes: Mapping[str, Node], kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the stages that input of one of these kinds reaches, upstream first."""
    kinds, reached = frozenset(kinds), list[str]()
    for name in topological(nodes):
        if not kinds.isdisjoint(nodes[name].accepts) or not set(reached).isdisjoint(nodes[name].inputs):
            reached.append(name)
    return tuple(reached)


def routes_of(nodes: Mapping[str, Node]) -> Iterator[Route]:
    """Yield the route from each kind of input alone to each modality alone, where one exists."""
    for kind in {kind for node in nodes.values() for kind in node.accepts}:
        for modality in {node.emits for node in nodes.values() if node.emits}:
            with suppress(InvalidRequest):
                yield plan(nodes, [kind], [modality])


def _ends(client: bool, names: Iterable[str], stages: tuple[str, ...]) -> tuple[str, ...]:
    return ((CLIENT,) if client else ()) + tuple(name for name in names if name in stages)


def _require_known(requested: frozenset[str], known: set[str], param: str) -> None:
    if not requested:
        raise InvalidRequest(f"no {param} given; this pipeline knows {_words(known)}", param=param)
    if unknown := requested - known:
        raise InvalidRequest(f"unknown {param} {_words(unknown)}; this pipeline knows {_words(known)}", param=param)


def _words(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
