"""Which stages a request goes through: a pure function of the stage graph.

A stage takes part in a request when something the request brings reaches it and something the request asks for can be
reached from it. So one graph serves a text question, a spoken one, and a text to be read aloud: they enter at different
stages, leave at different stages, and share what lies between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from graphlib import TopologicalSorter

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.messages import CLIENT


@dataclass(frozen=True)
class Node:
    """A stage: the kinds of client input it accepts, the stages that feed it, the modality it emits to the client."""

    accepts: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    emits: str | None = None


@dataclass(frozen=True)
class Route:
    """One request's way. ``stages`` are in topological order, upstream first."""

    stages: tuple[str, ...]
    sources: Mapping[str, tuple[str, ...]]
    """For each stage, who feeds it: ``CLIENT`` and stages."""
    targets: Mapping[str, tuple[str, ...]]
    """For each stage, whom it feeds: stages and ``CLIENT``."""
    entries: Mapping[str, tuple[str, ...]]
    """For each stage that the client feeds, the kinds of input it gets."""


def topological(nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """Stage names, upstream first. Raises graphlib.CycleError."""
    return tuple(TopologicalSorter({name: node.inputs for name, node in nodes.items()}).static_order())


def plan(nodes: Mapping[str, Node], kinds: Iterable[str], modalities: Iterable[str]) -> Route:
    """The route of a request that brings ``kinds`` of input and asks for ``modalities``.

    Raises InvalidRequest where a kind or modality is unknown, or does not lead to the other.
    """
    kinds, modalities = frozenset(kinds), frozenset(modalities)
    order = topological(nodes)
    _require_known(kinds, {kind for node in nodes.values() for kind in node.accepts}, "input")
    _require_known(modalities, {node.emits for node in nodes.values() if node.emits}, "modalities")
    fed: set[str] = set()
    for name in order:
        if kinds & set(nodes[name].accepts) or fed & set(nodes[name].inputs):
            fed.add(name)
    wanted: set[str] = set()
    for name in reversed(order):
        if nodes[name].emits in modalities or any(name in nodes[below].inputs for below in wanted):
            wanted.add(name)
    stages = tuple(name for name in order if name in fed and name in wanted)
    entries = {name: tuple(sorted(kinds & set(nodes[name].accepts))) for name in stages}
    entries = {name: taken for name, taken in entries.items() if taken}
    unused = kinds - {kind for taken in entries.values() for kind in taken}
    unmet = modalities - {nodes[name].emits for name in stages}
    if not stages or unused or unmet:
        raise InvalidRequest(
            f"no way from input {_words(unused or kinds)} to output {_words(unmet or modalities)}", param="modalities"
        )
    return Route(
        stages,
        {name: _ends(name in entries, nodes[name].inputs, stages) for name in stages},
        {
            name: _ends(
                nodes[name].emits in modalities, [below for below in stages if name in nodes[below].inputs], stages
            )
            for name in stages
        },
        entries,
    )


def routes_of(nodes: Mapping[str, Node]) -> Iterator[Route]:
    """From each kind of input alone to each output alone, where there is a way."""
    for kind in {kind for node in nodes.values() for kind in node.accepts}:
        for modality in {node.emits for node in nodes.values() if node.emits}:
            with suppress(InvalidRequest):
                yield plan(nodes, [kind], [modality])


def _ends(client: bool, names: Iterable[str], stages: tuple[str, ...]) -> tuple[str, ...]:
    return ((CLIENT,) if client else ()) + tuple(name for name in names if name in stages)


def _require_known(asked: frozenset[str], known: set[str], param: str) -> None:
    if not asked:
        raise InvalidRequest(f"no {param} given; this pipeline knows {_words(known)}", param=param)
    if unknown := asked - known:
        raise InvalidRequest(f"unknown {param} {_words(unknown)}; this pipeline knows {_words(known)}", param=param)


def _words(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
