"""What the types of a pipeline do not express: the graph of its stages, and the options of each engine."""

from __future__ import annotations

import graphlib
import importlib.util

import msgspec

from omni_actors.config.convert import convert
from omni_actors.config.document import Document, one_of
from omni_actors.config.schema import Pipeline
from omni_actors.stages.registry import ENGINES

OPTIONS_BYTES = 64 * 1024
"""Most bytes of a stage's encoded options: they travel in one control message."""


def check(pipeline: Pipeline, document: Document) -> None:
    """Raise ConfigError for the first thing in ``pipeline`` that cannot work."""
    _check_sources(pipeline, document)
    _check_outputs(pipeline, document)
    for stage in pipeline.stages:
        _check_engine(pipeline, stage, document)


def _check_sources(pipeline: Pipeline, document: Document) -> None:
    stages = pipeline.stages
    for name, stage in stages.items():
        for i, source in enumerate(stage.inputs):
            place = f"stages.{name}.inputs.{i}"
            if source not in stages:
                raise document.error(place, source, f"another stage: {one_of(source, sorted({*stages} - {name}))}")
            if source in stage.inputs[:i]:
                raise document.error(place, source, "each stage once")
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


def _check_engine(pipeline: Pipeline, name: str, document: Document) -> None:
    stage, place, spec = pipeline.stages[name], f"stages.{name}", pipeline.spec(name)
    module, is_path, _ = stage.engine.partition(":")
    if not is_path and stage.engine not in ENGINES:
        accepted = f'"package.module:factory", or {one_of(stage.engine, sorted(ENGINES))}'
        raise document.error(f"{place}.engine", stage.engine, accepted)
    package = module.partition(".")[0]
    if is_path and importlib.util.find_spec(package) is None:
        raise document.error(f"{place}.engine", stage.engine, f"an import path; there is no package {package!r}")
    if len(msgspec.msgpack.encode(stage.options)) > OPTIONS_BYTES:
        raise document.error(f"{place}.options", "more", f"options of at most {OPTIONS_BYTES} bytes")
    if spec.needs_model and stage.model is None:
        raise document.error(f"{place}.model", None, "a model, which this engine needs")
    if spec.options is not None:
        convert(stage.options, spec.options, f"{place}.options", document)
    if spec.params is not None:
        convert(stage.defaults, spec.params, f"{place}.defaults", document)
