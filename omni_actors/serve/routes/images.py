"""POST /v1/images/generations and /v1/images/edits: pictures from a prompt, and from a prompt and other pictures.

Rules
1. Each of ``n`` pictures is a request of its own.
2. The server does not decode the pictures that a client sends: the stage that opens them limits their pixels.
3. A stream has OpenAI's events. The events of several pictures are mixed; ``index`` tells them apart. OpenAI's last
   event of a picture must have a ``usage``, which is 0: a denoiser counts no tokens.
4. When the answer begins, nothing here refers to the pictures that a client has sent.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.config import Pipeline
from omni_actors.errors import InvalidRequest
from omni_actors.outputs import Picture
from omni_actors.serve.access.admission import SCOPE_KEY
from omni_actors.serve.api import responses
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.form_body import FileField, read_form
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.api.image_schemas import (
    MAX_INPUT_PICTURES,
    ImageEditForm,
    ImageEditRequest,
    ImageReference,
    ImageRequest,
)
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.media.loader import MediaLoader, MediaReference
from omni_actors.serve.media.picture_json import PictureText
from omni_actors.serve.media.pictures import encoded, require_encoder, require_possible
from omni_actors.serve.routes.common import open_body
from omni_actors.system import OmniSystem
from omni_actors.system.pictures import sides_of

FILES = FileField(("image", "image[]"), "a picture", MAX_INPUT_PICTURES)
_NO_TOKENS = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
_ASSUMED_STEPS = 20
"""The steps of a picture where neither the request nor the pipeline's file has a number."""


async def generate(request: Request) -> Response:
    """Make pictures from a prompt."""
    require_encoder()
    system, body, params = open_body(request, await read_json(request), ImageRequest)
    drawing = _Drawing(body, "image_generation", file_param="prompt")
    request.scope[SCOPE_KEY].release()
    return await _answer(drawing, _begin(system, drawing, params, []))


async def edit(request: Request) -> Response:
    """Make pictures from a prompt and other pictures."""
    require_encoder()
    return await _answer(*await _read_edit(request))


async def _read_edit(request: Request) -> tuple[_Drawing, Generations]:
    """Read a request, and begin the generations of its answer (rule 4). Raises HTTPError."""
    body: ImageEditForm
    if request.headers.get("content-type", "").lower().startswith("application/json"):
        system, asked, params = open_body(request, await read_json(request), ImageEditRequest)
        files, file_param = await _load(request, asked.images), "images"
        body = msgspec.structs.replace(asked, images=[])
    else:
        files, fields = await read_form(request, FILES)
        system, body, params = open_body(request, fields, ImageEditForm, strict=False)
        if not files:
            raise FILES.missing()
        file_param = "image"
    if body.strength is not None:
        params["strength"] = body.strength
    drawing = _Drawing(body, "image_edit", file_param)
    request.scope[SCOPE_KEY].release()
    return drawing, _begin(system, drawing, params, files)


async def _load(request: Request, references: Sequence[ImageReference]) -> list[bytes]:
    """Return the files that a JSON body names. Raises HTTPError."""
    media: MediaLoader = request.app.state.media
    found = [MediaReference("image", each.image_url, f"images[{at}].image_url") for at, each in enumerate(references)]
    return await media.load(found, request.scope[SCOPE_KEY])


class _Drawing:
    """Turns the outputs of generations into the objects of a response.

    prefix: of the events' types. file_param: the field with the client's pictures.
    """

    def __init__(self, body: ImageRequest, prefix: str, file_param: str) -> None:
        self.body, self._prefix = body, prefix
        self.created = int(time.time())
        self.names = {
            **dict.fromkeys(("messages", "input"), "prompt"),
            "previews": "partial_images",
            "modalities": "model",
        }
        """The client's name of each parameter, by the engines' name."""
        self.names |= dict.fromkeys(("multi_modal_data", "image"), file_param)
        self._partial_images = Counter[int]()

    def parameters(self, pipeline: Pipeline) -> dict[str, Any]:
        """Return the engines' parameters. Raises HTTPError or InvalidRequest for fields that do not fit together."""
        body = self.body
        if body.partial_images and not body.stream:
            raise bad_request("partial_images: needs stream: true", "partial_images")
        if body.output_format == "png" and body.output_compression is not None:
            message = "output_compression: a PNG keeps every pixel; accepted with output_format 'jpeg' and 'webp'"
            raise bad_request(message, "output_compression", "unsupported_parameter")
        if (sides := sides_of(body.size)) is not None:
            require_possible(body.output_format, *sides)
        given = {name: getattr(body, name) for name in ("steps", "guidance", "negative_prompt", "seed")}
        if body.size != "auto":
            given["size"] = body.size
        if body.partial_images:
            given["previews"] = _preview_interval(body, pipeline)
        return {name: value for name, value in given.items() if value is not None}

    async def encode(self, picture: Picture) -> PictureText:
        """Return the file of a picture, in base64. Raises InvalidRequest: it is too large for the format."""
        return await encoded(picture, self.body.output_format, self.body.output_compression)

    async def event(self, index: int, picture: Picture) -> bytes | None:
        """Return the event of a picture of generation ``index``; None for more previews than the client asked for."""
        kind = f"{self._prefix}.{'completed' if picture.final else 'partial_image'}"
        event = {"type": kind, **self.description(picture), "created_at": self.created, "quality": "auto"}
        if not picture.final:
            event["partial_image_index"] = self._partial_images[index]
            if event["partial_image_index"] == self.body.partial_images:
                return None
            self._partial_images[index] += 1
        else:
            event["usage"] = _NO_TOKENS
        return await responses.picture_event({**event, "index": index, "b64_json": await self.encode(picture)}, kind)

    def description(self, picture: Picture) -> dict[str, Any]:
        """Return what a response says of a picture."""
        size = f"{picture.width}x{picture.height}"
        return {"background": "opaque", "output_format": self.body.output_format, "size": size}


def _preview_interval(body: ImageRequest, pipeline: Pipeline) -> int:
    """Return the steps between two previews, so that there are at most ``partial_images``."""
    configured = [
        stage.defaults.get("steps", pipeline.options(name).get("steps")) for name, stage in pipeline.stages.items()
    ]
    steps = next((each for each in (body.steps, *configured) if isinstance(each, int)), _ASSUMED_STEPS)
    return max(1, -(-steps // (body.partial_images + 1)))


def _begin(system: OmniSystem, drawing: _Drawing, params: Mapping[str, Any], files: Sequence[bytes]) -> Generations:
    """Begin the requests. Raises HTTPError, and as ``generate`` does."""
    params = {**params, **drawing.parameters(system.pipeline)}
    with renaming(drawing.names):
        begun = system.generate(
            drawing.body.prompt,
            n=drawing.body.n,
            image=files or None,
            modalities=("image",),
            request_id=f"img-{uuid.uuid4().hex}",
            **params,
        )
        return Generations(begun.members)


async def _answer(drawing: _Drawing, generations: Generations) -> Response:
    """Return the response to the requests."""
    with renaming(drawing.names):
        if drawing.body.stream:
            return await responses.StreamedResponse(generations, _events(drawing, generations)).start()
        with responses.collecting(generations):
            return responses.WholeResponse(generations, await _whole(drawing, generations))


async def _whole(drawing: _Drawing, generations: Generations) -> Response:
    """Read the generations to their end, and return one JSON object."""
    found: list[tuple[int, Picture, PictureText]] = []
    async for index, picture in _pictures(generations):
        if picture.final:
            found.append((index, picture, await drawing.encode(picture)))
    found.sort(key=lambda each: each[0])
    data = [{"b64_json": file} for _, _, file in found]
    description = drawing.description(found[0][1])
    return await responses.picture_response({"created": drawing.created, "data": data, **description})


async def _events(drawing: _Drawing, generations: Generations) -> responses.Pieces:
    """Yield the events of a streamed response."""
    async for index, picture in _pictures(generations):
        if (event := await drawing.event(index, picture)) is not None:
            yield event


async def _pictures(generations: Generations) -> AsyncGenerator[tuple[int, Picture], None]:
    """Yield each picture with its generation's index. Raises RequestError, also for one without a finished picture."""
    missing = set(range(generations.count))
    async for index, output in generations.outputs():
        if isinstance(output.delta, Picture):
            if output.delta.final:
                missing.discard(index)
            yield index, output.delta
    if missing:
        raise InvalidRequest("the answer to this prompt has no picture", param="prompt", code="no_picture")
