"""The requests that the harness sends to a pipeline, derived from its configuration alone.

Rules
1. Every request is the same each time: fixed input, fixed seeds. So its output without a fault is the oracle's.
2. A pipeline whose first engines are ``echo`` gets chunks of text, sound and codes, and its echo engines can be asked
   to fail (``hooks``). Other pipelines get what their stages accept of ``messages``, ``script`` and ``audio``, and are
   hit from outside only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from omni_actors import config as configuration
from omni_actors.config import Pipeline
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.routes import Node, Route, plan, topological
from omni_actors.stress.oracle import Oracle

SEED = 7
SHORT, LONG = 3, 60
"""Chunks of a request to an echo pipeline."""
RATE = 24_000
ECHOING = frozenset({"echo", "omni_actors.stress.simulation.deciding:DecidingEngine"})
"""Engines that repeat their input."""
ADAPTER = "switched"
"""The name of the LoRA adapter that some requests to echo engines have (``adapters``)."""
SCRIPT = "Good morning."
QUESTION = "What is the capital of France?"
LONG_QUESTION = "Write three sentences about the sea."


@dataclass(frozen=True)
class Template:
    """A request. stages: its route, upstream first."""

    name: str
    inputs: Mapping[str, Sequence[Input]]
    modalities: tuple[str, ...]
    params: Mapping[str, Any]
    stages: tuple[str, ...]

    def with_hooks(self, hooks: Mapping[str, Any]) -> Mapping[str, Sequence[Input]]:
        """The inputs, with ``hooks`` for echo engines in the first piece of each kind."""
        return {
            kind: [Input({**pieces[0].data, "echo": hooks}, pieces[0].tensors), *pieces[1:]]
            for kind, pieces in self.inputs.items()
        }


@dataclass
class Workload:
    """A pipeline and its requests. A run without faults fills ``oracle``.

    full: requests in flight at full load. patience_s: what takes longer than this after the last fault hangs.
    cluster: on which nodes the workers run (``nodes.open_nodes``); None: without any.
    """

    pipeline: Pipeline
    templates: dict[str, Template]
    hooks: tuple[str, ...] = ()
    """Stages whose engine can be asked to fail."""
    full: int = 0
    patience_s: float = math.inf
    cluster: str | None = None
    replayed: frozenset[str] = frozenset()
    """Stages whose death a request survives."""
    oracle: dict[str, Oracle] = field(default_factory=dict)
    """The expected answers, by the name of the template, and of the adapter's version if it has one
    (``adapters.oracle_name``)."""

    @property
    def stages(self) -> tuple[str, ...]:
        """Upstream first."""
        return topological(_nodes(self.pipeline))

    @property
    def step_timeout_s(self) -> float:
        """The shortest of all stages, in seconds."""
        return min(stage.step_timeout_s for stage in self.pipeline.stages.values())

    def probe(self, stage: str) -> Template:
        """The cheapest request that needs ``stage``."""
        return min(
            (each for each in self.templates.values() if stage in each.stages),
            key=lambda each: (len(each.stages), list(self.templates).index(each.name)),
        )


def _nodes(pipeline: Pipeline) -> dict[str, Node]:
    return {name: Node(accepts=s.accepts, inputs=s.inputs, emits=s.emits) for name, s in pipeline.stages.items()}


def route_of(pipeline: Pipeline, kinds: Collection[str], modalities: Collection[str]) -> Route | None:
    """The route from these kinds of input to these modalities; None if the pipeline has none."""
    try:
        return plan(_nodes(pipeline), kinds, modalities)
    except InvalidRequest:
        return None


def emitted(pipeline: Pipeline) -> tuple[str, ...]:
    """The modalities of a pipeline's outputs."""
    return tuple(stage.emits for stage in pipeline.stages.values() if stage.emits)


def workload_of(config: str | Pipeline, overrides: Mapping[str, Any]) -> Workload:
    """Derive the workload of a pipeline. Unless overridden, restarts are quick and unlimited, and timeouts are short.

    Raises ConfigError, also if no request reaches some stage.
    """
    given = configuration.load(config, overrides)
    is_echo = all(stage.engine in ECHOING for stage in given.stages.values() if stage.accepts)
    defaults: dict[str, Any] = {}
    for name, stage in given.stages.items():
        place = f"stages.{name}"
        defaults[f"{place}.restart.backoff_s"] = defaults[f"{place}.restart.backoff_max_s"] = 0.01
        defaults[f"{place}.restart.intensity"] = 1_000_000
        echo_load_s = 12.0 if stage.standby else 3.0  # behind another worker it loads at a low priority
        defaults[f"{place}.load_timeout_s"] = echo_load_s if is_echo else 60.0
        defaults[f"{place}.step_timeout_s"] = 1.0 if is_echo else 10.0
        if stage.engine == "echo":
            defaults[f"{place}.options.step_s"] = 0.001
    pipeline = configuration.load(config, {**defaults, **overrides})
    templates = {each.name: each for each in (_echo_requests if is_echo else _model_requests)(pipeline)}
    for name in pipeline.stages:
        if not any(name in each.stages for each in templates.values()):
            raise ConfigError(pipeline.file, f"stages.{name}", name, "a stage that a request of known kinds reaches")
    hooks = tuple(name for name, stage in pipeline.stages.items() if stage.engine == "echo") if is_echo else ()
    replayed = frozenset(name for name in pipeline.stages if pipeline.deterministic(name) or pipeline.resumable(name))
    return Workload(
        pipeline=pipeline,
        templates=templates,
        hooks=hooks,
        full=8 if is_echo else 3,
        patience_s=20.0 if is_echo else 180.0,
        replayed=replayed,
    )


def _template(
    pipeline: Pipeline, name: str, inputs: Mapping[str, Sequence[Input]], modalities: tuple[str, ...], **params: Any
) -> Iterator[Template]:
    """Yield the template if the pipeline has a route for it, with the parameters that an engine on the route knows."""
    route = route_of(pipeline, inputs, modalities)
    if route is None:
        return
    schemas = [pipeline.spec(stage).params for stage in route.stages]
    known = {each.name for schema in schemas if schema is not None for each in msgspec.structs.fields(schema)}
    share = {key: value for key, value in {"seed": SEED, **params}.items() if key in known}
    yield Template(name=name, inputs=inputs, modalities=modalities, params=share, stages=route.stages)


def _echo_requests(pipeline: Pipeline) -> Iterator[Template]:
    noise = np.random.default_rng(SEED)

    def piece(number: int) -> Input:
        codes = noise.integers(0, 1 << 20, 100_000 if number == 5 else 64, dtype=np.int32)
        sound = noise.uniform(-1, 1, 240).astype(np.float32)
        return Input({"text": f"{number} ", "sample_rate": RATE}, {"audio": sound, "codes": codes})

    kinds = sorted({kind for stage in pipeline.stages.values() for kind in stage.accepts})
    kinds = kinds if len(kinds) == 1 else [each for each in kinds if each != "messages"]
    short, long = ([piece(number) for number in range(count)] for count in (SHORT, LONG))
    for modalities in (*((each,) for each in emitted(pipeline)), emitted(pipeline)):
        for length, pieces in (("short", short), ("long", long)):
            label = " and ".join(modalities)
            for kind in kinds:
                yield from _template(pipeline, f"{label}, {length}", {kind: pieces}, modalities)
    for modality, kind in itertools.product(emitted(pipeline), kinds):
        for template in _template(pipeline, f"{modality}, adapter", {kind: long}, (modality,), lora=ADAPTER):
            if "lora" in template.params:
                yield template


def _model_requests(pipeline: Pipeline) -> Iterator[Template]:
    def question(content: str | list[dict[str, Any]]) -> dict[str, list[Input]]:
        return {"messages": [Input({"messages": [{"role": "user", "content": content}]})]}

    times = np.arange(RATE) / RATE
    tone = (0.3 * np.sin(2 * np.pi * 220 * times) * np.hanning(RATE)).astype(np.float32)
    recording = {"audio": [Input({"sample_rate": RATE, "index": 0}, {"audio": tone})]}
    # The recording has no words, and a question must not be empty.
    about_it = question([{"type": "audio", "index": 0}, {"type": "text", "text": QUESTION}])
    takes_messages = {name for name, stage in pipeline.stages.items() if "messages" in stage.accepts}

    for modality in emitted(pipeline):
        yield from _template(pipeline, f"{modality}, script", {"script": [Input({"text": SCRIPT})]}, (modality,))
        for template in _template(pipeline, f"{modality}, recording", recording, (modality,)):
            if takes_messages.isdisjoint(template.stages):
                yield template
        yield from _template(pipeline, f"{modality}, with audio", recording | about_it, (modality,), max_tokens=4)
        yield from _template(pipeline, f"{modality}, short", question(QUESTION), (modality,), max_tokens=4)
    yield from _template(pipeline, "sampled, short", question(QUESTION), ("text",), max_tokens=8, temperature=0.8)
    spoken_and_written = tuple(each for each in ("text", "audio") if each in emitted(pipeline))
    if len(spoken_and_written) > 1:
        yield from _template(
            pipeline, "text and audio, long", question(LONG_QUESTION), spoken_and_written, max_tokens=32
        )
