"""A pipeline as data: the plain values of the document, and where each of them was written.

A value's path is its keys, joined by dots: "stages.llm.inputs". Errors name the origin of the value at a path, or of
the nearest mapping around it.

Rules for a document that changes another one
1. Mappings are merged key by key. Any other value, a list too, replaces the earlier one.
2. A stage that is null is removed.
3. Options belong to their engine: a stage that gets another engine keeps none of its options.
4. ``model`` and ``tokenizer`` at the top level stand for those of all stages that have one.

An override replaces the whole value at its path, also a mapping; rules 3 and 4 hold for it, too.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from omni_actors.config.schema import Pipeline
from omni_actors.errors import ConfigError
from omni_actors.stages.registry import ENGINES

SHORTHANDS = ("model", "tokenizer")
"""Keys of a stage that may stand at the top level instead (rule 4)."""
MERGE_TAG, LIST_TAG = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:seq"
LONGEST = 2**20
"""Most characters of a document's values, where each alias counts as what it stands for."""
DEFAULT = "default"
"""Origin of a value that is written nowhere."""
OVERRIDES = "overrides"
"""Origin of an override from Python."""
OPEN_PARAMETERS = ("cluster", "overrides", "spawner", "tracer_provider", "wait_ready")
"""The parameters of ``OmniSystem.open`` that are no overrides: a misspelt one is taken for an override."""


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
    def made(cls, values: dict[str, Any], origin: str) -> Document:
        """Return a document whose values all have the same origin."""
        return cls(values, origin, {path: origin for path, _ in leaves(values)})

    @classmethod
    def parsed(cls, path: Path) -> Document:
        """Return the YAML file at ``path`` as a document. Raises ConfigError."""
        values, lines = _parse(path)
        return cls(values, str(path), {key: f"{path}:{line}" for key, line in lines.items()})

    @classmethod
    def of_pipeline(cls, pipeline: Pipeline) -> Document:
        """Return the document of a pipeline that was made in Python, or read before."""
        values: dict[str, Any] = msgspec.to_builtins(pipeline)
        del values["file"]
        return cls.made(values, pipeline.file)

    def extended_by(self, other: Document) -> Document:
        """Change this document as ``other`` says, which becomes its source, and return it. Raises ConfigError."""
        self.file = other.file
        for key in SHORTHANDS:
            if key in other.values:
                self.set_all(key, other.values.pop(key), other.origins[key])
        self._merge("", self.values, other.values)
        self.origins |= {path: origin for path, origin in other.origins.items() if path not in SHORTHANDS}
        return self

    def override(self, overrides: Mapping[str, Any]) -> None:
        """Replace the values at the given paths. Raises ConfigError for a path that cannot exist."""
        origin = overrides.origin if isinstance(overrides, Assignments) else OVERRIDES
        for path, value in sorted(overrides.items(), key=_general_first):
            if path in SHORTHANDS:
                self.set_all(path, value, origin)
                continue
            if _is_engine(path):
                self._change_engine(path.removesuffix(".engine"), value)
            self.assign(path, value, origin)

    def assign(self, path: str, value: Any, origin: str) -> None:
        """Replace the value at ``path``. Raises ConfigError for a path that cannot exist."""
        *parents, last = path.split(".")
        stages = self.values.get("stages")
        if len(parents) > 1 and parents[0] == "stages" and isinstance(stages, dict) and parents[1] not in stages:
            raise ConfigError(origin, f"stages.{parents[1]}", parents[1], one_of(parents[1], stages))
        target = self.values
        for depth, key in enumerate(parents, 1):
            if key not in target:
                self.origins[".".join(parents[:depth])] = origin
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                accepted = "a mapping, because the override names a key inside it"
                raise ConfigError(origin, ".".join(parents[:depth]), target, accepted)
        target[last] = copy.deepcopy(value)  # a later override may change it, and it is the caller's
        self._forget_origins(path)
        self.origins |= dict.fromkeys((path, *(leaf for leaf, _ in leaves(value, path))), origin)

    def remove(self, path: str) -> None:
        """Remove the value at ``path``, if there is one."""
        *parents, last = path.split(".")
        target = self.values
        for key in parents:
            target = target.get(key, {})
        target.pop(last, None)
        self._forget_origins(path)

    def set_all(self, key: str, value: Any, origin: str) -> None:
        """Set ``key``, one of ``SHORTHANDS``, of all stages that it concerns. Raises ConfigError if that is unclear."""
        stages = {name: stage for name, stage in self._stages().items() if isinstance(stage, dict)}
        if key == "tokenizer":
            names = [name for name, stage in stages.items() if _has_tokenizer(stage)]
            accepted = "only in a pipeline with a stage that has a tokenizer"
        else:
            models = {name: stage["model"] for name, stage in stages.items() if stage.get("model") is not None}
            names = list(models) if all(each == next(iter(models.values())) for each in models.values()) else []
            accepted = "only in a pipeline whose stages have one model; name the stage"
            accepted += "".join(f": stages.{name}.model" for name in list(models)[:1])
        if not names:
            raise ConfigError(origin, key, value, accepted)
        for name in names:
            self.assign(f"stages.{name}.{key}", value, origin)

    def _stages(self) -> dict[str, Any]:
        stages = self.values.get("stages")
        return stages if isinstance(stages, dict) else {}

    def _merge(self, path: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        """Merge ``new`` into ``old``, this document's mapping at ``path``."""
        for key, value in new.items():
            inner = f"{path}.{key}".lstrip(".")
            if path == "stages" and value is None:
                self.remove(inner)
                continue
            if path == "stages" and isinstance(value, dict) and "engine" in value:
                self._change_engine(inner, value["engine"])
            if isinstance(value, dict) and isinstance(old.get(key), dict):
                self._merge(inner, old[key], value)
            else:
                self._forget_origins(inner)
                old[key] = value

    def _change_engine(self, stage: str, engine: Any) -> None:
        configured = self._stages().get(stage.removeprefix("stages."))
        if isinstance(configured, dict) and configured.get("engine") != engine:
            self.remove(f"{stage}.options")

    def _forget_origins(self, path: str) -> None:
        for old in [old for old in self.origins if f"{old}.".startswith(f"{path}.")]:
            del self.origins[old]

    def error(self, path: str, found: Any, accepted: str) -> ConfigError:
        """Return the error for the value at ``path``, with the origin of that value."""
        return ConfigError(self.origin(path), path or "(document)", found, accepted)

    def origin(self, path: str) -> str:
        """Return the origin of the value at ``path``, or of the nearest mapping around it."""
        written = path if path in self.origins else path.replace("[", ".").replace("]", "")
        while written and written not in self.origins:
            written = written.rpartition(".")[0]
        return self.origins[written] if written else self.file


class Loader(yaml.SafeLoader):
    """Makes values, and tells the place of one that it cannot make, such as the date 2026-99-99."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # the last two: a text that does not fit its tag
            raise yaml.constructor.ConstructorError(None, None, f"no {node.tag}: {error}", node.start_mark) from error


def one_of(found: object, accepted: Iterable[str], *, also: Iterable[str] = ()) -> str:
    """Return the accepted names as words, with a suggestion where one of them, or of ``also``, resembles ``found``."""
    names, typed = list(accepted), str(found)
    longer = [name for name in names if name.startswith(f"{typed.removesuffix('_s')}_")]  # step_s: step_timeout_s
    close = longer or difflib.get_close_matches(typed, [*names, *also], n=1)
    return f"one of {', '.join(names)}" + (f"; did you mean {close[0]!r}?" if close else "")


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the values that are not mappings (and empty mappings), each with its path."""
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}".lstrip("."))]
    return [(path, value)]


def problem_of(error: yaml.YAMLError | ValueError | RecursionError) -> str:
    """Return in one line why a text is not YAML."""
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return "a tab is not allowed here; use spaces" if "'\\t'" in problem else problem


def _is_engine(path: str) -> bool:
    return re.fullmatch(r"stages\.[^.]+\.engine", path) is not None


def _general_first(override: tuple[str, Any]) -> int:
    """Return the place of an override among others: what stands for several stages, engines, all other values."""
    return 0 if override[0] in SHORTHANDS else 1 if _is_engine(override[0]) else 2


def _has_tokenizer(stage: Mapping[str, Any]) -> bool:
    spec = ENGINES.get(str(stage.get("engine")))
    return spec is not None and spec.has_tokenizer


def _length(node: yaml.Node, known: dict[yaml.Node, int | None]) -> int:
    """Return the characters of a value, and one more for each value inside, with its aliases written out.

    known: what this function has found so far; None for what it is inside of.
    Raises ConstructorError for a value that contains itself, or has more than ``LONGEST``.
    """
    if node not in known:
        known[node] = None
        inner = (each for pair in node.value for each in pair) if isinstance(node, yaml.MappingNode) else node.value
        is_scalar = isinstance(node, yaml.ScalarNode)
        known[node] = 1 + (len(node.value) if is_scalar else sum(_length(each, known) for each in inner))
    length = known[node]
    if length is None or length > LONGEST:
        problem = "a value contains itself" if length is None else f"more than {LONGEST} characters, with all aliases"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return length


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the document, and the line of each value by its path."""
    lines: dict[str, int] = {}
    constructor = Loader("")

    def build(node: yaml.Node, prefix: str) -> Any:
        lines[prefix] = node.start_mark.line + 1
        if isinstance(node, yaml.SequenceNode) and node.tag == LIST_TAG:
            return [build(each, f"{prefix}.{i}") for i, each in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return constructor.construct_object(node, deep=True)
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = f"{path}:{key_node.start_mark.line + 1}"
            if key_node.tag == MERGE_TAG:
                raise ConfigError(place, f"{prefix}.<<".lstrip("."), "<<", "no merge of mappings (<<); repeat the keys")
            key = str(constructor.construct_object(key_node))
            where = f"{prefix}.{key}".lstrip(".")
            if key in built:
                raise ConfigError(place, where, key, "each key once")
            built[key] = build(value_node, where)
        return built

    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _length(node, {})
        document = build(node, "") if node is not None else None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        found = "".join(text.splitlines()[mark.line : mark.line + 1]) if mark else ""  # at the end there is no line
        raise ConfigError(where, "(document)", found, f"valid YAML in UTF-8 ({problem_of(error)})") from error
    except RecursionError as error:
        accepted = "a document without hundreds of levels"
        raise ConfigError(str(path), "(document)", str(error), accepted) from error
    except OSError as error:
        raise ConfigError(str(path), "(file)", error.strerror, "a file that can be read") from error
    if not isinstance(document, dict):
        raise ConfigError(str(path), "(document)", document, "a mapping with name and stages")
    return document, lines
