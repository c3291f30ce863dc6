"""Pipeline configuration: read, overridden and checked completely before any process starts.

Rules
1. Every error names the file and line, the path in the document, what was found and what is accepted.
2. A field's default is written once, in ``schema``; ``explain`` shows where each effective value comes from.
3. Checking needs no model library: the options of an engine are checked against its entry in the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from omni_actors.config.checks import pipeline_from
from omni_actors.config.document import DEFAULT, Assignments, Document, Loader, leaves, problem_of
from omni_actors.config.schema import Autoscale, Cluster, Limits, Pipeline, Restart, RoutingPolicy, Stage
from omni_actors.config.sources import config_names, read
from omni_actors.errors import ConfigError

__all__ = [
    "Autoscale",
    "Cluster",
    "Explained",
    "Limits",
    "Pipeline",
    "Restart",
    "RoutingPolicy",
    "Stage",
    "config_names",
    "explain",
    "load",
    "parse_overrides",
]


class Explained(msgspec.Struct, frozen=True):
    """One effective value of a pipeline.

    Attributes:
        path: Dotted path in the document, such as "stages.llm.threads".
        value: The value, as plain Python data.
        origin: "default", "FILE:LINE", "overrides", or "--set" for an override from the command line. What follows from
            a model has the path of its ``config.json``, and the choice of a device "this machine".
    """

    path: str
    value: Any
    origin: str


def load(config: str | Path | Pipeline, overrides: Mapping[str, Any] | None = None) -> Pipeline:
    """Read and check a pipeline.

    Args:
        config: The name of a shipped pipeline (see ``config_names``), the path of a YAML file, a model (a checkpoint
            directory, a built-in model, or "owner/name" in the local Hugging Face cache), or a ``Pipeline``.
        overrides: Dotted path to value, applied before the check: ``{"stages.llm.threads": 2}``. A value replaces
            what is at its path, also a mapping: ``{"stages": {"llm": {"threads": 2}}}`` would leave that one stage
            alone, with nothing but its threads. "model" and "tokenizer" stand for those of all stages.

    Returns:
        The pipeline. It is complete: every default is filled in.

    Raises:
        ConfigError: The file cannot be read, the model is not here or unknown, or the pipeline cannot work.

    >>> load("echo", {"stages.first.threads": 2}).stages["first"].threads
    2
    """
    return _checked(config, overrides)[0]


def explain(config: str | Path | Pipeline, overrides: Mapping[str, Any] | None = None) -> list[Explained]:
    """Return every effective value of a pipeline with its origin, engine options included.

    Takes and raises what ``load`` does.

    >>> [row for row in explain("echo", {"stages.first.threads": 2}) if row.origin == "overrides"]
    [Explained(path='stages.first.threads', value=2, origin='overrides')]
    """
    pipeline, document = _checked(config, overrides)
    values = Document.of_pipeline(pipeline).values
    for stage in pipeline.stages:
        values["stages"][stage]["options"] = pipeline.options(stage)
    return [Explained(path, value, document.origins.get(path, DEFAULT)) for path, value in leaves(values)]


def parse_overrides(assignments: Iterable[str]) -> Assignments:
    """Read the arguments of ``--set``.

    Args:
        assignments: Each "dotted.path=VALUE", where VALUE is YAML. The last assignment of a path counts.

    Raises:
        ConfigError: An argument is not an assignment, or its value is not YAML.

    >>> parse_overrides(["stages.llm.threads=2", "stages.llm.accepts=[messages]"])
    {'stages.llm.threads': 2, 'stages.llm.accepts': ['messages']}
    """
    overrides = Assignments()
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(overrides.origin, assignment, assignment, "path.to.value=VALUE")
        try:
            overrides[path] = yaml.load(value, Loader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(overrides.origin, path, value, f"valid YAML ({problem_of(error)})") from error
    return overrides


def _checked(config: str | Path | Pipeline, overrides: Mapping[str, Any] | None) -> tuple[Pipeline, Document]:
    document = Document.of_pipeline(config) if isinstance(config, Pipeline) else read(str(config))
    document.override(overrides or {})
    return pipeline_from(document), document
