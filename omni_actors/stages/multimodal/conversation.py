"""The conversation of a request: messages of text and of numbered places for sound, images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

Index: TypeAlias = Annotated[int, Meta(ge=0)]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A text in a message."""

    text: str


class _MediaPart(msgspec.Struct, frozen=True):
    index: Index
    """Number of the input among the request's inputs of this kind, from 0."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class AudioPart(_MediaPart, frozen=True, tag="audio"):
    """The place of a recording."""


class ImagePart(_MediaPart, frozen=True, tag="image"):
    """The place of an image."""


class VideoPart(_MediaPart, frozen=True, tag="video"):
    """The place of a video."""


MediaPart: TypeAlias = AudioPart | ImagePart | VideoPart


class FunctionCall(msgspec.Struct, frozen=True):
    """A function and the arguments that it is called with: a JSON object, or its text.

    The text may have integers of more than 64 bits, which no chunk can carry as numbers.
    """

    name: str
    arguments: dict[str, Any] | str = {}


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool, as OpenAI's chat API has it."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    """A message. content: its text, or its parts in order."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[TextPart | AudioPart | ImagePart | VideoPart]
    name: str | None = None
    """The participant, for chat templates that know names."""
    tool_calls: list[ToolCall] = []
    """The calls of tools that an assistant's message makes."""
    tool_call_id: str | None = None
    """The call whose result a tool's message is."""

    @property
    def has_tools(self) -> bool:
        """Whether the message calls tools, or is the result of a call."""
        return bool(self.tool_calls) or self.role == "tool"

    @property
    def parts(self) -> list[TextPart | AudioPart | ImagePart | VideoPart]:
        """The parts of the message, in order."""
        return [TextPart(self.content)] if isinstance(self.content, str) else self.content

    @property
    def texts(self) -> list[str]:
        """The texts of the message, in order."""
        return [part.text for part in self.parts if isinstance(part, TextPart)]

    @property
    def media(self) -> list[MediaPart]:
        """The places for media in the message, in order."""
        return [part for part in self.parts if not isinstance(part, TextPart)]


class ConversationData(msgspec.Struct, frozen=True):
    """The ``data`` of a chunk with messages."""

    messages: list[Message] = []


def with_system_prompt(messages: Sequence[Message], system_prompt: str) -> list[Message]:
    """Return the conversation, preceded by ``system_prompt`` if it has no system message."""
    if not system_prompt or any(message.role == "system" for message in messages):
        return list(messages)
    return [Message("system", system_prompt), *messages]
