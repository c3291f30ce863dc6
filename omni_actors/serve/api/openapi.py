"""The OpenAPI document, generated from the table of routes and the schemas of the request bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from omni_actors import __version__
from omni_actors.serve.api.form_body import FileField
from omni_actors.serve.api.schemas import ErrorObject

_COMPONENTS = "#/components/schemas/{name}"
JSON, EVENTS = "application/json", "text/event-stream"


class Form(NamedTuple):
    """A multipart form. fields: the schema of the fields except the files, which are in ``files``."""

    fields: type[msgspec.Struct]
    files: FileField


class Operation(NamedTuple):
    """What a client must know of one route.

    method: "get", "post" or "delete". body: the schema of its JSON body, and form: its form; None: it accepts none.
    summary: one sentence. answers: the content types of a success. is_public: whether it needs no key.
    """

    method: str
    body: type[msgspec.Struct] | None
    summary: str
    form: Form | None = None
    answers: tuple[str, ...] = (JSON,)
    is_public: bool = False


def document(operations: Sequence[tuple[str, Operation]], *, has_key: bool, needs_model: bool = True) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the operations, each with its path.

    has_key: whether the server asks for a key. needs_model: whether a body has to name its model.
    """
    bodies = [operation.body for _, operation in operations if operation.body is not None]
    forms = [operation.form.fields for _, operation in operations if operation.form is not None]
    structs: list[type[msgspec.Struct]] = [ErrorObject, *bodies, *forms]
    references, components = msgspec.json.schema_components(structs, ref_template=_COMPONENTS)
    schemas = dict(zip(structs, references, strict=True))
    if not needs_model:
        for schema in components.values():
            if "model" in schema.get("required", ()):
                schema["required"].remove("model")
    described: dict[str, Any] = {"schemas": dict(sorted(components.items()))}
    if has_key:
        described["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, dict[str, Any]] = {}
    for path, operation in operations:
        described_operation = _operation(path, operation, schemas, has_key=has_key)
        if path in paths:
            described_operation["operationId"] += f"_{operation.method}"
        paths.setdefault(path, {})[operation.method] = described_operation
    info = {"title": "omni_actors", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": described}


def _operation(
    path: str, operation: Operation, schemas: Mapping[type[msgspec.Struct], dict[str, Any]], *, has_key: bool
) -> dict[str, Any]:
    error = {"description": "An error", "content": {JSON: {"schema": schemas[ErrorObject]}}}
    content = {
        kind: {"schema": {"type": "object"} if kind == JSON else {"type": "string"}} for kind in operation.answers
    }
    success: dict[str, Any] = {"description": "Success"} | ({"content": content} if content else {})
    described: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", path)),
        "summary": operation.summary,
        "responses": {"200": success, "default": error},
    }
    bodies = {} if operation.body is None else {JSON: {"schema": schemas[operation.body]}}
    if operation.form is not None:
        fields = {"allOf": [schemas[operation.form.fields], _files(operation.form.files)]}
        bodies["multipart/form-data"] = {"schema": fields}
    if bodies:
        described["requestBody"] = {"required": True, "content": bodies}
    if names := re.findall(r"{(\w+)}", path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if has_key:
        described["security"] = [] if operation.is_public else [{"key": []}]
    return described


def _files(field: FileField) -> dict[str, Any]:
    """Return the schema of a form's files."""
    name, file = field.names[0], {"type": "string", "format": "binary"}
    schema = file if field.most == 1 else {"type": "array", "items": file, "minItems": 1, "maxItems": field.most}
    return {"type": "object", "properties": {name: schema}, "required": [name]}
