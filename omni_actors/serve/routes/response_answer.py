"""The answer to a request to /v1/responses: its object, and the events of its stream.

Rules
1. One code makes both: a whole response is the object after the last event.
2. The output has a message for each text, and an item for each call of a tool, in the order of the model's text. One
   item is open at a time.
3. A spoken answer has its transcript as the text of its message. The sound is in the stream only: OpenAI's objects have
   no place for it.
4. Events are numbered from 0 without gaps.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from omni_actors.errors import RequestError
from omni_actors.serve.api import responses, schemas
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.api.response_schemas import PlainFormat, ResponsesRequest
from omni_actors.serve.api.tools import FunctionCall, ToolCall
from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.routes.chat_answer import Addition, ChatCompletion

_ECHOED = (
    *("model", "instructions", "previous_response_id", "store", "background", "max_output_tokens", "metadata"),
    *("parallel_tool_calls", "temperature", "tool_choice", "top_logprobs", "top_p", "truncation"),
)
"""The fields of the request that the object repeats as they are."""


class ResponseAnswer:
    """Collects one answer. completion: converts the outputs of its generation."""

    def __init__(self, body: ResponsesRequest, completion: ChatCompletion) -> None:
        self.id = completion.id
        self.output: list[dict[str, Any]] = []
        self.is_cancelled = False
        self._completion = completion
        self._number = 0
        self._has_open_item = False
        """Whether the last item of the output is not complete."""
        self._echo = _echo(body)
        self._ending: dict[str, Any] = {"status": "in_progress", "error": None, "incomplete_details": None}

    def set_not_stored(self) -> None:
        """Let the object say that the server does not keep the response."""
        self._echo["store"] = False

    def object(self) -> dict[str, Any]:
        """Return the response's object as it is now."""
        head = {"id": self.id, "object": "response", "created_at": self._completion.created}
        return {**head, **self._ending, **self._echo, "output": self.output, "usage": self._usage()}

    def message(self) -> schemas.ChatMessage:
        """Return the answer as a message of the conversation, without a call that was cut: it cannot be answered."""
        text = "".join(part["text"] for item in self.output for part in item.get("content", ()))
        calls = [
            ToolCall(item["call_id"], FunctionCall(item["name"], item["arguments"]))
            for item in self.output
            if item["type"] == "function_call" and item["status"] == "completed"
        ]
        return schemas.ChatMessage(role="assistant", content=text, tool_calls=calls or None)

    def begin(self) -> list[bytes]:
        """Return the events before the first output."""
        return [self._event(name, response=self.object()) for name in ("response.created", "response.in_progress")]

    def add(self, addition: Addition) -> list[bytes]:
        """Add what an output adds to the answer; return its events."""
        events = []
        if addition.text:
            events += self._open_message()
            item = self.output[-1]
            item["content"][0]["text"] += addition.text
            delta = {**self._part_place(), "delta": addition.text, "logprobs": []}
            events.append(self._event("response.output_text.delta", **delta))
            if self._completion.has_audio:
                events.append(self._event("response.audio.transcript.delta", delta=addition.text))
        for call in addition.calls:
            events += self._add_call(call)
        if addition.timing:
            events.append(self._event("response.audio.delta", delta="", **addition.timing))
        if addition.audio:
            events.append(self._event("response.audio.delta", delta=to_base64(addition.audio)))
        return events

    async def finish(self) -> list[bytes]:
        """Add the end of the answer; return its events. ``last_event`` follows."""
        events = self.add(self._completion.finish(0))
        if not self.output:
            events += self._open_message()
        if self._completion.has_audio:
            if rest := await self._completion.encoder.finish():
                events.append(self._event("response.audio.delta", delta=to_base64(rest)))
            events.append(self._event("response.audio.done", **self._completion.last_timing()))
            events.append(self._event("response.audio.transcript.done"))
        is_cut = self._completion.finish_reason(0) == "length"
        events += self._close("incomplete" if is_cut else "completed")
        self._ending["status"] = "incomplete" if is_cut else "completed"
        self._ending["completed_at"] = None if is_cut else int(time.time())
        if is_cut:
            self._ending["incomplete_details"] = {"reason": "max_output_tokens"}
        return events

    def fail(self, error: RequestError) -> list[bytes]:
        """End the answer with an error, or as cancelled; return its events. ``last_event`` follows."""
        events = self._close("incomplete")
        if self.is_cancelled:
            self._ending["status"] = "cancelled"
            return events
        message = to_http_error(error).message
        self._ending |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return events

    def last_event(self) -> bytes:
        """Return the event that ends the stream. It has the object."""
        status = self._ending["status"]
        kind = "incomplete" if status == "cancelled" else status
        return self._event(f"response.{kind}", response=self.object())

    def _usage(self) -> dict[str, Any] | None:
        """Return the tokens; None if no engine counts them. Those from a prefix cache are not told apart."""
        usage = self._completion.usage
        if usage is None:
            return None
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return responses.event({"type": kind, "sequence_number": number, **fields}, kind)

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _part_place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    def _open(self, item: dict[str, Any]) -> bytes:
        self.output.append(item)
        self._has_open_item = True
        return self._event("response.output_item.added", output_index=len(self.output) - 1, item=item)

    def _open_message(self) -> list[bytes]:
        """Open a message, unless one is open."""
        if self._has_open_item and self.output[-1]["type"] == "message":
            return []
        item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        events = [*self._close("completed"), self._open({**item, "status": "in_progress", "content": []})]
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.output[-1]["content"].append(part)
        return [*events, self._event("response.content_part.added", **self._part_place(), part=part)]

    def _add_call(self, call: dict[str, Any]) -> list[bytes]:
        """Add a call, or more arguments of the open one."""
        events, function = [], call["function"]
        if "id" in call:
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress"}
            item |= {"call_id": call["id"], "name": function["name"], "arguments": ""}
            events += [*self._close("completed"), self._open(item)]
        self.output[-1]["arguments"] += function["arguments"]
        delta = {**self._item_place(), "delta": function["arguments"]}
        return [*events, self._event("response.function_call_arguments.delta", **delta)]

    def _close(self, status: str) -> list[bytes]:
        """Complete the open item, if there is one."""
        if not self._has_open_item:
            return []
        self._has_open_item = False
        item, events = self.output[-1], []
        item["status"] = status
        if item["type"] == "message":
            [part] = item["content"]
            place = self._part_place()
            events.append(self._event("response.output_text.done", **place, text=part["text"], logprobs=[]))
            events.append(self._event("response.content_part.done", **place, part=part))
        else:
            done = {**self._item_place(), "name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **done))
        place = {"output_index": len(self.output) - 1}
        return [*events, self._event("response.output_item.done", **place, item=item)]


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of the request that the object repeats."""
    found = {name: msgspec.to_builtins(getattr(body, name)) for name in _ECHOED}
    tools = [{"description": None, "parameters": None, "strict": None, **msgspec.to_builtins(t)} for t in body.tools]
    text = {"format": msgspec.to_builtins(body.text.format or PlainFormat()), "verbosity": body.text.verbosity}
    return found | {"tools": tools, "text": text, "reasoning": {"effort": None, "summary": None}}
