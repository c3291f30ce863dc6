"""The endpoints of OpenAI's API: the request for a prompt, and how its answer is read.

To add an endpoint: write a function from ``Ask`` and a prompt to a ``Request``, and add it to ``ENDPOINTS``.
"""

from __future__ import annotations

import base64
import functools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from omni_actors.cli.answer_events import answer_part
from omni_actors.cli.bench.workload import Prompt
from omni_actors.cli.measurement import Measurement
from omni_actors.cli.server_client import MAX_EVENT_BYTES, ServerError, decoding, events, read_body


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of a run have in common.

    Attributes:
        model: The model.
        max_tokens: Most tokens of an answer; None: the server's default.
        spoken: Whether the answers to conversations are spoken too.
        voice: The voice of speech.
        extra: Fields that are added to each body.
    """

    model: str
    max_tokens: int | None = None
    spoken: bool = False
    voice: str = "alloy"
    extra: dict[str, Any] = {}


class Request(msgspec.Struct, frozen=True):
    """path: below "/v1/". content: the body, as httpx2 takes it. read: reads the response into a measurement."""

    path: str
    content: dict[str, Any]
    read: Callable[[httpx2.Response, Measurement], Awaitable[None]]


async def _read_completion(response: httpx2.Response, measurement: Measurement) -> None:
    async for part in events(response, answer_part):
        measurement.add(part, time.monotonic())


async def _read_sound(response: httpx2.Response, measurement: Measurement) -> None:
    """Read samples. A connection that breaks raises, so what ends is complete, unless it has no sound.

    Raises ServerError: the answer is text.
    """
    media_type = response.headers.get("content-type", "")
    if media_type.startswith(("application/json", "text/")):
        raise ServerError("invalid answer", f"the answer has the type {media_type}, and not that of sound")
    async for piece in response.aiter_bytes():
        if piece:
            measurement.add_sound(len(piece), time.monotonic())
    measurement.is_complete = measurement.first_sound is not None


class _TranscriptEvent(msgspec.Struct):
    type: str = ""
    delta: str = ""
    text: str = ""


def _transcript_event(event: httpx2.ServerSentEvent) -> _TranscriptEvent:
    with decoding():
        return msgspec.json.decode(event.data, type=_TranscriptEvent)


async def _read_transcript(response: httpx2.Response, measurement: Measurement) -> None:
    """Read events, or one JSON object from a server that does not stream transcripts."""
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        async for event in events(response, _transcript_event):
            if event.delta:
                measurement.add_text(time.monotonic())
            measurement.is_complete |= event.type == "transcript.text.done"
    else:
        with decoding():
            msgspec.json.decode(await read_body(response, MAX_EVENT_BYTES), type=_TranscriptEvent)
        measurement.add_text(time.monotonic())
        measurement.is_complete = True


async def _read_whole(response: httpx2.Response, measurement: Measurement) -> None:
    with decoding():
        msgspec.json.decode(await read_body(response, MAX_EVENT_BYTES))
    measurement.is_complete = True


def _body(ask: Ask, **fields: Any) -> dict[str, Any]:
    limit = {} if ask.max_tokens is None else {"max_tokens": ask.max_tokens}
    return {"json": {"model": ask.model, **fields, **limit, **ask.extra}}


STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@functools.lru_cache(maxsize=256)
def _file(path: Path) -> bytes:
    return path.read_bytes()


def chat(ask: Ask, prompt: Prompt) -> Request:
    """Return a request for an answer to a conversation. A sound file of the prompt becomes a part of it."""
    messages = prompt.messages
    if messages is None:
        parts: list[dict[str, Any]] = [{"type": "text", "text": prompt.prompt}] if prompt.prompt else []
        if prompt.audio is not None:
            path = Path(prompt.audio)
            sound = {"data": base64.b64encode(_file(path)).decode(), "format": path.suffix.removeprefix(".")}
            parts.append({"type": "input_audio", "input_audio": sound})
        messages = [{"role": "user", "content": prompt.prompt if prompt.audio is None else parts}]
    speech = {"modalities": ["text", "audio"], "audio": {"voice": ask.voice, "format": "pcm16"}} if ask.spoken else {}
    return Request("chat/completions", _body(ask, messages=messages, **STREAMED, **speech), _read_completion)


def completions(ask: Ask, prompt: Prompt) -> Request:
    """Return a request for text that continues the prompt."""
    return Request("completions", _body(ask, prompt=prompt.prompt, **STREAMED), _read_completion)


def speech(ask: Ask, prompt: Prompt) -> Request:
    """Return a request for the prompt as speech."""
    body = {"model": ask.model, "input": prompt.prompt, "voice": ask.voice, "response_format": "pcm", **ask.extra}
    return Request("audio/speech", {"json": body}, _read_sound)


def transcriptions(ask: Ask, prompt: Prompt) -> Request:
    """Return a request for the transcript of the prompt's sound file, which it must have."""
    assert prompt.audio is not None
    path = Path(prompt.audio)
    form = {"model": ask.model, "stream": "true", **ask.extra}
    content = {"data": form, "files": {"file": (path.name, _file(path))}}
    return Request("audio/transcriptions", content, _read_transcript)


def images(ask: Ask, prompt: Prompt) -> Request:
    """Return a request for one picture."""
    body = {"model": ask.model, "prompt": prompt.prompt, **ask.extra}
    return Request("images/generations", {"json": body}, _read_whole)


ENDPOINTS: dict[str, Callable[[Ask, Prompt], Request]] = {
    each.__name__: each for each in (chat, completions, speech, transcriptions, images)
}
