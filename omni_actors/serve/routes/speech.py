"""POST /v1/audio/speech: speak a text. The audio is sent while it is made. A text without sound is an error."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.errors import InvalidRequest
from omni_actors.generation import Generation
from omni_actors.outputs import AudioChunk
from omni_actors.serve.access.admission import SCOPE_KEY
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.responses import Pieces, StreamedResponse, WholeResponse, collecting
from omni_actors.serve.api.schemas import SpeechRequest, has_speakers
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.media.audio import AudioEncoder
from omni_actors.serve.routes.common import open_body

_MEDIA_TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "opus": "audio/ogg", "pcm": "audio/pcm"}


async def speech(request: Request) -> Response:
    """Speak a text."""
    system, body, params = open_body(request, await read_json(request), SpeechRequest)
    if not body.input.strip():
        raise bad_request("input: there is no text to speak", "input", "empty")
    request.scope[SCOPE_KEY].release()
    names = {"script": "input", "text": "input"}
    if "speaker" not in params and has_speakers(system.pipeline):
        params["speaker"], names["speaker"] = body.voice, "voice"
    format, media_type = body.response_format, _MEDIA_TYPES[body.response_format]
    with renaming(names):
        generation = system.generate(script=body.input, modalities=("audio",), **params)
        if format == "flac":
            with collecting(generation):
                data = b"".join([piece async for piece in _audio(generation, AudioEncoder(format, streamed=False))])
                return WholeResponse(generation, Response(data, media_type=media_type))
        pieces = _audio(generation, AudioEncoder(format, streamed=True))
        return await StreamedResponse(generation, pieces, media_type, on_late_error=None).start()


async def _audio(generation: Generation, encoder: AudioEncoder) -> Pieces:
    """Yield the encoded audio. Raises RequestError, also if the generation ends without any audio."""
    is_silent = True
    async for output in generation:
        if isinstance(output.delta, AudioChunk):
            is_silent = False
            if data := await encoder.push(output.delta):
                yield data
    if is_silent:
        raise InvalidRequest("nothing in this text can be spoken", param="input", code="nothing_to_speak")
    if rest := await encoder.finish():
        yield rest
