"""The OpenAPI document, generated from the schemas of the request bodies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from omni_actors import __version__
from omni_actors.serve.api.schemas import ErrorObject, TranscriptionRequest

_COMPONENTS = "#/components/schemas/{name}"


def document(posts: Mapping[str, type[msgspec.Struct]], gets: Collection[str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes with these paths. posts: the schema of each path's body."""
    schemas = [*posts.values(), ErrorObject]
    references, components = msgspec.json.schema_components(schemas, ref_template=_COMPONENTS)
    error = {"description": "An error", "content": {"application/json": {"schema": references[-1]}}}
    responses = {"200": {"description": "Success"}, "default": error}
    paths: dict[str, Any] = {path: {"get": {"responses": responses}} for path in gets}
    for (path, schema), reference in zip(posts.items(), references, strict=False):
        content_type = "multipart/form-data" if schema is TranscriptionRequest else "application/json"
        body = {"required": True, "content": {content_type: {"schema": reference}}}
        paths[path] = {"post": {"requestBody": body, "responses": responses}}
    for path in paths:
        if "{" in path:
            name = path.partition("{")[2].partition("}")[0]
            parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            paths[path]["parameters"] = [parameter]
    info = {"title": "omni_actors", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
