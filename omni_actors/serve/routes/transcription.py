"""POST /v1/audio/transcriptions: the text of an audio file.

When the answer begins, nothing here refers to the audio.
"""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from omni_actors.generation import Generation
from omni_actors.serve.access.admission import SCOPE_KEY
from omni_actors.serve.api import responses
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.form_body import FileField, read_form
from omni_actors.serve.api.schemas import TranscriptionRequest
from omni_actors.serve.media.audio import decode
from omni_actors.serve.routes.common import open_body

FILE = FileField(("file",), "an audio file")


async def transcription(request: Request) -> Response:
    """Transcribe an audio file."""
    with renaming({"audio": "file"}):
        body, seconds, generation = await _start(request)
        if body.stream:
            return await responses.StreamedResponse(generation, _events(generation)).start()
        with responses.collecting(generation):
            return responses.WholeResponse(generation, await _whole(generation, seconds, body.response_format))


async def _start(request: Request) -> tuple[TranscriptionRequest, float, Generation]:
    """Return the request's fields, the audio's duration in seconds, and the generation."""
    files, fields = await read_form(request, FILE)
    system, body, params = open_body(request, fields, TranscriptionRequest, strict=False)
    if not files:
        raise FILE.missing()
    [clip] = await decode([(files[0], "file")])
    request.scope[SCOPE_KEY].release()
    generation = system.generate(multi_modal_data={"audio": clip}, modalities=("transcript",), **params)
    return body, clip.duration_s, generation


async def _whole(generation: Generation, seconds: float, format: str) -> Response:
    texts = [output.delta async for output in generation if isinstance(output.delta, str)]
    text = "".join(texts).strip()
    if format == "text":
        return PlainTextResponse(text + "\n")
    return responses.JSONResponse({"text": text, "usage": {"type": "duration", "seconds": math.ceil(seconds)}})


async def _events(generation: Generation) -> responses.Pieces:
    texts: list[str] = []
    async for output in generation:
        if isinstance(output.delta, str):
            texts.append(output.delta)
            yield responses.event({"type": "transcript.text.delta", "delta": output.delta})
    yield responses.event({"type": "transcript.text.done", "text": "".join(texts).strip()})
