"""The scenarios of a simulation: pipelines, their requests, and the expected outputs.

Rules
1. A scenario follows from its numbers alone.
2. Every engine is ``echo``, whose output is a pure function of its input. So the oracle is computed here, by a few
   lines that share only the route with the runtime. With ``deciding``, every engine is ``DecidingEngine``, and each
   stage is deterministic, resumable or neither. Cuts aside, its outputs are those of ``echo``.
3. Rings are as small as possible, and some chunks are larger than a ring takes at once.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.routes import Route
from omni_actors.protocol.messages import CLIENT
from omni_actors.stress.oracle import Oracle
from omni_actors.stress.workload import Template, Workload, emitted, route_of

SCENARIOS = 96
LENGTHS = (1, 2, 5, 9)
"""Chunks in a request."""
RING_BYTES = 4096
LARGE = 1500
"""int32 values in a large chunk: more than a ring has room for."""
LARGE_BYTES = 4 * LARGE + 500
"""A large chunk with its header and trail."""
OUTPUT_BYTES = 2 * (RING_BYTES + LARGE_BYTES) + LARGE_BYTES
"""The most that a prompt client has not read: what two stages with output may deliver at once, which is a full ring and
the chunk before it, and the piece that is being delivered."""
LOAD_S, STEP_S, SHUTDOWN_S = 30.0, 40.0, 0.5
PATIENCE_S = 400.0
"""Virtual seconds, like the others. Hangs are detected within 44, and a row of failed starts takes less."""

SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "chain": {
        "first": {"accepts": ("script",), "emits": "text"},
        "second": {"inputs": ("first",), "emits": "audio"},
    },
    "three": {
        "first": {"accepts": ("audio",)},
        "second": {"inputs": ("first",), "accepts": ("messages",), "emits": "text"},
        "third": {"inputs": ("second",), "accepts": ("script",), "emits": "audio"},
    },
    "diamond": {
        "first": {"accepts": ("script",)},
        "left": {"inputs": ("first",), "emits": "text"},
        "right": {"inputs": ("first",), "accepts": ("audio",)},
        "last": {"inputs": ("left", "right"), "emits": "audio"},
    },
}


@functools.lru_cache(maxsize=4 * SCENARIOS)
def scenario(number: int, *, deciding: int = 0, standbys: int = 0, scaling: int = 0) -> Workload:
    """A pipeline with its requests and their answers.

    deciding, standbys, scaling: which stages decide, which have a standby, and which are scaled from zero, follows from
    these; 0: none.
    """
    draw = random.Random(number)
    shape = draw.choice(list(SHAPES))
    strategies: Any = draw.choice((["one_for_one"], ["one_for_one", "rest_for_one", "one_for_all"]))
    intensity = draw.choice((1, 2, 1000, 1000))
    stages = {
        name: Stage(
            engine="echo",
            replicas=draw.choice((1, 1, 2)),
            threads=1,
            options={"spin": True},  # for 0 s; a sleep of 0 s would yield the core
            ring_bytes=RING_BYTES,
            load_timeout_s=LOAD_S,
            step_timeout_s=STEP_S,
            shutdown_timeout_s=SHUTDOWN_S,
            restart=Restart(
                type=draw.choice(("permanent",) * 8 + ("transient", "temporary")),
                strategy=draw.choice(strategies),
                intensity=intensity,
                period_s=draw.choice((2.0, 1000.0)),
                backoff_s=draw.choice((0.01, 0.5)),
                backoff_max_s=1.0,
            ),
            **described,
        )
        for name, described in SHAPES[shape].items()
    }
    pipeline = Pipeline(name=f"{shape} {number}", stages=stages, limits=_limits(draw))
    templates, oracle = {}, {}
    some_kinds = _one_or_two({kind for stage in pipeline.stages.values() for kind in stage.accepts})
    some_modalities = _one_or_two(emitted(pipeline))
    for length, large, kinds, modalities in itertools.product(LENGTHS, (False, True), some_kinds, some_modalities):
        route = route_of(pipeline, kinds, modalities)
        if route is not None and not (large and length > 5):
            name = f"{' and '.join(modalities)} of {' and '.join(kinds)}, {length}{' large' if large else ''}"
            inputs = {kind: _pieces(kind, length, large=large) for kind in kinds}
            templates[name] = Template(name=name, inputs=inputs, modalities=modalities, params={}, stages=route.stages)
            oracle[name] = expected(route, inputs)
    if deciding:
        pipeline = _deciding(random.Random(deciding), pipeline)
    if standbys:
        pipeline = _with_standbys(random.Random(standbys), pipeline)
    if scaling:
        pipeline = _scalable(random.Random(scaling), pipeline)
    replayed = frozenset(stage for stage in stages if pipeline.deterministic(stage) or pipeline.resumable(stage))
    return Workload(pipeline=pipeline, templates=templates, replayed=replayed, oracle=oracle)


def _deciding(draw: random.Random, pipeline: Pipeline) -> Pipeline:
    """The pipeline with deciding engines.

    A stage that is neither deterministic nor resumable may start again with another history when the client has all of
    the first one, for the stages downstream. So its history is not recorded.
    """
    stages = {}
    for name, stage in pipeline.stages.items():
        kind = draw.choice(("resumable",) * 4 + ("deterministic",) * 2 + ("neither",))
        steps = random.Random(f"{pipeline.name} {name} {kind}").choice((0, 2, 6)) if kind == "resumable" else 0
        stages[name] = msgspec.structs.replace(
            stage,
            engine="omni_actors.stress.simulation.deciding:DecidingEngine",
            options={"decides": kind != "deterministic", "recorded": kind != "neither", "steps": steps},
            deterministic=kind == "deterministic",
            resumable=kind == "resumable",
        )
    return msgspec.structs.replace(pipeline, name=f"deciding {pipeline.name}", stages=stages)


def _with_standbys(draw: random.Random, pipeline: Pipeline) -> Pipeline:
    stages = {
        name: msgspec.structs.replace(stage, standby=draw.choice((0, 1, 1, 2)))
        for name, stage in pipeline.stages.items()
    }
    return msgspec.structs.replace(pipeline, name=f"{pipeline.name} with standbys", stages=stages)


def _scalable(draw: random.Random, pipeline: Pipeline) -> Pipeline:
    """The pipeline with stages that requests start, some of which have no replica at first."""
    stages = {}
    for name, stage in pipeline.stages.items():
        from_zero = draw.random() < 0.4
        stages[name] = msgspec.structs.replace(
            stage,
            replicas=0 if from_zero and draw.random() < 0.5 else stage.replicas,
            scale_from_zero=from_zero,
            drain_s=draw.choice((0.0, 1.0, 60.0)),
        )
    return msgspec.structs.replace(pipeline, name=f"{pipeline.name} to be scaled", stages=stages)


def _limits(draw: random.Random) -> Limits:
    return Limits(
        max_requests=draw.choice((2, 4, 8)),
        deadline_s=100_000.0,
        output_bytes=draw.choice((OUTPUT_BYTES, 1_000_000)),
        replays=draw.choice((0, 1, 2, 10)),
        retain_bytes=draw.choice((3_000, 1_000_000, 1_000_000)),
        window_bytes=draw.choice((2_000, 1_000_000)),
    )


def _one_or_two(names: Iterable[str]) -> list[tuple[str, ...]]:
    ordered = sorted(names)
    return [some for size in (1, 2) for some in itertools.combinations(ordered, size)]


def _pieces(kind: str, length: int, *, large: bool) -> list[Input]:
    return [
        Input({"text": f"{kind}{n} "}, {"codes": np.arange(n, n + (LARGE if large and n % 2 else 8), dtype=np.int32)})
        for n in range(length)
    ]


def expected(route: Route, inputs: Mapping[str, Sequence[Input]]) -> Oracle:
    """The outputs of echo stages: each repeats its input, with several sources one chunk of each in turn."""
    outputs: dict[str, list[Input]] = {}
    oracle = Oracle()
    for stage in route.stages:
        sources = [
            [piece for kind in route.entries[stage] for piece in inputs[kind]] if source == CLIENT else outputs[source]
            for source in route.sources[stage]
        ]
        turns = itertools.zip_longest(*sources)
        outputs[stage] = [piece for turn in turns for piece in turn if piece is not None]
        if CLIENT in route.targets[stage]:
            for piece in outputs[stage]:
                oracle.streams[stage, "text"] += piece.data["text"].encode()
                oracle.streams[stage, "codes"] += piece.tensors["codes"].tobytes()
            oracle.streams[stage, "finished"] += b"."
    return oracle
