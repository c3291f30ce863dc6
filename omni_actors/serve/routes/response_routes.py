"""POST /v1/responses; GET and DELETE /v1/responses/{id}; POST /v1/responses/{id}/cancel.

Rules
1. A request is a chat request in other words: ``response_input`` translates it, and ``chat.begin`` begins it.
2. The server keeps a response and its conversation, files included, unless ``store`` is false (``response_store``). The
   object of a response for which there is no room has ``store: false``. A stored conversation and the request that
   continues it have the bounds of one body together, in bytes and values.
3. Every key may read every response: a server has one key. Without a key, the id alone protects a response, so nothing
   else shows it: its request has another name (``common.request_name``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.errors import RequestError
from omni_actors.serve.access.admission import SCOPE_KEY, AdmissionTicket
from omni_actors.serve.api import responses
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.api.json_body import MAX_VALUES, read_json
from omni_actors.serve.api.response_schemas import Message, ResponsesRequest, with_types
from omni_actors.serve.api.schemas import ChatMessage
from omni_actors.serve.http.errors import HTTPError, bad_request, quote_value
from omni_actors.serve.response_store import Conversation, ResponseStore, RunningResponse
from omni_actors.serve.routes import chat
from omni_actors.serve.routes.chat_answer import ChatCompletion
from omni_actors.serve.routes.common import STORED_PREFIX, open_body
from omni_actors.serve.routes.response_answer import ResponseAnswer
from omni_actors.serve.routes.response_input import chat_request, messages_of

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "tool_choice.function.name": "tool_choice.name",
}
"""The names of fields in this API, by those of the chat API."""
_HISTORY = "previous_response_id"
"""The field that earlier messages are from."""
_CALL = re.compile(r"input\[(?P<at>\d+)\]\.tool_calls(?:\[(?P<number>\d+)\]\.function\.arguments)?")
"""The calls of a message, or the arguments of one of them. Here, each call is an item of its own."""


async def create(request: Request) -> Response:
    """Answer a conversation of items, as one JSON object or as server-sent events."""
    store: ResponseStore = request.app.state.responses
    address = request.scope["client"][0]
    answer, completion, generations, conversation = await _read(request)

    def keep() -> bytes:
        if conversation is not None:
            kept = conversation.extended([answer.message()])
            if not store.put(answer.id, answer.object(), kept, address):
                answer.set_not_stored()
        return answer.last_event()

    def fail(error: RequestError) -> bytes:
        return b"".join([*answer.fail(error), keep()])

    pieces = _events(answer, completion, generations, store, keep)
    with renaming(completion.names):
        if completion.is_streamed:
            return await responses.StreamedResponse(generations, pieces, on_late_error=fail).start()
        with responses.collecting(generations):
            async for _ in pieces:
                pass
            return responses.WholeResponse(generations, responses.JSONResponse(answer.object()))


async def _read(request: Request) -> tuple[ResponseAnswer, ChatCompletion, Generations, Conversation | None]:
    """Read a request, and begin the generation of its answer (rule 4). Raises HTTPError.

    The last value is the conversation to store; None if the client wants none stored.
    """
    system, body, params = open_body(request, with_types(await read_json(request)), ResponsesRequest)
    _require_possible(body)
    history = _history(request, body)
    placed = messages_of(body)
    conversation = history.extended([message for _, message in placed])
    if history.messages and conversation.values > MAX_VALUES:
        message = f"{_HISTORY}: the conversation and the request have more than {MAX_VALUES} values in all"
        raise bad_request(f"{message}, as a body counts them", _HISTORY, "conversation_too_large")
    instructions = [("instructions", ChatMessage(role="system", content=body.instructions))]
    messages = [*instructions[: body.instructions is not None]]
    messages += [(_HISTORY, message) for message in history.messages] + placed
    asked = chat_request(body, [message for _, message in messages])
    params |= {name: getattr(body, name) for name in ("temperature", "top_p") if getattr(body, name) is not None}
    with _naming_items(body):
        completion, generations = await chat.begin(
            request, system, asked, params, [param for param, _ in messages], STORED_PREFIX, _NAMES
        )
    return ResponseAnswer(body, completion), completion, generations, conversation if body.store else None


@contextmanager
def _naming_items(body: ResponsesRequest) -> Iterator[None]:
    """Let an error about a field of the chat API leave the block as one about the client's own field."""
    try:
        yield
    except HTTPError as error:
        if error.param is None or (param := _own_name(error.param, body)) == error.param:
            raise
        raise bad_request(error.message.replace(error.param, param, 1), param, error.code) from error


def _own_name(param: str, body: ResponsesRequest) -> str:
    """Return the client's name of a field of the chat API, in which the messages have the names of their items."""
    if param.startswith(f"{_HISTORY}."):
        return _HISTORY
    if found := _CALL.fullmatch(param):
        at, number = int(found["at"]), found["number"]
        item = at + int(number or 0) + isinstance(body.input[at], Message)
        return f"input[{item}].{'type' if number is None else 'arguments'}"
    if param.endswith(".image_url.url"):
        return param.removesuffix(".url")
    return _NAMES.get(param, param)


def _require_possible(body: ResponsesRequest) -> None:
    """Refuse what the server does not do. Raises HTTPError."""
    if body.background:
        message = "background: a response ends with its connection; accepted: false"
        raise bad_request(message, "background", "unsupported_parameter")
    if body.modalities and "audio" in body.modalities and not body.stream:
        message = "modalities: 'audio' needs stream: true, because OpenAI's objects of responses have no audio"
        raise bad_request(message, "modalities", "unsupported_parameter")


def _history(request: Request, body: ResponsesRequest) -> Conversation:
    """Return the conversation that the request continues. Its bytes count as those of the body. Raises HTTPError."""
    if body.previous_response_id is None:
        return Conversation()
    store: ResponseStore = request.app.state.responses
    ticket: AdmissionTicket = request.scope[SCOPE_KEY]
    found = store.get(body.previous_response_id)
    if found is None:
        message = f"previous_response_id: there is no response {quote_value(body.previous_response_id)}"
        raise bad_request(message, "previous_response_id", "previous_response_not_found")
    size = found.conversation.bytes
    if ticket.bytes + size > ticket.max_bytes:
        message = f"previous_response_id: the conversation and the request exceed {ticket.max_bytes} bytes"
        raise bad_request(message, "previous_response_id", "conversation_too_large")
    ticket.add_bytes(size)
    return found.conversation


async def _events(
    answer: ResponseAnswer,
    completion: ChatCompletion,
    generations: Generations,
    store: ResponseStore,
    keep: Callable[[], bytes],
) -> responses.Pieces:
    """Yield the events. keep: is called when the answer is complete, and returns the last event."""

    def cancel() -> None:
        answer.is_cancelled = True
        generations.abort()

    has_begun = False
    with store.run(answer.id, RunningResponse(answer.object, cancel)):
        async for _, output in generations.outputs():
            addition = await completion.convert(0, output)
            begin = [] if has_begun else answer.begin()  # before it, an error is an ordinary error response
            has_begun = True
            for event in begin + answer.add(addition):
                yield event
        begin = [] if has_begun else answer.begin()
        last = begin + await answer.finish()
        for event in [*last, keep()]:
            yield event


async def retrieve(request: Request) -> Response:
    """Return a response that the server has stored, or whose stream runs."""
    store: ResponseStore = request.app.state.responses
    id = request.path_params["response_id"]
    if request.query_params.get("stream", "false").lower() == "true":
        raise bad_request("stream: a stored response is not streamed again; accepted: false", "stream")
    if (running := store.running(id)) is not None:
        return responses.JSONResponse(running.body())
    if (stored := store.get(id)) is None:
        raise _unknown(id)
    return Response(stored.body, media_type="application/json")


async def delete(request: Request) -> Response:
    """Delete a stored response."""
    store: ResponseStore = request.app.state.responses
    id = request.path_params["response_id"]
    if not store.delete(id):
        raise _unknown(id)
    return responses.JSONResponse({"id": id, "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """Cancel a response whose stream runs."""
    store: ResponseStore = request.app.state.responses
    id = request.path_params["response_id"]
    running = store.running(id)
    if running is None and store.get(id) is None:
        raise _unknown(id)
    if running is None or running.body()["status"] != "in_progress":  # its last events may still be sent
        raise bad_request("this response has ended, so it cannot be cancelled", "response_id", "response_ended")
    running.cancel()
    found: dict[str, Any] = running.body()
    return responses.JSONResponse(found | {"status": "cancelled"})


def _unknown(id: str) -> HTTPError:
    return HTTPError(404, f"there is no response {quote_value(id)}", param="response_id", code="response_not_found")
