"""The schemas of the bodies of the audio routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from omni_actors.serve.api.schemas import ModelBody
from omni_actors.serve.media.audio import AudioFormat

MAX_SPEECH_CHARACTERS = 4096
"""OpenAI's own limit."""
MAX_PROMPT_CHARACTERS = 4096
TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]


class SpeechRequest(ModelBody, frozen=True, kw_only=True):
    """The body of /v1/audio/speech. voice: see ``schemas.has_speakers``."""

    input: Annotated[str, Meta(max_length=MAX_SPEECH_CHARACTERS)]
    voice: Any = None
    response_format: AudioFormat = "mp3"
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0
    stream: bool = False
    """An extension of OpenAI's API, as vLLM-Omni has it: the same as the stream_format sse."""
    stream_format: Literal["audio", "sse"] | None = None
    """sse: server-sent events. Without it, ``stream`` decides."""


class TranslationRequest(ModelBody, frozen=True, kw_only=True):
    """The fields of /v1/audio/translations except the file. A form's values are strings.

    prompt: text before the recording, whose words and style the recognizer prefers. temperature: recognizers decode
    greedily or by a beam search, so that a replay gives the same text.
    """

    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)] = ""
    response_format: TranscriptFormat = "json"
    temperature: Annotated[float, Meta(ge=0, le=0)] = 0.0


class TranscriptionRequest(TranslationRequest, frozen=True, kw_only=True):
    """The fields of /v1/audio/transcriptions except the file. A form's values are strings."""

    stream: bool = False
    granularities: Annotated[list[Literal["segment", "word"]], Meta(max_length=8)] = field(
        name="timestamp_granularities[]", default_factory=list
    )
