"""What the handlers of the model routes share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from omni_actors.generation import Output
from omni_actors.serve.api import schemas
from omni_actors.system import OmniSystem


def open_body(
    request: Request, fields: Mapping[str, Any], schema: type[schemas.Body], *, strict: bool = True
) -> tuple[OmniSystem, schemas.Body, dict[str, Any]]:
    """Return the system, the validated body, and the engines' parameters in it. Raises HTTPError.

    fields, schema, strict: see ``schemas.parse``.
    """
    system: OmniSystem = request.app.state.system
    body, params = schemas.parse(fields, schema, strict=strict)
    schemas.require_model(body.model, system.pipeline.name)
    return system, body, params


def stop_list(body: schemas.TextBody) -> list[str] | None:
    """Return the stop texts of a request, of which a client may give one as a string."""
    return [body.stop] if isinstance(body.stop, str) else body.stop


class Completion:
    """The objects of OpenAI's chat and completion APIs for one answer.

    Args:
        prefix: of the answer's id.
        kind: the type of the objects.
        model: the model's name.

    finish_reason, usage: those that the outputs so far have.
    """

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self.created = int(time.time())
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": self.created, "model": model}
        self.finish_reason = "stop"
        self.usage: dict[str, int] | None = None

    def add(self, output: Output) -> str:
        """Take an output into account, and return the text that it adds."""
        self.finish_reason = output.data.get("finish_reason", self.finish_reason)
        if "completion_tokens" in output.data:
            prompt, completion = output.data["prompt_tokens"], output.data["completion_tokens"]
            total = prompt + completion
            self.usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
        return output.delta if isinstance(output.delta, str) else ""

    def choice(self, finish_reason: str | None, **content: Any) -> dict[str, Any]:
        """Return an object with one choice. Only that of a whole answer has a usage."""
        choice = {"index": 0, **content, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head, "choices": [choice], "usage": None}

    def usage_object(self) -> dict[str, Any]:
        """Return the last object of a stream whose client asked for the usage."""
        return {**self._head, "choices": [], "usage": self.usage}
