"""POST /v1/completions: the older text API. The prompt becomes one user message, through the model's chat template."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.generation import Generation
from omni_actors.serve.access.admission import SCOPE_KEY
from omni_actors.serve.api import responses
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.schemas import CompletionRequest
from omni_actors.serve.routes.common import Completion, open_body, stop_list


async def completions(request: Request) -> Response:
    """Continue a prompt, as one JSON object or as server-sent events."""
    system, body, params = open_body(request, await read_json(request), CompletionRequest)
    given = {"max_tokens": body.max_tokens, "stop": stop_list(body)}
    params |= {name: value for name, value in given.items() if value is not None}
    request.scope[SCOPE_KEY].release()
    completion = Completion("cmpl", "text_completion", body.model)
    with renaming({"input": "prompt", "messages": "prompt"}):
        generation = system.generate(body.prompt, modalities=("text",), **params)
        if body.stream:
            events = _events(completion, generation, include_usage=body.stream_options.include_usage)
            return await responses.StreamedResponse(generation, events).start()
        with responses.collecting(generation):
            text = "".join([completion.add(output) async for output in generation])
            whole = completion.choice(completion.finish_reason, text=text) | {"usage": completion.usage}
            return responses.WholeResponse(generation, responses.JSONResponse(whole))


async def _events(completion: Completion, generation: Generation, *, include_usage: bool) -> responses.Pieces:
    async for output in generation:
        if text := completion.add(output):
            yield responses.event(completion.choice(None, text=text))
    yield responses.event(completion.choice(completion.finish_reason, text=""))
    if include_usage:
        yield responses.event(completion.usage_object())
    yield responses.DONE
