"""From the values of a document to a pipeline that can work.

msgspec checks the types. What types do not express is checked here: the graph of the stages, and the options of each
engine.
"""

from __future__ import annotations

import graphlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from omni_actors.config.devices import VISIBLE, DeviceLayoutError, check_length, configured_devices, stage_layout
from omni_actors.config.document import OPEN_PARAMETERS, OVERRIDES, Assignments, Document, leaves, one_of
from omni_actors.config.schema import NAME_PATTERN, Pipeline, Restart, Section, Sections, Stage
from omni_actors.protocol.messages import CLIENT
from omni_actors.stages.registry import ENGINES
from omni_actors.validation import explained, split_path

OPTIONS_BYTES = 64 * 1024
"""Most bytes of a stage's encoded options, and of its defaults: they travel in one control message each."""
RESTART_BOUNDS = (("backoff_s", "backoff_max_s"), ("retry_s", "retry_max_s"))
"""Fields of ``restart`` that another one bounds, and that one."""


def pipeline_from(document: Document) -> Pipeline:
    """Return the pipeline of ``document``. Raises ConfigError for the first thing in it that cannot work."""
    stages = document.values.get("stages")
    sections: Sections = _convert({**document.values, "stages": {}}, Sections, "", document)
    if not isinstance(stages, dict) or not stages:
        raise document.error("stages", stages, "a mapping from stage names to stages")
    for name in stages:
        if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name) or name == CLIENT:
            accepted = f"a stage name that matches {NAME_PATTERN} and is not {CLIENT!r}"
            raise document.error(f"stages.{name}", name, accepted)
    if not sections.name or not sections.name.isprintable():
        raise document.error("name", sections.name, "a name of printable characters")
    typed = {name: _convert(stage, Stage, f"stages.{name}", document) for name, stage in stages.items()}
    pipeline = Pipeline(**{**msgspec.structs.asdict(sections), "stages": typed, "file": document.file})
    _check_sources(pipeline, document)
    _check_outputs(pipeline, document)
    _check_cluster(pipeline, document)
    for stage in pipeline.stages:
        _check_engine(pipeline, stage, document)
        _check_restart(pipeline.stages[stage].restart, f"stages.{stage}.restart", document)
        _check_autoscale(pipeline.stages[stage], f"stages.{stage}", document)
        _check_devices(pipeline, stage, document)
    return pipeline


def _check_sources(pipeline: Pipeline, document: Document) -> None:
    stages = pipeline.stages
    for name, stage in stages.items():
        for i, source in enumerate(stage.inputs):
            path = f"stages.{name}.inputs.{i}"
            if source not in stages:
                raise document.error(path, source, f"another stage: {one_of(source, sorted({*stages} - {name}))}")
            if source in stage.inputs[:i]:
                raise document.error(path, source, "each stage once")
        if not stage.inputs and not stage.accepts:
            raise document.error(f"stages.{name}", name, "a stage with inputs, or one that accepts input")
    try:
        graphlib.TopologicalSorter({name: stage.inputs for name, stage in stages.items()}).prepare()
    except graphlib.CycleError as error:
        raise document.error("stages", " -> ".join(error.args[1]), "inputs that form no cycle") from error


def _check_outputs(pipeline: Pipeline, document: Document) -> None:
    emitters: dict[str, str] = {}
    read = {source for stage in pipeline.stages.values() for source in stage.inputs}
    for name, stage in pipeline.stages.items():
        if stage.emits is None and name not in read:
            raise document.error(f"stages.{name}", name, "a stage that is an input of another one, or one that emits")
        if stage.emits in emitters:
            accepted = f"a modality of its own; stage {emitters[stage.emits]!r} emits this one"
            raise document.error(f"stages.{name}.emits", stage.emits, accepted)
        if stage.emits is not None:
            emitters[stage.emits] = name
    for i, modality in enumerate(pipeline.modalities):
        if modality not in emitters:
            raise document.error(
                f"modalities.{i}", modality, f"what a stage emits: {one_of(modality, sorted(emitters))}"
            )


def _check_cluster(pipeline: Pipeline, document: Document) -> None:
    """Check that each name in the section is a stage, and colocated in one group, and that NIXL is not to encrypt."""
    if (cluster := pipeline.cluster) is None:
        return
    if cluster.tls and cluster.transport == "nixl":
        raise document.error("cluster.transport", "nixl", "tcp, with cluster.tls: NIXL does not encrypt")
    named = {f"cluster.nodes.{name}": name for name in cluster.nodes}
    named |= {f"cluster.spread.{i}": name for i, name in enumerate(cluster.spread)}
    colocated = [
        (f"cluster.colocate.{i}.{j}", name) for i, group in enumerate(cluster.colocate) for j, name in enumerate(group)
    ]
    for path, name in [*named.items(), *colocated]:
        if name not in pipeline.stages:
            raise document.error(path, name, one_of(name, pipeline.stages))
    for n, (path, name) in enumerate(colocated):
        if name in [other for _, other in colocated[:n]]:
            raise document.error(path, name, "each stage in one group, and once")


def _check_engine(pipeline: Pipeline, name: str, document: Document) -> None:
    stage, path, spec = pipeline.stages[name], f"stages.{name}", pipeline.spec(name)
    module, is_path, _ = stage.engine.partition(":")
    if not is_path and stage.engine not in ENGINES:
        accepted = f'"package.module:factory", or {one_of(stage.engine, sorted(ENGINES))}'
        raise document.error(f"{path}.engine", stage.engine, accepted)
    package = module.partition(".")[0]
    if is_path and not _is_importable(package):
        raise document.error(f"{path}.engine", stage.engine, f"an import path; there is no package {package!r}")
    _check_size(stage.options, f"{path}.options", "options", document)
    _check_size(stage.defaults, f"{path}.defaults", "defaults", document)
    if spec.needs_model and stage.model is None:
        raise document.error(f"{path}.model", None, "a model, which this engine needs")
    if stage.tokenizer is not None and not (spec.has_tokenizer or is_path):
        raise document.error(f"{path}.tokenizer", stage.tokenizer, "no tokenizer, because this engine has none")
    if spec.options is not None:
        _convert(stage.options, spec.options, f"{path}.options", document)
    if spec.params is not None:
        _convert(stage.defaults, spec.params, f"{path}.defaults", document)


def _check_autoscale(stage: Stage, path: str, document: Document) -> None:
    if (bounds := stage.autoscale) is None:
        return
    if bounds.min > bounds.max:
        raise document.error(f"{path}.autoscale.min", bounds.min, f"at most autoscale.max, which is {bounds.max}")
    if not bounds.min <= stage.replicas <= bounds.max:
        accepted = f"a number within autoscale.min and max, from {bounds.min} to {bounds.max}"
        raise document.error(f"{path}.replicas", stage.replicas, accepted)


def _check_restart(restart: Restart, path: str, document: Document) -> None:
    """Check that no field exceeds its bound. The error is about the bound if the field has its default."""
    for field, bound in RESTART_BOUNDS:
        value, most = getattr(restart, field), getattr(restart, bound)
        if value > most and value == getattr(Restart(), field):
            raise document.error(f"{path}.{bound}", most, f"at least {field}, which is {value} by default")
        if value > most:
            raise document.error(f"{path}.{field}", value, f"at most {bound}, which is {most}")


def _check_devices(pipeline: Pipeline, name: str, document: Document) -> None:
    """Check what does not depend on this machine: which devices are visible is looked up when a system is opened.

    On a cluster a stage's ``devices`` are those of each node, so the number of workers does not follow from them.
    """
    stage, path = pipeline.stages[name], f"stages.{name}"
    given = "devices" if stage.devices else "device"
    if stage.devices and stage.device != "cuda":
        accepted = f"no devices, unless the stage has device: cuda (it has {stage.device!r})"
        raise document.error(f"{path}.devices", list(stage.devices), accepted)
    if stage.devices_per_replica > 1 and not configured_devices(stage):
        raise document.error(f"{path}.devices_per_replica", stage.devices_per_replica, "1, for any device but CUDA's")
    if configured_devices(stage) and VISIBLE in stage.env:
        raise document.error(f"{path}.env.{VISIBLE}", stage.env[VISIBLE], "devices, from which the runtime sets it")
    _check_size(stage.env, f"{path}.env", "variables", document)
    try:
        if pipeline.cluster is None:
            check_length(stage)
        stage_layout(stage, stage.most_workers if pipeline.cluster is None else 1, visible=None)
    except DeviceLayoutError as error:
        found = list(stage.devices) or stage.device
        raise document.error(f"{path}.{given}", found, f"{error.accepted}; {error.reason}") from error


def _check_size(value: Mapping[str, Any], path: str, what: str, document: Document) -> None:
    """Check that a mapping can be sent to a worker, in one control message."""
    try:
        size = len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise document.error(path, sorted(map(str, value)), f"{what} that can be sent to a worker ({error})") from error
    if size > OPTIONS_BYTES:
        raise document.error(path, "more", f"{what} of at most {OPTIONS_BYTES} bytes")


def _is_importable(package: str) -> bool:
    """Return whether there is a package of this name. A worker cannot import what a script defines."""
    return package != "__main__" and importlib.util.find_spec(package) is not None


def _convert(value: Any, schema: type[Any], path: str, document: Document) -> Any:
    """Return ``value``, found at ``path``, as ``schema``. Raises ConfigError, with the path inside ``value``."""
    try:
        return msgspec.convert(value, schema)
    except UnicodeEncodeError as error:  # a lone surrogate; msgspec does not tell where
        inner = next((inner for inner, each in leaves(value) if each == error.object), "")
        where = ".".join(part for part in (path, inner) if part)
        character = error.object[error.start : error.end]  # the rest may be a secret, as in ``env``
        raise document.error(where, character, "text in UTF-8, without lone surrogates") from error
    except msgspec.ValidationError as error:
        message, inner = split_path(error)
        where = ".".join(part for part in (path, inner) if part)
        found = _look_up(value, inner)
        if (inner.endswith("[...]") or message.endswith("as a key")) and isinstance(found, Mapping):
            # msgspec does not tell which entry is wrong. The others may be secrets, as in ``env``.
            found = {key: each for key, each in found.items() if not isinstance(each, str)} or list(found)
        if unknown := re.search(r"unknown field `(.*)`", message):
            found = _look_up(found, unknown[1])
            found = list(found) if isinstance(found, Mapping) else found  # its values may be secrets
            message = _known(unknown[1], where, _type_at(schema, inner), document)
            where = f"{where}.{unknown[1]}".lstrip(".")
        elif message.startswith("Invalid enum value"):
            message = one_of(found, get_args(_type_at(schema, inner)))
        elif missing := re.search(r"missing required field `(.*)`", message):
            where = f"{where}.{missing[1]}".lstrip(".")
            found, message = None, f"a value for {missing[1]!r}"
            if document.origin(where) in (OVERRIDES, Assignments.origin):
                message += (
                    ", as an override replaces the whole mapping; to change a part of it, name the path of the part"
                )
        elif message.startswith("expected text matching regex"):
            message = explained(error, schema, value)[0]
        raise document.error(where, found, message.removeprefix("expected ").partition(", got ")[0]) from error


def _known(unknown: str, path: str, schema: type[Section], document: Document) -> str:
    """Return in words which fields the section at ``path`` has, in place of ``unknown``."""
    known = sorted(field.encode_name for field in msgspec.structs.fields(schema))
    if not path and unknown in Stage.__struct_fields__:
        return f"one of {', '.join(known)}; for one stage: stages.NAME.{unknown}"
    is_keyword = not path and document.origin(unknown) == OVERRIDES
    return one_of(unknown, known, also=OPEN_PARAMETERS if is_keyword else ())


def _look_up(value: Any, inner: str) -> Any:
    for key in re.findall(r"[^.\[\]]+", inner):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list | tuple) and key.isdigit():
            value = value[int(key)]
        else:
            return value
    return value


def _type_at(schema: Any, inner: str) -> Any:
    for key in filter(None, inner.split(".")):
        found = next(field.type for field in msgspec.structs.fields(schema) if field.encode_name == key)
        schema = next((each for each in get_args(found) if isinstance(each, type) and issubclass(each, Section)), found)
    return schema
