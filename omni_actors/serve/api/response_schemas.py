"""The schema of the body of /v1/responses: OpenAI's items, as far as the chat API has the same.

Rules
1. An item without a ``type`` is a message, as in OpenAI's API (``with_types``).
2. What a client sends back of an earlier response (ids, states, annotations) has no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from omni_actors.serve.api.schemas import AudioParams, InputAudio, ModelBody, StreamOptions, Text
from omni_actors.serve.api.tools import Name


class InputText(msgspec.Struct, frozen=True, tag="input_text"):
    text: str


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str


class RefusalText(msgspec.Struct, frozen=True, tag="refusal"):
    refusal: str


class InputImage(msgspec.Struct, frozen=True, tag="input_image"):
    """image_url: a data: URL, or one that the server may load."""

    image_url: Text
    detail: Literal["auto", "high"] | None = None


class InputSound(msgspec.Struct, frozen=True, tag="input_audio"):
    input_audio: InputAudio


InputPart = InputText | OutputText | RefusalText | InputImage | InputSound


class Message(msgspec.Struct, frozen=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]


class Call(msgspec.Struct, frozen=True, tag="function_call"):
    """A call that the model made. arguments: a JSON object, as text."""

    call_id: str
    name: Name
    arguments: str


class CallOutput(msgspec.Struct, frozen=True, tag="function_call_output"):
    """The result of a call."""

    call_id: str
    output: str | list[InputText]


Item = Message | Call | CallOutput


class FunctionTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """A function that the model may call. parameters: a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """The choice of one function."""

    name: Name


class PlainFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class ObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    format: PlainFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models do not reason apart from their answer, so that any other effort is refused."""

    effort: Literal["none"] | None = None
    summary: None = None


Key = Annotated[str, Meta(max_length=64)]
Value = Annotated[str, Meta(max_length=512)]


class ResponsesRequest(ModelBody, frozen=True, kw_only=True):
    """The body of /v1/responses.

    modalities, audio: as in the chat API, an extension. OpenAI's types have audio in streams only.
    """

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    background: Annotated[bool, Meta(description="only false")] = False
    max_output_tokens: int | None = None
    metadata: Annotated[dict[Key, Value], Meta(max_length=16)] = field(default_factory=dict)
    modalities: Annotated[list[Literal["text", "audio"]], Meta(min_length=1)] | None = None
    audio: AudioParams = AudioParams()
    include: Annotated[list[str], Meta(max_length=0)] = field(default_factory=list)
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    seed: Any = None
    """An integer, which the engines check."""
    temperature: float | None = None
    text: TextConfig = TextConfig()
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] = field(default_factory=list)
    top_logprobs: Literal[0] = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"


def with_types(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body in which each item of the input has a type."""
    items = fields.get("input")
    if not isinstance(items, list):
        return fields
    typed = [{"type": "message", **item} if isinstance(item, dict) else item for item in items]
    return fields | {"input": typed}
