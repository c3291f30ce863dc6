"""From the values of a document to typed sections. msgspec checks the types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from omni_actors.config.document import Document, one_of
from omni_actors.config.schema import NAME_PATTERN, Pipeline, Sections, Stage
from omni_actors.protocol.messages import CLIENT
from omni_actors.validation import split_place


def pipeline_from(document: Document) -> Pipeline:
    """Return the pipeline of ``document``. Raises ConfigError for the first value that has not the right type."""
    stages = document.values.get("stages")
    sections: Sections = convert({**document.values, "stages": {}}, Sections, "", document)
    if not isinstance(stages, dict) or not stages:
        raise document.error("stages", stages, "a mapping from stage names to stages")
    for name in stages:
        if not isinstance(name, str) or not re.match(NAME_PATTERN, name) or name == CLIENT:
            accepted = f"a stage name that matches {NAME_PATTERN} and is not {CLIENT!r}"
            raise document.error(f"stages.{name}", name, accepted)
    typed = {name: convert(stage, Stage, f"stages.{name}", document) for name, stage in stages.items()}
    return Pipeline(**{**msgspec.structs.asdict(sections), "stages": typed, "file": document.file})


def convert(value: Any, schema: type[Any], place: str, document: Document) -> Any:
    """Return ``value``, found at ``place``, as ``schema``. Raises ConfigError, with the place inside ``value``."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        message, inner = split_place(error)
        where = ".".join(part for part in (place, inner) if part)
        found = _look_up(value, inner)
        if unknown := re.search(r"unknown field `(.*)`", message):
            known = sorted(field.encode_name for field in msgspec.structs.fields(_type_at(schema, inner)))
            where, found, message = f"{where}.{unknown[1]}".lstrip("."), unknown[1], one_of(unknown[1], known)
        elif message.startswith("Invalid enum value"):
            message = one_of(found, get_args(_type_at(schema, inner)))
        elif missing := re.search(r"missing required field `(.*)`", message):
            found, message = None, f"a value for {missing[1]!r}"
        raise document.error(where, found, message.removeprefix("expected ").partition(", got ")[0]) from error


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
        schema = next(field.type for field in msgspec.structs.fields(schema) if field.encode_name == key)
    return schema
