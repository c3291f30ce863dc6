"""From a request's chunks to the text of the prompt.

Rules
1. The user's chunk is a conversation, each part of a message a text or the number of an audio input.
2. The chunks of the stage above are the transcripts of those inputs, in pieces.
3. Audio that comes without a conversation is one: the user's question.
4. The model sees text only: an audio part is replaced by its transcript, and a message's parts are joined by newlines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import jinja2
import msgspec
from msgspec import Meta

from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest

__all__ = ["Prompt", "validated"]

T = TypeVar("T")


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class AudioPart(msgspec.Struct, frozen=True, tag="audio"):
    index: Annotated[int, Meta(ge=0)]


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart | AudioPart]


class ClientData(msgspec.Struct, frozen=True):
    messages: list[Message] = []


class TranscriptData(msgspec.Struct, frozen=True):
    text: str = ""
    index: Annotated[int, Meta(ge=0)] = 0


class Prompt:
    """Collects one request's input. Complete once every source has sent its last chunk."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._open = set(sources)
        self._hears = self._open != {CLIENT}
        self._messages: list[Message] = []
        self._transcripts: defaultdict[int, str] = defaultdict(str)

    def feed(self, chunk: Chunk) -> bool:
        """Take a chunk; return whether the input is complete. Raises ``InvalidRequest``."""
        if chunk.source == CLIENT:
            self._messages += validated(chunk.data, ClientData).messages
        else:
            piece = validated(chunk.data, TranscriptData)
            self._transcripts[piece.index] += piece.text
        if chunk.last:
            self._open.discard(chunk.source)
        return not self._open

    @property
    def messages(self) -> int:
        """How many the client has sent."""
        return len(self._messages)

    def render(self, tokenizer: Any, system_prompt: str) -> str:
        """Return the text that the model is to go on from, with its special tokens. Raises ``InvalidRequest``."""
        conversation = self._messages or [Message("user", [AudioPart(index) for index in sorted(self._transcripts)])]
        messages = [{"role": message.role, "content": self._text(message)} for message in conversation]
        if not any(message["content"].strip() for message in messages if message["role"] != "system"):
            raise InvalidRequest("the prompt is empty: no message of the user has text", param="messages")
        if system_prompt and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system_prompt})
        try:
            text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except jinja2.TemplateError as error:
            # Some templates refuse some conversations, such as two messages of the user in a row.
            raise InvalidRequest(f"the model's chat template refuses it: {error}", param="messages") from error
        return text

    def _text(self, message: Message) -> str:
        if isinstance(message.content, str):
            return message.content
        return "\n".join(text for part in message.content if (text := self._part(part)))

    def _part(self, part: TextPart | AudioPart) -> str:
        if isinstance(part, TextPart):
            return part.text
        if not self._hears:
            raise InvalidRequest("audio was sent, and no stage before this one hears", param="messages")
        return self._transcripts[part.index].strip()


def validated(data: Mapping[str, Any], type: type[T]) -> T:
    """Convert to a struct. Raises ``InvalidRequest`` that names the field."""
    try:
        return msgspec.convert(data, type)
    except msgspec.ValidationError as error:
        _, _, path = str(error).partition("$.")
        raise InvalidRequest(str(error), param=path.rstrip("`") or None) from error
