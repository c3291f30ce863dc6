"""The OpenAPI document, generated from the table of routes and the schemas of the request bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from omni_actors import __version__
from omni_actors.serve.api.schemas import ErrorObject, TranscriptionRequest

_COMPONENTS = "#/components/schemas/{name}"
JSON, EVENTS = "application/json", "text/event-stream"


class Operation(NamedTuple):
    """What a client must know of one route.

    method: "get" or "post". body: the schema of its body; None: it has none. summary: one sentence. answers: the
    content types of a success. is_public: whether it needs no key.
    """

    method: str
    body: type[msgspec.Struct] | None
    summary: str
    answers: tuple[str, ...] = (JSON,)
    is_public: bool = False


def document(operations: Mapping[str, Operation], *, has_key: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes, by path. has_key: whether the server asks for a key."""
    bodies = {path: operation.body for path, operation in operations.items() if operation.body is not None}
    references, components = msgspec.json.schema_components([*bodies.values(), ErrorObject], ref_template=_COMPONENTS)
    schemas = dict(zip(bodies, references, strict=False))
    error = {"description": "An error", "content": {JSON: {"schema": references[-1]}}}
    described: dict[str, Any] = {"schemas": components}
    if has_key:
        described["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths = {
        path: {operation.method: _operation(path, operation, schemas.get(path), error, has_key=has_key)}
        for path, operation in operations.items()
    }
    info = {"title": "omni_actors", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": described}


def _operation(
    path: str, operation: Operation, schema: dict[str, Any] | None, error: dict[str, Any], *, has_key: bool
) -> dict[str, Any]:
    content = {
        kind: {"schema": {"type": "object"} if kind == JSON else {"type": "string"}} for kind in operation.answers
    }
    success: dict[str, Any] = {"description": "Success"} | ({"content": content} if content else {})
    described: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", path)),
        "summary": operation.summary,
        "responses": {"200": success, "default": error},
    }
    if schema is not None:
        kind = "multipart/form-data" if operation.body is TranscriptionRequest else JSON
        body = {"allOf": [schema, _FILE]} if operation.body is TranscriptionRequest else schema
        described["requestBody"] = {"required": True, "content": {kind: {"schema": body}}}
    if names := re.findall(r"{(\w+)}", path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if has_key:
        described["security"] = [] if operation.is_public else [{"key": []}]
    return described


_FILE = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}, "required": ["file"]}
"""What a form has besides its fields."""
