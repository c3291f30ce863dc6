"""POST /v1/completions: the older text API. The prompt becomes one user message, through the model's chat template."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.generation import Generation
from omni_actors.serve.access.admission import SCOPE_KEY
from omni_actors.serve.api import replies
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.schemas import CompletionRequest, parse, require_model
from omni_actors.system import OmniSystem


async def completions(request: Request) -> Response:
    """Continue a prompt, as one JSON object or as server-sent events."""
    system: OmniSystem = request.app.state.system
    body, params = parse(await read_json(request), CompletionRequest)
    require_model(body.model, system.pipeline.name)
    given = {"max_tokens": body.max_tokens, "stop": [body.stop] if isinstance(body.stop, str) else body.stop}
    params |= {name: value for name, value in given.items() if value is not None}
    request.scope[SCOPE_KEY].release()
    with renaming({"input": "prompt", "messages": "prompt"}):
        generation = system.generate(body.prompt, modalities=("text",), **params)
        if body.stream:
            return await replies.StreamedReply(generation, _events(body, generation)).start()
        with replies.collecting(generation):
            return replies.WholeReply(generation, replies.JSONReply(await _whole(body, generation)))


def _envelope(body: CompletionRequest) -> dict[str, Any]:
    now = int(time.time())
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": now, "model": body.model}


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}


async def _whole(body: CompletionRequest, generation: Generation) -> dict[str, Any]:
    text, finish_reason, usage = "", "stop", None
    async for output in generation:
        text += output.delta if isinstance(output.delta, str) else ""
        finish_reason = output.data.get("finish_reason", finish_reason)
        usage = replies.usage_of(output) or usage
    return {**_envelope(body), "choices": [_choice(text, finish_reason)], "usage": usage}


async def _events(body: CompletionRequest, generation: Generation) -> replies.Pieces:
    envelope, finish_reason, usage = _envelope(body), "stop", None
    async for output in generation:
        finish_reason = output.data.get("finish_reason", finish_reason)
        usage = replies.usage_of(output) or usage
        if isinstance(output.delta, str) and output.delta:
            yield replies.event({**envelope, "choices": [_choice(output.delta, None)], "usage": None})
    yield replies.event({**envelope, "choices": [_choice("", finish_reason)], "usage": None})
    if body.stream_options.include_usage:
        yield replies.event({**envelope, "choices": [], "usage": usage})
    yield replies.DONE
