"""Pipelines: read, overridden, validated in full before anything starts.

Rules
1. Every error names file, path in the document, what was found and what is accepted.
2. The document is the only schema: field defaults are here, once, and ``explain`` shows where each value came from.
3. Validation needs no model library: engines are checked against their options in the registry.
"""

from __future__ import annotations

import difflib
import graphlib
import importlib.util
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import yaml
from msgspec import Meta

from omni_actors.errors import ConfigError
from omni_actors.protocol.messages import CLIENT
from omni_actors.stages.registry import ENGINES, EngineSpec

Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*$")]

OVERRIDES = "overrides"
OPTIONS_BYTES = 64 * 1024


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Restart(_Section, frozen=True, kw_only=True):
    """Of each replica. After more than ``intensity`` within ``period_s`` it is given up; with the last, its stage."""

    type: Literal["permanent", "transient", "temporary"] = "permanent"
    """Which deaths are followed by a restart: all; all but exit code 0; none."""
    strategy: Literal["one_for_one", "rest_for_one", "one_for_all"] = "one_for_one"
    """Who is restarted with a worker that died: nobody; all workers of the stages below; all workers."""
    intensity: Annotated[int, Meta(ge=0)] = 3
    period_s: PositiveFloat = 60.0
    backoff_s: PositiveFloat = 0.1
    backoff_max_s: PositiveFloat = 10.0
    retry_s: Annotated[float, Meta(ge=0)] = 30.0
    """A replica that was given up for its ``intensity`` is tried again after so long; 0: never."""
    retry_max_s: PositiveFloat = 600.0
    """Each try that fails doubles the time until the next one, up to this."""


class Limits(_Section, frozen=True, kw_only=True):
    """What bounds the system."""

    max_requests: Positive = 64
    """Admitted at once; more are refused."""
    deadline_s: PositiveFloat = 600.0
    """A request's time, where it brings no deadline of its own."""
    output_bytes: Positive = 64 * 1024 * 1024
    """Outputs of one request that its client does not have yet; with more the request ends."""
    unread_bytes: Positive = 256 * 1024 * 1024
    """Outputs of all requests that their clients do not have yet. From half of it on, stages are paused."""
    window_bytes: Positive = 512 * 1024
    """Outputs of one request that its HTTP client does not have yet, above which its stages are paused."""
    read_bytes_s: PositiveFloat = 16384.0
    """Output per second that an HTTP client reads at least, while its request waits for it."""
    replays: Annotated[int, Meta(ge=0)] = 2
    """How often one request is replayed after the death of a worker, so that one that kills its stage ends."""
    quarantine_s: Annotated[float, Meta(ge=0)] = 600.0
    """How long a request is refused after one like it has used up its replays by ending its workers; 0: not at all. It
    takes replays to find such a request: with ``replays: 0`` none is refused."""
    retain_bytes: Positive = 64 * 1024 * 1024
    """Outputs of one request that one stage retains for a replay; with more the request cannot be replayed."""
    worker_retain_bytes: Positive = 256 * 1024 * 1024
    """Outputs of all requests that one worker retains. Above it, the largest request cannot be replayed any more."""


class Stage(_Section, frozen=True, kw_only=True):
    """One stage of a pipeline."""

    engine: str
    """A name of the registry, or "package.module:factory"."""
    model: str | None = None
    """A directory, the name of a model that a registry package brings, or "owner/name" on a hub."""
    accepts: tuple[Name, ...] = ()
    """Kinds of input that come here from the client."""
    inputs: tuple[str, ...] = ()
    """Stages whose output comes here."""
    emits: Name | None = None
    """The modality that the client gets from here, when it asks for it."""
    replicas: Positive = 1
    threads: Annotated[int, Meta(ge=0)] = 0
    """Native threads of each worker; 0: cores / workers of the pipeline, at least 1."""
    nice: Annotated[int, Meta(ge=0, le=19)] = 0
    """How far its engines' threads stand back for others on the same cores, as ``nice(1)`` counts. Above 0, a step also
    waits, up to a second at a time, while clients wait for the first output of a worker that stands back less."""
    device: str = "cpu"
    options: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    """Request parameters where the request brings none."""
    deterministic: bool | None = None
    """Whether its outputs, and how they are cut into chunks, follow from parameters and input chunks alone, so that it
    can be started again in the middle of a request. Null: what the engine's entry in the registry says."""
    ring_bytes: Positive = 2 * 1024 * 1024
    """Capacity of each ring out of this stage. A larger chunk streams through it in pieces."""
    load_timeout_s: PositiveFloat = 600.0
    """From its spawn until a worker is ready; one that takes longer is killed."""
    step_timeout_s: PositiveFloat = 30.0
    """A turn of the engine loop: what has come in is fed, one step. A worker that takes longer is killed."""
    shutdown_timeout_s: PositiveFloat = 2.0
    """What a worker gets to stop in, before SIGKILL."""
    restart: Restart = Restart()


class Pipeline(_Section, frozen=True, kw_only=True):
    """A validated pipeline. ``file`` names its source in later errors."""

    name: str
    description: str = ""
    stages: dict[Name, Stage]
    limits: Limits = Limits()
    file: str = "-"

    def threads(self, stage: str) -> int:
        """Native threads of one worker of ``stage``."""
        workers = sum(each.replicas for each in self.stages.values())
        return self.stages[stage].threads or max(1, _cores() // workers)

    @property
    def spins(self) -> bool:
        """Whether native threads may wait awake: only while all workers that have several fit on the cores together."""
        teams = [self.threads(name) * stage.replicas for name, stage in self.stages.items() if self.threads(name) > 1]
        return sum(teams) <= _cores()

    def spec(self, stage: str) -> EngineSpec:
        """The engine of ``stage``; one given by import path takes any options and parameters."""
        engine = self.stages[stage].engine
        return ENGINES.get(engine) or EngineSpec(engine, options=None, params=None, needs_model=False)

    def deterministic(self, stage: str) -> bool:
        """Whether ``stage`` gives the same output chunks again."""
        configured = self.stages[stage].deterministic
        return self.spec(stage).deterministic if configured is None else configured

    def options(self, stage: str) -> dict[str, Any]:
        """The effective options of ``stage``: what it says over its engine's defaults."""
        options, schema = self.stages[stage].options, self.spec(stage).options
        if schema is None:
            return options
        effective: dict[str, Any] = msgspec.to_builtins(msgspec.convert(options, schema))
        return effective


class Explained(msgspec.Struct, frozen=True):
    """A value of a pipeline and where it came from: "default", "FILE:LINE", or "overrides"."""

    path: str
    value: Any
    origin: str


def config_names() -> list[str]:
    """The pipelines that ship with omni_actors."""
    return sorted(path.stem for path in _config_dir().glob("*.yaml"))


def load(config: str | Path | Pipeline, overrides: Mapping[str, Any] | None = None) -> Pipeline:
    """Read a pipeline by name, path or object. overrides: dotted path -> value ("stages.llm.threads": 2).

    Raises ConfigError.
    """
    return _read(config, overrides or {})[0]


def explain(config: str | Path | Pipeline, overrides: Mapping[str, Any] | None = None) -> list[Explained]:
    """Every effective value, with its origin. Raises ConfigError."""
    pipeline, origins = _read(config, overrides or {})
    document = msgspec.to_builtins(pipeline)
    del document["file"]
    for stage in pipeline.stages:
        document["stages"][stage]["options"] = pipeline.options(stage)
    return [Explained(path, value, origins.get(path, "default")) for path, value in _leaves(document)]


def parse_overrides(assignments: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """["stages.llm.threads=2", …] as a mapping; values are YAML. Raises ConfigError."""
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(OVERRIDES, assignment, assignment, "path.to.value=VALUE")
        try:
            overrides[path] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(OVERRIDES, path, value, f"a YAML value ({error})") from error
    return overrides


# reading


def _read(config: str | Path | Pipeline, overrides: Mapping[str, Any]) -> tuple[Pipeline, dict[str, str]]:
    if isinstance(config, Pipeline):
        file, document = config.file, msgspec.to_builtins(config)
        del document["file"]
        origins = {place: file for place, _ in _leaves(document)}
    else:
        path = _find(str(config))
        file = str(path)
        document, lines = _parse(path)
        origins = {place: f"{file}:{line}" for place, line in lines.items()}
    for place, value in overrides.items():
        _assign(document, place, value)
        replaced = [old for old in origins if f"{old}.".startswith(f"{place}.")]
        for old in replaced:
            del origins[old]
        origins.update(dict.fromkeys((place, *(leaf for leaf, _ in _leaves(value, place))), OVERRIDES))
    pipeline = _convert(document, file, origins)
    _check_graph(pipeline, origins)
    for stage in pipeline.stages:
        _check_engine(pipeline, stage, origins)
    return pipeline, origins


def _config_dir() -> Path:
    packaged = Path(str(resources.files("omni_actors"))) / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


def _find(name: str) -> Path:
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or os.sep in name:
        if path.is_file():
            return path
        raise ConfigError(name, "(file)", name, "the path of a YAML file that exists")
    shipped = _config_dir() / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    accepted = f"one of {', '.join(config_names())}, or the path of a YAML file{_meant(name, config_names())}"
    raise ConfigError(name, "(name)", name, accepted)


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The document, and the line of each value by dotted path."""
    lines: dict[str, int] = {}
    constructor = yaml.SafeLoader("")

    def build(node: yaml.Node, place: str) -> Any:
        lines[place] = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            return constructor.construct_object(node, deep=True)
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(constructor.construct_object(key_node))
            where = f"{place}.{key}".lstrip(".")
            if key in built:
                raise ConfigError(f"{path}:{key_node.start_mark.line + 1}", where, key, "each key once")
            built[key] = build(value_node, where)
        return built

    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        document = build(node, "") if node is not None else None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a value such as the date 2026-99-99
        raise ConfigError(str(path), "(document)", str(error), "a YAML document in UTF-8") from error
    except RecursionError as error:
        raise ConfigError(str(path), "(document)", str(error), "a document that does not contain itself") from error
    if not isinstance(document, dict):
        raise ConfigError(str(path), "(document)", document, "a mapping with name and stages")
    return document, lines


def _assign(document: dict[str, Any], place: str, value: Any) -> None:
    *parents, last = place.split(".")
    target = document
    stages = document.get("stages")
    if len(parents) > 1 and parents[0] == "stages" and isinstance(stages, dict) and parents[1] not in stages:
        accepted = f"one of {', '.join(stages)}{_meant(parents[1], stages)}"
        raise ConfigError(OVERRIDES, f"stages.{parents[1]}", parents[1], accepted)
    for depth, key in enumerate(parents):
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(OVERRIDES, ".".join(parents[: depth + 1]), target, "a mapping, to be overridden inside")
    target[last] = value


# validation


def _convert(document: dict[str, Any], file: str, origins: Mapping[str, str]) -> Pipeline:
    """Stage by stage, so that an error's path names the stage."""
    stages = document.get("stages")
    if not isinstance(stages, dict) or not stages:
        raise ConfigError(file, "stages", stages, "a mapping from stage names to stages")
    converted = {name: _section(stage, Stage, f"stages.{name}", file, origins) for name, stage in stages.items()}
    whole: Pipeline = _section({**document, "stages": {}, "file": file}, Pipeline, "", file, origins)
    pattern = re.compile(r"^[a-z][a-z0-9_]*$")
    for name in converted:
        if not isinstance(name, str) or not pattern.match(name) or name == CLIENT:
            where, accepted = f"stages.{name}", f"a name like {pattern.pattern}, other than {CLIENT!r}"
            raise ConfigError(_file(where, file, origins), where, name, accepted)
    return msgspec.structs.replace(whole, stages=converted)


def _section(value: Any, schema: type[Any], place: str, file: str, origins: Mapping[str, str]) -> Any:
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        message, _, inner = str(error).partition(" - at `$")
        where = ".".join(part for part in (place, inner.rstrip("`").lstrip(".")) if part)
        found = _look_up(value, inner.rstrip("`").lstrip("."))
        if unknown := re.search(r"unknown field `(.*)`", message):
            found = unknown[1]
            known = _fields_at(schema, inner.rstrip("`").lstrip("."))
            message = f"one of {', '.join(known)}{_meant(found, known)}"
        elif message.startswith("Invalid enum value"):
            known = list(get_args(_type_at(schema, inner.rstrip("`").lstrip("."))))
            message = f"one of {', '.join(known)}{_meant(found, known)}"
        elif missing := re.search(r"missing required field `(.*)`", message):
            found, message = None, f"a value for {missing[1]!r}"
        raise ConfigError(_file(where, file, origins), where or "(document)", found, message) from error


def _check_graph(pipeline: Pipeline, origins: Mapping[str, str]) -> None:
    stages = pipeline.stages

    def wrong(place: str, found: Any, accepted: str) -> ConfigError:
        return ConfigError(_file(place, pipeline.file, origins), place, found, accepted)

    emitters: dict[str, str] = {}
    for name, stage in stages.items():
        for i, source in enumerate(stage.inputs):
            if source not in stages:
                others = sorted(set(stages) - {name})
                accepted = f"the name of a stage: {', '.join(others)}{_meant(source, others)}"
                raise wrong(f"stages.{name}.inputs.{i}", source, accepted)
            if source in stage.inputs[:i]:
                raise wrong(f"stages.{name}.inputs.{i}", source, "each stage once")
        if not stage.inputs and not stage.accepts:
            raise wrong(f"stages.{name}", name, "a stage with inputs, or one that accepts input")
        if stage.emits is not None:
            if stage.emits in emitters:
                accepted = f"a modality of its own; stage {emitters[stage.emits]!r} emits this one"
                raise wrong(f"stages.{name}.emits", stage.emits, accepted)
            emitters[stage.emits] = name
    try:
        graphlib.TopologicalSorter({name: stage.inputs for name, stage in stages.items()}).prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise wrong("stages", cycle, "inputs that form no cycle") from error
    read = {source for stage in stages.values() for source in stage.inputs}
    for name, stage in stages.items():
        if name not in read and stage.emits is None:
            raise wrong(f"stages.{name}", name, "a stage that another one reads, or one that emits")


def _check_engine(pipeline: Pipeline, name: str, origins: Mapping[str, str]) -> None:
    stage, file, place = pipeline.stages[name], pipeline.file, f"stages.{name}"
    if stage.engine not in ENGINES and ":" not in stage.engine:
        accepted = f'one of {", ".join(sorted(ENGINES))}, or "package.module:factory"{_meant(stage.engine, ENGINES)}'
        raise ConfigError(_file(f"{place}.engine", file, origins), f"{place}.engine", stage.engine, accepted)
    package = stage.engine.partition(":")[0].partition(".")[0]
    if ":" in stage.engine and importlib.util.find_spec(package) is None:
        accepted = f"an import path; there is no package {package!r}"
        raise ConfigError(_file(f"{place}.engine", file, origins), f"{place}.engine", stage.engine, accepted)
    if len(msgspec.msgpack.encode(stage.options)) > OPTIONS_BYTES:
        accepted = f"options of {OPTIONS_BYTES} bytes at the most: they travel in one control message"
        raise ConfigError(_file(f"{place}.options", file, origins), f"{place}.options", "more", accepted)
    spec = pipeline.spec(name)
    if spec.needs_model and stage.model is None:
        raise ConfigError(_file(place, file, origins), f"{place}.model", None, "a model: this engine needs one")
    if spec.options is not None:
        _section(stage.options, spec.options, f"{place}.options", file, origins)
    if spec.params is not None:
        _section(stage.defaults, spec.params, f"{place}.defaults", file, origins)


# words


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _file(place: str, file: str, origins: Mapping[str, str]) -> str:
    """Where what is at ``place`` was written: it, or the nearest thing around it that was."""
    place = place.replace("[", ".[")
    while place and place not in origins:
        place = place.rpartition(".")[0]
    return origins[place] if place else file


def _look_up(value: Any, inner: str) -> Any:
    for key in re.findall(r"[^.\[\]]+", inner):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list | tuple) and key.isdigit():
            value = value[int(key)]
        else:
            return value
    return value


def _fields_at(schema: Any, inner: str) -> list[str]:
    return sorted(f.encode_name for f in msgspec.structs.fields(_type_at(schema, inner)))


def _type_at(schema: Any, inner: str) -> Any:
    for key in filter(None, inner.split(".")):
        schema = next(f.type for f in msgspec.structs.fields(schema) if f.encode_name == key)
    return schema


def _leaves(value: Any, place: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{place}.{key}".lstrip("."))]
    return [(place, value)]


def _meant(found: str, accepted: Any) -> str:
    longer = [name for name in accepted if name.startswith(f"{found.removesuffix('_s')}_")]  # step_s: step_timeout_s
    close = longer or difflib.get_close_matches(found, list(accepted), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
