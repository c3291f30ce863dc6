"""POST /v1/completions: the older text API. The model continues a raw prompt, which bypasses the chat template."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.outputs import Output
from omni_actors.serve.access.admission import SCOPE_KEY
from omni_actors.serve.api import responses
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.logprobs import completion_logprobs
from omni_actors.serve.api.schemas import CompletionRequest
from omni_actors.serve.routes.common import (
    SESSION_HEADER,
    Completion,
    begin_choices,
    leave_out_special_tokens,
    open_body,
    raw_prompts,
    session_of,
    text_parameters,
)


class _TextCompletion(Completion):
    """The objects of a response to ``body``."""

    def __init__(self, body: CompletionRequest, prompts: int) -> None:
        super().__init__("cmpl-", "text_completion", body, prompts)
        self._offsets = [0] * self.count
        """The characters of each choice's tokens that had log probabilities."""

    def add_logprobs(self, index: int, output: Output) -> dict[str, Any] | None:
        """Return the log probabilities of an output's tokens."""
        if "logprobs" not in output.data:
            return None
        found = completion_logprobs(output.data["logprobs"], self._offsets[index])
        self._offsets[index] += sum(map(len, found["tokens"]))
        return found


async def completions(request: Request) -> Response:
    """Continue one or several prompts, as one JSON object or as server-sent events."""
    system, body, params = open_body(request, await read_json(request), CompletionRequest)
    given = [*text_parameters(body), ("logprobs", "logprobs", body.logprobs)]
    params |= {name: value for name, _, value in given if value is not None}
    if not body.add_special_tokens:
        leave_out_special_tokens(params)
    raw = dict.fromkeys(("input", "messages", "prompt_token_ids"), "prompt")
    names = {
        **raw,
        "modalities": "model",
        "session": SESSION_HEADER,
        **{name: client_name for name, client_name, _ in given},
    }
    prompts, session = raw_prompts(body.prompt, "prompt"), session_of(request)
    completion = _TextCompletion(body, len(prompts))
    with renaming(names):
        submits = [
            partial(system.generate, prompt, modalities=("text",), session=session, **params) for prompt in prompts
        ]
        generations = await begin_choices(request.scope[SCOPE_KEY], system, body, submits, completion.id)
        if body.stream:
            events = _events(completion, generations, include_usage=body.stream_options.include_usage)
            return await responses.StreamedResponse(generations, events).start()
        with responses.collecting(generations):
            return responses.WholeResponse(generations, await _whole(completion, generations))


async def _whole(completion: _TextCompletion, generations: Generations) -> Response:
    texts = [""] * completion.count
    logprobs: dict[int, dict[str, Any]] = {}
    async for index, output in generations.outputs():
        texts[index] += completion.add(index, output)
        if found := completion.add_logprobs(index, output):
            for key, values in found.items():
                logprobs.setdefault(index, {}).setdefault(key, []).extend(values)
    reasons = completion.finish_reasons
    choices = [
        completion.choice(index, reasons[index], text=text, logprobs=logprobs.get(index))
        for index, text in enumerate(texts)
    ]
    return responses.JSONResponse(completion.whole(choices))


async def _events(completion: _TextCompletion, generations: Generations, *, include_usage: bool) -> responses.Pieces:
    async for index, output in generations.outputs():
        text, logprobs = completion.add(index, output), completion.add_logprobs(index, output)
        if text or logprobs:
            yield responses.event(completion.chunk(index, text=text, logprobs=logprobs))
    for index, reason in enumerate(completion.finish_reasons):
        yield responses.event(completion.chunk(index, reason, text=""))
    if include_usage:
        yield responses.event(completion.usage_object())
    yield responses.DONE
