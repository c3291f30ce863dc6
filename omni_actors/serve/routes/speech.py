"""POST /v1/audio/speech: speak a text. The audio is sent while it is made. A text without sound is an error.

An engine that has the parameter ``speed`` speaks at that speed, up to ``FASTEST_SPOKEN``. Beyond that, and for other
engines, the sound is stretched.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.errors import InvalidRequest
from omni_actors.generation import Generation
from omni_actors.outputs import AudioChunk
from omni_actors.serve.access.admission import SCOPE_KEY
from omni_actors.serve.api import responses
from omni_actors.serve.api.audio_schemas import SpeechRequest
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.schemas import speaker_of, takes_parameter
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.media.audio import AudioEncoder
from omni_actors.serve.media.base64_data import to_base64_json
from omni_actors.serve.media.tempo import TimeStretch
from omni_actors.serve.routes.common import open_body

MEDIA_TYPES = {
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
}
"""The content type of each format."""
FASTEST_SPOKEN = 2.0
"""The highest speed that an engine is asked for. Each phoneme has a shortest duration, so that far above this speed the
speech does not get shorter: hibari at 4 is only 2.4 times as fast."""


async def speech(request: Request) -> Response:
    """Speak a text, as an audio file or as server-sent events."""
    system, body, params = open_body(request, await read_json(request), SpeechRequest)
    if not body.input.strip():
        raise bad_request("input: there is no text to speak", "input", "empty")
    request.scope[SCOPE_KEY].release()
    names = {"script": "input", "text": "input", "modalities": "model"}
    if "speaker" not in params and (speaker := speaker_of(body.voice, system.pipeline)) is not None:
        params["speaker"], names["speaker"] = speaker, "voice"
    factor = body.speed
    if factor != 1 and takes_parameter(system.pipeline, "speed"):
        params["speed"] = min(factor, FASTEST_SPOKEN)
        factor /= params["speed"]
    stretch = None if factor == 1 else TimeStretch(factor)
    format, media_type = body.response_format, MEDIA_TYPES[body.response_format]
    with renaming(names):
        generation = system.generate(script=body.input, modalities=("audio",), **params)
        if format == "flac":
            generation.played_at = None  # a client gets the file when it is complete
        else:
            generation.played_at = factor
        if body.stream_format == "sse" or (body.stream and body.stream_format is None):
            encoder = AudioEncoder(format, streamed=format != "flac")
            return await responses.StreamedResponse(generation, _events(generation, encoder, stretch)).start()
        if format == "flac":
            with responses.collecting(generation):
                pieces = _audio(generation, AudioEncoder(format, streamed=False), stretch)
                data = b"".join([piece async for piece in pieces])
                return responses.WholeResponse(generation, Response(data, media_type=media_type))
        pieces = _audio(generation, AudioEncoder(format, streamed=True), stretch)
        return await responses.StreamedResponse(generation, pieces, media_type, on_late_error=None).start()


async def _audio(generation: Generation, encoder: AudioEncoder, stretch: TimeStretch | None) -> responses.Pieces:
    """Yield the encoded audio. Raises RequestError, also if the generation ends without any audio."""
    is_silent = True
    async for chunk in _chunks(generation, stretch):
        is_silent = False
        if data := await encoder.push(chunk):
            yield data
    if is_silent:
        raise InvalidRequest("nothing in this text can be spoken", param="input", code="nothing_to_speak")
    if rest := await encoder.finish():
        yield rest


async def _chunks(generation: Generation, stretch: TimeStretch | None) -> AsyncGenerator[AudioChunk, None]:
    """Yield the sound at the speed that was asked for. Raises RequestError."""
    async for output in generation:
        if isinstance(output.delta, AudioChunk):
            yield output.delta if stretch is None else stretch.push(output.delta)
    if stretch is not None and (rest := stretch.finish()) is not None:
        yield rest


async def _events(generation: Generation, encoder: AudioEncoder, stretch: TimeStretch | None) -> responses.Pieces:
    """Yield OpenAI's events. An engine of speech counts no tokens, so the usage is 0."""
    async for data in _audio(generation, encoder, stretch):
        yield responses.event({"type": "speech.audio.delta", "audio": await to_base64_json(data)})
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    yield responses.event({"type": "speech.audio.done", "usage": usage})
