"""An engine without a model that makes pictures. Workers import this module by name.

A picture is a function of the prompt, the negative prompt, the seed, the size, the guidance and the pictures that come
with the prompt. A step is one turn of the engine loop and costs ``step_s`` once for all requests. A preview is the
final picture, darker by the steps that are missing.

Words of the prompt have effects: "unpaintable" is refused, "deadly" ends the worker after the first step, "colourless"
ends without a picture, and "progress" sends a chunk without a picture after each step that has no preview.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from omni_actors.stages.base import NEXT_END, Chunk, InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.bounds import Seconds
from omni_actors.stages.diffusion.options import ImageParams, width_and_height
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.refusal import validated
from omni_actors.stages.sources import OpenSources


class PaintingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step_s: Seconds = 0.0
    size: str = "32x24"
    """The size of a picture whose request names none."""
    steps: Annotated[int, Meta(ge=1)] = 4
    frames: Annotated[int, Meta(ge=1)] = 1
    """A picture of more than one is a video: its frames come one in each turn, as those of the engine "diffusers"."""


class PaintingParams(ImageParams, frozen=True, forbid_unknown_fields=True):
    negative_prompt: str = ""


class _Painting(msgspec.Struct):
    params: PaintingParams
    width: int
    height: int
    total: int
    open: OpenSources
    digest: Any
    """The hash of all that the picture depends on."""
    words: frozenset[str] = frozenset()
    step: int = 0
    frame: int = 0
    paused: bool = False

    @property
    def ready(self) -> bool:
        return not self.paused and not self.open

    def pixels(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        random = np.random.default_rng(int.from_bytes(self.digest.digest()[:8]))
        coarse = random.integers(0, 256, (4, 4, 3))
        rows, columns = np.arange(self.height) * 4 // self.height, np.arange(self.width) * 4 // self.width
        return (coarse[rows][:, columns] * self.step // self.total).astype(np.uint8)


class PaintingEngine(PausableEngine[_Painting]):
    """Paints deterministically, one step of all requests at a time."""

    def __init__(self, context: StageContext) -> None:
        super().__init__()
        self._options = msgspec.convert(context.options, PaintingOptions)

    def _new_request(self, request: StageRequest) -> _Painting:
        params = validated(request.params, PaintingParams)
        width, height = width_and_height(params.size or self._options.size)
        seen = [params.negative_prompt, params.seed or 0, params.guidance, params.strength, width, height]
        return _Painting(
            params=params,
            width=width,
            height=height,
            total=params.steps or self._options.steps,
            open=OpenSources(request.sources),
            digest=hashlib.sha256(repr(seen).encode()),
        )

    def _take(self, request: _Painting, chunk: Chunk) -> None:
        for name, tensor in chunk.tensors.items():
            request.digest.update(name.encode() + tensor.numpy().tobytes())
        if "messages" in chunk.data:
            prompt = _text(chunk.data["messages"])
            request.words = frozenset(prompt.split())
            request.digest.update(prompt.encode())
            if "unpaintable" in request.words:
                raise InvalidRequest("messages: this prompt cannot be painted", param="messages")
        request.open.update(chunk)

    def step(self) -> Iterator[StageOutput]:
        time.sleep(self._options.step_s)
        for request_id, painting in list(self._requests.items()):
            if not painting.ready:
                continue
            if painting.step and "deadly" in painting.words:
                os.write(2, b"words of the worker\n")
                os._exit(3)
            painting.step = min(painting.step + 1, painting.total)
            final = painting.step == painting.total
            data: dict[str, Any] = {"step": painting.step, "total": painting.total, "final": final}
            every = painting.params.previews
            if final and self._options.frames > 1:
                data |= {"frame": painting.frame, "frames": self._options.frames}
                painting.frame += 1
                if painting.frame < self._options.frames:
                    yield StageOutput(request_id, {"image": painting.pixels()}, data)
                    continue
            if final:
                del self._requests[request_id]
            if "colourless" not in painting.words and (final or (every and painting.step % every == 0)):
                yield StageOutput(request_id, {"image": painting.pixels()}, data, last=final)
            elif final or "progress" in painting.words:
                yield StageOutput(request_id, {}, data, last=final)

    def gauges(self) -> dict[str, float]:
        """Return when the next picture is done, as a denoiser does."""
        left = [painting.total - painting.step for painting in self._requests.values() if painting.ready]
        return {NEXT_END: min(left) * self._options.step_s} if left else {}


def _text(messages: list[dict[str, Any]]) -> str:
    """Return the text of the last message of the user."""
    content = next(message["content"] for message in reversed(messages) if message["role"] == "user")
    return content if isinstance(content, str) else " ".join(part["text"] for part in content if "text" in part)
