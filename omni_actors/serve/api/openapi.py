"""The OpenAPI document, generated from the schemas of the request bodies."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from omni_actors import __version__
from omni_actors.serve.api.schemas import (
    ChatRequest,
    CompletionRequest,
    ErrorObject,
    SpeechRequest,
    TranscriptionRequest,
)

_BODIES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (ChatRequest, "application/json"),
    "/v1/completions": (CompletionRequest, "application/json"),
    "/v1/audio/speech": (SpeechRequest, "application/json"),
    "/v1/audio/transcriptions": (TranscriptionRequest, "multipart/form-data"),
}
"""The body of each POST route, and its content type."""
_COMPONENTS = "#/components/schemas/{name}"


def document(posts: Collection[str], gets: Collection[str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes with these paths. Raises KeyError for a POST without a schema."""
    schemas = [_BODIES[path][0] for path in posts]
    references, components = msgspec.json.schema_components([*schemas, ErrorObject], ref_template=_COMPONENTS)
    error = {"description": "An error", "content": {"application/json": {"schema": references[-1]}}}
    responses = {"200": {"description": "Success"}, "default": error}
    paths: dict[str, Any] = {path: {"get": {"responses": responses}} for path in gets}
    for path, schema in zip(posts, references, strict=False):
        body = {"required": True, "content": {_BODIES[path][1]: {"schema": schema}}}
        paths[path] = {"post": {"requestBody": body, "responses": responses}}
    for path in paths:
        if "{" in path:
            name = path.partition("{")[2].partition("}")[0]
            parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            paths[path]["parameters"] = [parameter]
    info = {"title": "omni_actors", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
