"""POST /v1/audio/speech: a text, spoken; the sound is sent while it is made. A text without sound is an error."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.errors import InvalidRequest
from omni_actors.generation import AudioChunk, Generation
from omni_actors.serve.arrivals import SCOPE_KEY
from omni_actors.serve.audio import Encoder
from omni_actors.serve.bodies import read_json
from omni_actors.serve.problems import invalid, renamed
from omni_actors.serve.replies import Pieces, Stream
from omni_actors.serve.schemas import Speech, has_speakers, parse, require_model
from omni_actors.system import OmniSystem

_MEDIA_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}
_NAMES = {"script": "input", "text": "input"}


async def speech(request: Request) -> Response:
    """Speak a text."""
    system: OmniSystem = request.app.state.system
    body, params = parse(await read_json(request), Speech)
    require_model(body.model, system.pipeline.name)
    if not body.input.strip():
        raise invalid("input: there is no text to speak", "input", "empty")
    request.scope[SCOPE_KEY].leave()
    names = dict(_NAMES)
    if "speaker" not in params and has_speakers(system.pipeline):
        params["speaker"], names["speaker"] = body.voice, "voice"
    with renamed(names):
        generation = system.generate(script=body.input, modalities=("audio",), **params)
        pieces = _sound(generation, Encoder(body.response_format))
        return await Stream(generation, pieces, _MEDIA_TYPES[body.response_format], farewell=None).begun()


async def _sound(generation: Generation, encoder: Encoder) -> Pieces:
    """Raises RequestError, also where the generation has ended without any sound."""
    spoken = False
    async for output in generation:
        if isinstance(output.delta, AudioChunk):
            spoken = True
            yield encoder.push(output.delta)
    if not spoken:
        raise InvalidRequest("nothing in this text can be spoken", param="input", code="nothing_to_speak")
    if rest := encoder.finish():
        yield rest
