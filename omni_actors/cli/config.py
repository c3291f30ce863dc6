"""``omni-actors config``: list the shipped pipelines, explain one, and print the schema of their files."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich import filesize

from omni_actors import config as configuration
from omni_actors.cli import cluster_picture
from omni_actors.command_line import PIPELINE, BadConfig, click_errors, echo_json, override_option
from omni_actors.config import Explained, Pipeline, Stage
from omni_actors.config.devices import DeviceLayoutError, Layout, stage_layout
from omni_actors.config.json_schema import json_schema
from omni_actors.errors import ConfigError, NoPlace
from omni_actors.installed import is_importable
from omni_actors.stages import assets, memory
from omni_actors.system import machine


@click.group("config")
def config_group() -> None:
    """List and explain pipelines, and print the schema of their files."""


@config_group.command("list", short_help="Print the names of the shipped pipelines.")
def list_configs() -> None:
    """Print the names of the pipelines that ship with omni_actors."""
    names = configuration.config_names()
    width = max(map(len, names))
    for name in names:
        click.echo(f"{name:{width}}  {configuration.load(name).description}")


@config_group.command("schema", short_help="Print the JSON schema of a pipeline file.")
def schema() -> None:
    """Print the JSON schema of a pipeline file, with which editors check and complete it."""
    echo_json(msgspec.json.format(msgspec.json.encode(json_schema()), indent=1).decode())


@config_group.command("explain", short_help="Print what a pipeline's values are, and why.")
@click.argument("config", metavar="[PIPELINE]", default="voice", type=PIPELINE)
@click.option("--all", "show_all", is_flag=True, help="Print the default values too.")
@click.option("--json", "as_json", is_flag=True, help="Print every value, as a JSON array of {path, value, origin}.")
@click.option(
    "--cluster",
    "nodes_file",
    metavar="NODES",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Print on which of the nodes in this YAML file the workers would run, instead of the values.",
)
@override_option
def explain(config: str, show_all: bool, as_json: bool, nodes_file: Path | None, assignments: tuple[str, ...]) -> None:
    """Print the configured values of PIPELINE, their origin, and the memory that the workers need on each device.

    PIPELINE is a pipeline (a name or a file) or a model (a directory or a name on a hub). The memory is that of the
    weights and of the full key-value cache, as the checkpoint's files state it; bytes in JSON. What this machine lacks
    to run the pipeline is reported on standard error, with exit code 2.

    NODES lists the nodes of a cluster, the parent's first: [{name: here}, {name: g1, labels: [role=gpu], gpus: 2}].
    With --json, each worker is an object {worker, node, devices}.
    """
    with click_errors():
        overrides = configuration.parse_overrides(assignments)
        rows = configuration.explain(config, overrides)
        pipeline = configuration.load(config, overrides)
        if nodes_file is not None:
            _explain_cluster(pipeline, nodes_file, as_json=as_json)
            return
    needs = _layout(pipeline) + _memory(pipeline)
    if as_json:
        echo_json(msgspec.json.encode(rows + needs).decode())
    else:
        shown = [row for row in rows if show_all or row.origin != "default"]
        lines = [(row.path, msgspec.json.encode(row.value).decode(), _relative(row.origin)) for row in shown]
        lines += [(row.path, _words(row.value), row.origin) for row in needs]
        width = max(len(path) for path, _, _ in lines)
        for path, value, origin in lines:
            click.echo(f"{path:{width}}  {value:32}  {origin}")
    if problems := [*machine.problems(pipeline), *_device_problems(pipeline), *_engine_problems(pipeline)]:
        raise BadConfig("\n".join(map(str, problems)))


def _explain_cluster(pipeline: Pipeline, nodes_file: Path, *, as_json: bool) -> None:
    """Print the placement of the workers. Raises ConfigError, click.ClickException."""
    nodes = cluster_picture.read_nodes(nodes_file)
    try:
        if as_json:
            echo_json(msgspec.json.encode(cluster_picture.placement_rows(pipeline, nodes)).decode())
        else:
            cluster_picture.print_picture(pipeline, nodes)
    except NoPlace as error:
        raise BadConfig(str(error)) from error


def _words(value: Any) -> str:
    """Return bytes, or the names of devices, for people."""
    return "unknown" if value is None else filesize.decimal(value) if isinstance(value, int) else ", ".join(value)


def _layout(pipeline: Pipeline) -> list[Explained]:
    """Return the devices of each worker that has some."""
    return [
        Explained(f"stages.{name}.workers.{number}.devices", _labels(worker), "the layout of the stage's devices")
        for name, stage in pipeline.stages.items()
        for number, worker in enumerate(_devices_here(stage))
        if worker
    ]


def _devices_here(stage: Stage) -> Layout:
    """Return the devices of each worker of a stage on one machine; none if it has more workers than that allows."""
    try:
        return stage_layout(stage, stage.workers, visible=None)
    except DeviceLayoutError:  # ``devices`` are those of one node of a cluster
        return ()


def _labels(devices: Iterable[str]) -> list[str]:
    """Return devices as torch names them, where they are places among the visible ones."""
    return [f"cuda:{device}" if device.isdigit() else device for device in devices]


def _memory(pipeline: Pipeline) -> list[Explained]:
    """Return the memory of each stage's worker that has a model, and the sum for each device, in bytes."""
    rows: list[Explained] = []
    totals: dict[str, int] = {}
    uncounted: list[str] = []
    for name, stage in pipeline.stages.items():
        if stage.model is None:
            continue
        try:
            need = memory.count(stage.engine, assets.resolve(stage.model), pipeline.options(name))
        except (assets.ModelNotFound, memory.Uncounted) as error:
            rows.append(Explained(f"stages.{name}.memory", None, error.reason))
            uncounted.append(name)
        else:
            rows.append(Explained(f"stages.{name}.memory.weights", need.weights, stage.model))
            if need.cache is not None:
                rows.append(Explained(f"stages.{name}.memory.cache", need.cache, "at full use"))
            used = need.weights + (need.cache or 0)
            for worker in _devices_here(stage):
                for device in _labels(worker) or [stage.device]:
                    totals[device] = totals.get(device, 0) + used // stage.devices_per_replica
    origin = "total of all workers" + (f", without {', '.join(uncounted)}" if uncounted else "")
    return rows + [Explained(f"memory.{device}", total, origin) for device, total in totals.items()]


def _device_problems(pipeline: Pipeline) -> Iterator[ConfigError]:
    """Yield an error for each stage whose device this machine lacks."""
    others = {name: stage for name, stage in pipeline.stages.items() if stage.device != "cpu"}
    if not others or not is_importable("torch"):
        return
    import torch  # takes seconds: only here, and only for a pipeline that names a device

    for name, stage in others.items():
        try:
            torch.device(stage.device)
        except RuntimeError:
            yield ConfigError(
                pipeline.file, f"stages.{name}.device", stage.device, 'a device such as "cpu" or "cuda:0"'
            )
            continue
        present = torch.cuda.device_count()
        places = [device for worker in _devices_here(stage) for device in worker]
        if any(place.isdigit() and int(place) >= present for place in places):
            path, found = ("devices", list(stage.devices)) if stage.devices else ("device", stage.device)
            accepted = f"a device of this machine, which has {present} CUDA device{'s' * (present != 1)}"
            accepted += f"; its {stage.workers} workers take {', '.join(_labels(places))}" * (len(places) > 1)
            yield ConfigError(pipeline.file, f"stages.{name}.{path}", found, accepted)


def _engine_problems(pipeline: Pipeline) -> Iterator[ConfigError]:
    """Yield an error for each engine that is named by import path and cannot be imported."""
    for name, stage in pipeline.stages.items():
        module, is_path, factory = stage.engine.partition(":")
        if not is_path:
            continue
        try:
            if callable(getattr(importlib.import_module(module), factory, None)):
                continue
            reason = f"{factory!r} is not a callable of {module}"
        except Exception as error:  # noqa: BLE001 - the module is the user's own code
            reason = f"{type(error).__name__}: {error}"
        yield ConfigError(pipeline.file, f"stages.{name}.engine", stage.engine, f"an engine factory ({reason})")


def _relative(origin: str) -> str:
    """Return ``origin`` with its file relative to the working directory, if the file is below it."""
    path = Path(origin)
    try:
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else origin
    except OSError:  # the working directory was deleted
        return origin
