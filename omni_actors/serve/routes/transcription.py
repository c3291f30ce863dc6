"""POST /v1/audio/transcriptions and /v1/audio/translations: the text of an audio file.

When the answer begins, nothing here refers to the audio.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from omni_actors.errors import InvalidRequest
from omni_actors.generation import Generation
from omni_actors.serve.access.admission import SCOPE_KEY, AdmissionTicket
from omni_actors.serve.api import responses
from omni_actors.serve.api.audio_schemas import TranscriptionRequest, TranslationRequest
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.form_body import FileField, read_form
from omni_actors.serve.api.transcripts import Transcript
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.media.audio import decode
from omni_actors.serve.routes.common import open_body

FILE = FileField(("file",), "an audio file")
_NAMES = {"audio": "file", "initial_prompt": "prompt", "modalities": "model"}
"""The client's name of each parameter, by the engines' name."""


async def transcription(request: Request) -> Response:
    """Transcribe an audio file, as one answer or as server-sent events."""
    body, generation, transcript = await _read(request, TranscriptionRequest, "transcribe")
    assert isinstance(body, TranscriptionRequest)
    with renaming(_NAMES), _refusing():
        if body.stream:
            return await responses.StreamedResponse(generation, _events(generation, transcript)).start()
        return await _whole(generation, transcript, body.response_format)


async def translation(request: Request) -> Response:
    """Translate the speech of an audio file to English text."""
    body, generation, transcript = await _read(request, TranslationRequest, "translate")
    with renaming(_NAMES), _refusing():
        return await _whole(generation, transcript, body.response_format)


async def _read(
    request: Request, schema: type[TranslationRequest], task: str
) -> tuple[TranslationRequest, Generation, Transcript]:
    """Read a request, and begin its generation. Raises HTTPError.

    Returns the fields of the form without the file, the generation, and its transcript, which is empty.
    """
    files, fields = await read_form(request, FILE)
    system, body, params = open_body(request, fields, schema, strict=False)
    timestamps = _timestamps(body)
    if not files:
        raise FILE.missing()
    ticket: AdmissionTicket = request.scope[SCOPE_KEY]
    [clip] = await decode([(files[0], "file")], ticket)
    ticket.release()
    given = {
        "task": "translate" if task == "translate" else None,
        "initial_prompt": body.prompt or None,
        "timestamps": timestamps[-1] if timestamps else None,
    }
    params |= {name: value for name, value in given.items() if value is not None}
    with renaming(_NAMES), _refusing():
        generation = system.generate(multi_modal_data={"audio": clip}, modalities=("transcript",), **params)
    language = "en" if task == "translate" else params.get("language")
    return body, generation, Transcript(task, clip.duration_s, timestamps, language)


def _timestamps(body: TranslationRequest) -> tuple[str, ...]:
    """Return what has times in the answer: nothing, "segment", "word" or both, in this order. Raises HTTPError."""
    asked = body.granularities if isinstance(body, TranscriptionRequest) else []
    if asked and body.response_format != "verbose_json":
        message = "timestamp_granularities[]: need response_format: verbose_json"
        raise bad_request(message, "timestamp_granularities[]", "invalid_value")
    if body.response_format in ("json", "text"):
        return ()
    if isinstance(body, TranscriptionRequest) and body.stream:
        message = "response_format: events have no times; with stream: true, accepted: 'json', 'text'"
        raise bad_request(message, "response_format", "unsupported_parameter")
    return tuple(sorted(set(asked))) or ("segment",)


@contextmanager
def _refusing() -> Iterator[None]:
    """Let an engine's refusal of what a route asks for leave the block as an HTTPError about the client's field."""
    try:
        yield
    except InvalidRequest as error:
        if error.param == "task":
            message = f"model: it does not translate ({error.message})"
            raise bad_request(message, "model", "unsupported_parameter") from error
        if error.param == "timestamps":
            message = "response_format: the model tells no times; accepted: 'json', 'text'"
            raise bad_request(message, "response_format", "unsupported_parameter") from error
        raise


async def _whole(generation: Generation, transcript: Transcript, format: str) -> Response:
    with responses.collecting(generation):
        async for output in generation:
            transcript.add(output)
        return responses.WholeResponse(generation, _response(transcript, format))


def _response(transcript: Transcript, format: str) -> Response:
    match format:
        case "text":
            return PlainTextResponse(transcript.text + "\n")
        case "srt":
            return PlainTextResponse(transcript.srt())
        case "vtt":
            return Response(transcript.vtt(), media_type="text/vtt; charset=utf-8")
        case "verbose_json":
            return responses.JSONResponse(transcript.verbose())
        case _:
            return responses.JSONResponse({"text": transcript.text, "usage": transcript.usage})


async def _events(generation: Generation, transcript: Transcript) -> responses.Pieces:
    async for output in generation:
        if delta := transcript.add(output):
            yield responses.event({"type": "transcript.text.delta", "delta": delta})
    yield responses.event({"type": "transcript.text.done", "text": transcript.text})
