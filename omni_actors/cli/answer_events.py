"""The events of a streamed answer: of chat completions and of completions, as OpenAI's API defines them."""

from __future__ import annotations

import base64
from typing import Any

import httpx2
import msgspec

from omni_actors.cli.server_client import ServerError

SPEECH_RATE = 24_000
"""Samples per second of speech in the format "pcm16" or "pcm", in OpenAI's API."""
SAMPLE_BYTES = 2


class Usage(msgspec.Struct, frozen=True):
    """prompt_tokens, completion_tokens: as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class AnswerPart(msgspec.Struct, frozen=True):
    """What one event adds to an answer.

    Attributes:
        text: New text; of a spoken answer, of its transcript.
        thought: New text of a reasoning model's thoughts, which are no part of the answer. They count as its tokens.
        sound: New samples: 16-bit little-endian, mono, at ``SPEECH_RATE``.
        pictures: New pictures, as files.
        usage: The tokens of the whole answer; None if the event does not have them.
        finish_reason: Why the answer ended; None while it goes on.
        sent_s: When the server sent the event, on the machine's monotonic clock; None if it does not say so.
    """

    text: str = ""
    thought: str = ""
    sound: bytes = b""
    pictures: tuple[bytes, ...] = ()
    usage: Usage | None = None
    finish_reason: str | None = None
    sent_s: float | None = None


class _Audio(msgspec.Struct):
    data: str | None = None
    transcript: str | None = None


class _Delta(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    audio: _Audio | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    sent_s: float | None = None


_decoder = msgspec.json.Decoder(_Chunk)


def answer_part(event: httpx2.ServerSentEvent) -> AnswerPart:
    """Return what an event adds to the first choice. Raises ServerError for data of another form."""
    try:
        chunk = _decoder.decode(event.data)
        if not chunk.choices:
            return AnswerPart(usage=chunk.usage, sent_s=chunk.sent_s)
        choice = chunk.choices[0]
        delta = choice.delta or _Delta(content=choice.text)
        audio = delta.audio or _Audio()
        text, pictures = _split(delta.content)
        return AnswerPart(
            text=text + (audio.transcript or ""),
            thought=next((each for each in (delta.reasoning_content, delta.reasoning) if isinstance(each, str)), ""),
            sound=base64.b64decode(audio.data) if audio.data else b"",
            pictures=pictures,
            usage=chunk.usage,
            finish_reason=choice.finish_reason or None,
            sent_s=chunk.sent_s,
        )
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # base64 of other characters; too deep
        raise ServerError("invalid answer", f"an event of the answer has an unexpected form: {error}") from error


def _split(content: str | list[dict[str, Any]] | None) -> tuple[str, tuple[bytes, ...]]:
    """Return the text and the pictures of a delta's content."""
    if content is None or isinstance(content, str):
        return content or "", ()
    text = "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    urls = [str(part["image_url"].get("url", "")) for part in content if isinstance(part.get("image_url"), dict)]
    return text, tuple(base64.b64decode(url.partition("base64,")[2]) for url in urls if url.startswith("data:"))
