"""A pipeline as data: the plain values of the document, and where each of them was written.

A value's path is its keys, joined by dots: "stages.llm.inputs". Errors name the origin of the value at a path, or of
the nearest mapping around it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import yaml

from omni_actors.config.schema import Pipeline
from omni_actors.errors import ConfigError

DEFAULT = "default"
"""Origin of a value that is written nowhere."""
OVERRIDES = "overrides"
"""Origin of an override from Python."""


class Assignments(dict[str, Any]):
    """Overrides from the command line. Errors name them by their flag."""

    origin = "--set"


@dataclass
class Document:
    """Attributes: values: the document. file: its source. origins: path to "FILE:LINE" or another origin."""

    values: dict[str, Any]
    file: str
    origins: dict[str, str]

    @classmethod
    def read(cls, name: str) -> Document:
        """Read the shipped pipeline ``name``, or the YAML file at that path. Raises ConfigError."""
        path = _find(name)
        values, lines = _parse(path)
        return cls(values, str(path), {key: f"{path}:{line}" for key, line in lines.items()})

    @classmethod
    def of_pipeline(cls, pipeline: Pipeline) -> Document:
        """Return the document of a pipeline that was made in Python, or read before."""
        values: dict[str, Any] = msgspec.to_builtins(pipeline)
        del values["file"]
        return cls(values, pipeline.file, {path: pipeline.file for path, _ in leaves(values)})

    def override(self, overrides: Mapping[str, Any]) -> None:
        """Replace the values at the given paths. Raises ConfigError for a path that cannot exist."""
        origin = overrides.origin if isinstance(overrides, Assignments) else OVERRIDES
        for path, value in overrides.items():
            self._assign(path, value, origin)
            for old in [old for old in self.origins if f"{old}.".startswith(f"{path}.")]:
                del self.origins[old]
            self.origins |= dict.fromkeys((path, *(leaf for leaf, _ in leaves(value, path))), origin)

    def _assign(self, path: str, value: Any, origin: str) -> None:
        *parents, last = path.split(".")
        stages = self.values.get("stages")
        if len(parents) > 1 and parents[0] == "stages" and isinstance(stages, dict) and parents[1] not in stages:
            raise ConfigError(origin, f"stages.{parents[1]}", parents[1], one_of(parents[1], stages))
        target = self.values
        for depth, key in enumerate(parents, 1):
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                accepted = "a mapping, because the override names a key inside it"
                raise ConfigError(origin, ".".join(parents[:depth]), target, accepted)
        target[last] = value

    def error(self, path: str, found: Any, accepted: str) -> ConfigError:
        """Return the error for the value at ``path``, with the origin of that value."""
        written = path.replace("[", ".[")
        while written and written not in self.origins:
            written = written.rpartition(".")[0]
        return ConfigError(self.origins[written] if written else self.file, path or "(document)", found, accepted)


def config_names() -> list[str]:
    """Return the names of the pipelines that ship with omni_actors."""
    return sorted(path.stem for path in _config_dir().glob("*.yaml"))


def one_of(found: object, accepted: Iterable[str]) -> str:
    """Return the accepted names as words, with a suggestion where one of them resembles ``found``."""
    names, typed = list(accepted), str(found)
    longer = [name for name in names if name.startswith(f"{typed.removesuffix('_s')}_")]  # step_s: step_timeout_s
    close = longer or difflib.get_close_matches(typed, names, n=1)
    return f"one of {', '.join(names)}" + (f"; did you mean {close[0]!r}?" if close else "")


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the values that are not mappings (and empty mappings), each with its path."""
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}".lstrip("."))]
    return [(path, value)]


def problem_of(error: yaml.YAMLError | ValueError) -> str:
    """Return in one line why a text is not YAML."""
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return "a tab is not allowed here; use spaces" if "'\\t'" in problem else problem


def _config_dir() -> Path:
    package = Path(str(resources.files("omni_actors")))
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def _find(name: str) -> Path:
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or os.sep in name:
        if path.is_file():
            return path
        raise ConfigError(name, "(file)", name, "the path of a YAML file that exists")
    shipped = _config_dir() / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    raise ConfigError(name, "(name)", name, f"the path of a YAML file, or {one_of(name, config_names())}")


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the document, and the line of each value by its path."""
    lines: dict[str, int] = {}
    constructor = yaml.SafeLoader("")

    def build(node: yaml.Node, prefix: str) -> Any:
        lines[prefix] = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            return constructor.construct_object(node, deep=True)
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(constructor.construct_object(key_node))
            where = f"{prefix}.{key}".lstrip(".")
            if key in built:
                raise ConfigError(f"{path}:{key_node.start_mark.line + 1}", where, key, "each key once")
            built[key] = build(value_node, where)
        return built

    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = build(node, "") if node is not None else None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a value such as the date 2026-99-99
        mark = getattr(error, "problem_mark", None)
        where, found = (f"{path}:{mark.line + 1}", text.splitlines()[mark.line]) if mark else (str(path), "")
        raise ConfigError(where, "(document)", found, f"valid YAML in UTF-8 ({problem_of(error)})") from error
    except RecursionError as error:
        raise ConfigError(str(path), "(document)", str(error), "a document that does not contain itself") from error
    if not isinstance(document, dict):
        raise ConfigError(str(path), "(document)", document, "a mapping with name and stages")
    return document, lines
