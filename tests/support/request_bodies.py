"""Request bodies read in this process, as the handlers read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from starlette.requests import Request
from starlette.types import Message

from omni_actors.serve.api.audio_schemas import SpeechRequest, TranscriptionRequest, TranslationRequest
from omni_actors.serve.api.form_body import read_form
from omni_actors.serve.api.image_schemas import ImageEditForm, ImageEditRequest, ImageRequest
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.response_schemas import ResponsesRequest, with_types
from omni_actors.serve.api.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    parse,
    require_model,
)
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.routes import images, transcription

SCHEMAS: dict[str, Any] = {
    "chat": ChatRequest,
    "speech": SpeechRequest,
    "completions": CompletionRequest,
    "embeddings": EmbeddingRequest,
    "images": ImageRequest,
    "responses": ResponsesRequest,
    "edits": ImageEditRequest,
}
FORMS: dict[str, Any] = {
    "transcription": (TranscriptionRequest, transcription.FILE),
    "translation": (TranslationRequest, transcription.FILE),
    "edit_form": (ImageEditForm, images.FILES),
}
MULTIPART = "multipart/form-data; boundary=XX"


def request(body: bytes, content_type: str = "application/json") -> Request:
    """Return the request that a handler gets: the complete body in one piece."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "headers": [(b"content-type", content_type.encode("latin-1"))]}, receive)


def take(path: str, body: bytes, content_type: str = MULTIPART) -> dict[str, Any]:
    """Parse a body as the handler of ``path`` does, up to what it asks the pipeline. Raises HTTPError."""
    if path in FORMS:
        schema, field = FORMS[path]
        files, fields = trio.run(read_form, request(body, content_type), field)
        asked, params = parse(fields, schema, strict=False)
        require_model(asked.model, ["studio"])
        return {**params, "files": files}
    fields = trio.run(read_json, request(body))
    asked, params = parse(with_types(fields) if path == "responses" else fields, SCHEMAS[path])
    require_model(asked.model, ["studio"])
    return params


def refusal(path: str, body: bytes, content_type: str = MULTIPART) -> dict[str, Any]:
    """Return the error object for a body that must be refused."""
    with pytest.raises(HTTPError) as caught:
        take(path, body, content_type)
    return error_object(caught.value)


def error_object(problem: HTTPError) -> dict[str, Any]:
    """Return the error object of a 4xx, which must be small and valid."""
    encoded = problem.body()
    assert 400 <= problem.status < 500
    assert len(encoded) < 4096
    error: dict[str, Any] = json.loads(encoded)["error"]
    return error


def parsed_or_refused(path: str, body: bytes, content_type: str = MULTIPART) -> None:
    """Every exception is a small 4xx error."""
    try:
        take(path, body, content_type)
    except HTTPError as problem:
        error_object(problem)
