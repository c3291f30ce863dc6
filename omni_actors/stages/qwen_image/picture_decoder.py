"""Qwen-Image's picture decoder: normalised latents to pictures, with the decoder of the VAE.

Input: the denoiser's outputs, previews and the picture. Output: one for each, with ``image``, uint8 (height, width, 3),
and the data ``step``, ``total`` and ``final``. A preview that was lost in a death has no latents, and no image.

A step decodes one picture, with diffusers' operations in its order: that of the request that has waited longest.
Resumption: an output that is not needed is not decoded. The others are a function of their chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

import ringbuf
from omni_actors.stages.base import Chunk, InvalidRequest, StageContext, StageFailure, StageOutput, StageRequest
from omni_actors.stages.bounds import Count
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.multimodal.prompt import Pixels
from omni_actors.stages.qwen_image.options import PictureDecoderOptions
from omni_actors.stages.qwen_image.vae import HalfVae
from omni_actors.stages.refusal import validated
from omni_actors.stages.tensors import to_torch


class _LatentsData(msgspec.Struct, frozen=True):
    """The ``data`` of a chunk with latents."""

    step: Count
    total: Count
    final: bool


class _Latents(msgspec.Struct, frozen=True):
    """One chunk. latents: (channels, height, width), or None for a lost preview."""

    data: _LatentsData
    latents: Tensor | None


class _Request:
    def __init__(self, request: StageRequest) -> None:
        self.id, self.unneeded = request.request_id, request.needed_from
        """``unneeded``: the outputs that are left of those that need no picture."""
        self.waiting: deque[_Latents] = deque()
        self.paused = False

    @property
    def ready(self) -> bool:
        return bool(self.waiting) and not self.paused


class PictureDecoder(PausableEngine[_Request]):
    """Decodes latents, with the decoder of the VAE in ``context.model``, a directory of diffusers."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        super().__init__()
        self._options = msgspec.convert(context.options, PictureDecoderOptions)
        self._vae = HalfVae(context, "decoder", self._options.dtype, tiling=self._options.tiling)
        self._processor: Any = VaeImageProcessor(vae_scale_factor=2 * self._vae.pixels)
        self._capabilities["update_weights"] = self._update_weights

    def _new_request(self, request: StageRequest) -> _Request:
        return _Request(request)

    def _take(self, request: _Request, chunk: Chunk) -> None:
        data = validated(chunk.data, _LatentsData)
        if data.final != chunk.last:
            raise InvalidRequest("latents: the last chunk, and no other, has the final latents", param="latents")
        sent = chunk.tensors.get("latents")
        if sent is not None:
            self._check(sent)
        elif data.final:
            raise InvalidRequest("latents: the final chunk has none", param="latents")
        request.waiting.append(_Latents(data, None if sent is None else to_torch(sent)))

    def _check(self, sent: ringbuf.Tensor) -> None:
        """Raise InvalidRequest unless these are latents of a picture that is not too large."""
        shape, channels = sent.shape, self._vae.channels
        if "float" not in sent.dtype or len(shape) != 3 or shape[0] != channels or not sent.nbytes:
            message = f"latents: floats of shape ({channels}, height, width) were expected, not {sent.dtype} {shape}"
            raise InvalidRequest(message, param="latents")
        if (pixels := shape[1] * shape[2] * self._vae.pixels**2) > self._options.max_pixels:
            message = f"size: the picture has {pixels} pixels; the limit is {self._options.max_pixels}"
            raise InvalidRequest(message, param="size")

    def step(self) -> Iterator[StageOutput | StageFailure]:
        """Decode the next picture of the first request that has one, which then queues up behind the others."""
        request = next(each for each in self._requests.values() if each.ready)
        del self._requests[request.id]
        next_one = request.waiting.popleft()
        data = next_one.data
        image: dict[str, Pixels] = {}
        if partial := request.unneeded > 0:
            request.unneeded -= 1
        elif next_one.latents is not None:
            if not next_one.latents.isfinite().all():
                error = InvalidRequest("the latents of this picture are not finite", code="output_not_finite")
                yield StageFailure(request.id, error)
                return
            image["image"] = self._decode(next_one.latents)
        if not data.final:
            self._requests[request.id] = request
        described, decisions = msgspec.to_builtins(data), (data.step,)
        yield StageOutput(request.id, image, described, data.final, decisions=decisions, partial=partial)

    @torch.inference_mode()
    def _decode(self, latents: Tensor) -> Pixels:
        """Return the picture of these latents, uint8 (height, width, 3)."""
        vae = self._vae
        scaled = latents[None, :, None].to(vae.device, vae.dtype) / vae.inverse_std() + vae.mean()
        decoded = vae.model.decode(scaled, return_dict=False)[0][:, :, 0]
        pictures = self._processor.postprocess(decoded, output_type="np")
        image: Pixels = (pictures[0] * 255).round().astype(np.uint8)  # as diffusers makes a Pillow image
        return image

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return self._vae.replace(files)
