"""Tools of the chat API: their schemas, and the calls in a model's text.

Rules
1. A model of the Hermes and Qwen families writes a call as ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.
2. Text that is not such a call stays text, also between the tags.
3. White space beside a call is not part of the answer.
4. The JSON of a call is decoded on the event loop, so its size, its cost and its depth are bounded first.
5. The arguments of a call stay the text that the model or the client wrote. Decoding could change their numbers.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import trio
from msgspec import Meta

from omni_actors.serve.api.json_body import SLICE_BYTES, DecodingCost
from omni_actors.serve.http.errors import HTTPError, bad_request

MAX_CALL_BYTES = 1 << 18
"""The limit of the JSON of one call, or of its arguments, in UTF-8."""
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="1 to 64 letters, digits, '_', '.' or '-'")]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_VALUES = frozenset(("const", "enum", "default", "examples"))
"""The keywords of a JSON schema that hold values and no schemas."""
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""The keywords that hold schemas by name."""


class FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. parameters: a JSON schema."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: FunctionDefinition


class FunctionName(msgspec.Struct, frozen=True):
    name: Name


class NamedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """The choice of one function."""

    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(msgspec.Struct, frozen=True):
    """arguments: a JSON object, as text."""

    name: Name
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """A call that the model made."""

    id: str
    function: FunctionCall

    @classmethod
    def of(cls, name: str, arguments: str) -> ToolCall:
        """Return a call with an id of its own."""
        return cls(f"call_{uuid.uuid4().hex[:24]}", FunctionCall(name, arguments))


class _Written(msgspec.Struct):
    """A call, as the model writes it."""

    name: Name
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these tools, as the model writes it.

    The schemas of the arguments are definitions of it, because vLLM cannot follow a ``$ref`` whose path
    goes through ``anyOf``.
    """
    definitions, calls = {}, []
    for at, tool in enumerate(tools):
        place = f"#/$defs/arguments_{at}"
        definitions[f"arguments_{at}"] = _moved(tool.function.parameters or {"type": "object"}, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}


def _moved(schema: Any, place: str, *, by_name: bool = False) -> Any:
    """Return a schema that is a part of another one, at ``place``, with its references to itself.

    by_name: the keys are not keywords, but names that the client chose.
    """
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if by_name:
        return {name: _moved(value, place) for name, value in schema.items()}
    found = {
        key: value if key in _VALUES else _moved(value, place, by_name=key in _BY_NAME) for key, value in schema.items()
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = place + reference[1:]
    return found


def written_call(text: str) -> ToolCall | None:
    """Return the call that this text is; None if it is none, or if the server would not take its arguments back."""
    try:
        call = msgspec.json.decode(_measured(text.strip(), DecodingCost("call")), type=_Written)
        arguments = bytes(call.arguments).decode()
        _require_object(arguments)
    except (msgspec.DecodeError, UnicodeError, HTTPError):
        return None
    return ToolCall.of(call.name, arguments)


async def checked_arguments(call: ToolCall, param: str) -> str:
    """Return the arguments of a call in a client's message. A checkpoint follows: a request may have many calls.

    param: the client's name of the arguments.

    Raises HTTPError: they are not a JSON object, or would take too long to decode.
    """
    arguments = call.function.arguments or "{}"
    try:
        _require_object(arguments)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(f"{param}: not a JSON object: {error}", param) from error
    except HTTPError as error:
        raise bad_request(f"{param}: {error.message}", param, error.code) from error
    await trio.lowlevel.checkpoint()
    return arguments


def _require_object(arguments: str) -> None:
    """Decode the arguments of a call.

    Raises msgspec.DecodeError, UnicodeError: they are not a JSON object, or a number is out of range. HTTPError: they
    would take too long to decode.
    """
    msgspec.json.decode(_measured(arguments, DecodingCost("JSON object")), type=dict[str, Any])


def _measured(text: str, cost: DecodingCost) -> bytes:
    """Return JSON as bytes. Raises HTTPError: it would take too long to decode. UnicodeError: it is not Unicode."""
    document = text.encode()
    if len(document) > MAX_CALL_BYTES:
        raise bad_request(f"more than {MAX_CALL_BYTES} bytes", code="too_much_text")
    for at in range(0, len(document), SLICE_BYTES):
        cost.add(document[at : at + SLICE_BYTES])
    return document


class ToolCallFilter:
    """Separates the calls from the text of one answer, piece by piece. Text that may begin a call is pending.

    most: how many calls are passed on; further ones are dropped.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self._left = most
        self._pending = ""
        self._is_open = False
        """Whether the pending text follows the opening tag of a call."""
        self._space = ""
        """The white space before the opening tag, which belongs to the text if no call follows."""
        self._follows_call = False
        """Whether there was only white space since the last call."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; return the text that is final, and the calls that are complete."""
        self._pending += text
        texts, calls = [], []
        while True:
            tag = _CLOSE if self._is_open else _OPEN
            before, found, after = self._pending.partition(tag)
            if not found:
                break
            if not self._is_open:
                texts.append(self._text(before.rstrip()))
                self._space = before[len(before.rstrip()) :]
            elif (call := written_call(before)) is not None:
                calls += self._allowed(call)
                self._follows_call = True
            else:
                texts.append(self._text(self._space + _OPEN + before + _CLOSE))
            self._pending, self._is_open = after, not self._is_open
        if not self._is_open:
            texts.append(self._take_text())
        return "".join(texts), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the pending text, or the call that it is: some models leave out the last closing tag."""
        pending, self._pending = self._pending, ""
        if self._is_open and (call := written_call(pending)) is not None:
            return "", self._allowed(call)
        return self._text(self._space + _OPEN + pending if self._is_open else pending), []

    def _allowed(self, call: ToolCall) -> list[ToolCall]:
        self._left -= 1
        return [call] if self._left >= 0 else []

    def _take_text(self) -> str:
        """Take the pending text up to white space and a beginning of the opening tag at its end."""
        size = next((n for n in range(len(_OPEN) - 1, 0, -1) if self._pending.endswith(_OPEN[:n])), 0)
        cut = len(self._pending[: len(self._pending) - size].rstrip())
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return self._text(text)

    def _text(self, text: str) -> str:
        """Return the text without white space that follows a call."""
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        return text
