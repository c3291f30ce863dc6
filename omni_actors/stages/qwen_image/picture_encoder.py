"""Qwen-Image's picture encoder: a request's pictures to normalised latents, with the encoder of the VAE.

Input: pictures (see ``multimodal.prompt``). Output: one chunk with ``latents``, (channels, height, width), or with
several pictures ``latents.0``, ``latents.1``, ….

A model that looks at pictures gets the mode of each, scaled to ``image_area`` pixels. A picture to start from is scaled
to the request's ``size``, or to ``image_area`` pixels, and sampled with its seed. Both are diffusers' operations in
its order. Each picture is computed by itself, one in a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from omni_actors.stages.base import Chunk, InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.diffusion.options import width_and_height
from omni_actors.stages.diffusion.pipeline_index import EDIT_PLUS, read_index
from omni_actors.stages.diffusion.prompt import user_pictures
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.qwen_image.options import PictureEncoderOptions, PictureEncoderParams
from omni_actors.stages.qwen_image.pictures import scaled_size
from omni_actors.stages.qwen_image.vae import HalfVae
from omni_actors.stages.refusal import request_work, validated
from omni_actors.stages.tensors import to_wire


class _Request:
    def __init__(self, request: StageRequest) -> None:
        self.id = request.request_id
        self.params = validated(request.params, PictureEncoderParams)
        self.prompt = OmniPrompt(request.sources)
        self.pictures: deque[Tensor] = deque()
        """The pictures that are not encoded yet, float32 (1, 3, 1, height, width), full scale ±1."""
        self.latents: list[Tensor] = []
        self.paused = False

    @property
    def ready(self) -> bool:
        return bool(self.pictures) and not self.paused


class PictureEncoder(PausableEngine[_Request]):
    """Encodes pictures, with the encoder of the VAE in ``context.model``, a directory of diffusers."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        super().__init__()
        self._options = msgspec.convert(context.options, PictureEncoderOptions)
        index = read_index(context.model_directory)
        self._looks_at_pictures = index.looks_at_pictures
        self._most = self._options.max_images if index.class_name == EDIT_PLUS else 1
        self._vae = HalfVae(context, "encoder", self._options.dtype, tiling=self._options.tiling)
        self._unit = 2 * self._vae.pixels
        self._processor: Any = VaeImageProcessor(vae_scale_factor=self._unit)
        self._capabilities["update_weights"] = self._update_weights

    def _new_request(self, request: StageRequest) -> _Request:
        record = _Request(request)
        if record.params.size is not None and not self._looks_at_pictures:
            self._check_size(*width_and_height(record.params.size), "size")
        return record

    def _take(self, request: _Request, chunk: Chunk) -> None:
        if not request.prompt.feed(chunk):
            return
        media = request.prompt.media
        if not media.image or media.audio or media.video:
            raise InvalidRequest("image: pictures were expected, and nothing else", param="image")
        with request_work("image"):
            pictures = user_pictures(request.prompt, self._most, self._options.image_pixels)
            request.pictures.extend(self._preprocessed(picture, request.params) for picture in pictures)
        request.prompt = OmniPrompt(())

    def _preprocessed(self, picture: Image.Image, params: PictureEncoderParams) -> Tensor:
        if params.size is not None and not self._looks_at_pictures:
            width, height = width_and_height(params.size)
        else:
            width, height = scaled_size(picture, self._options.image_area)
            self._check_size(width, height, "image")
        pixels: Tensor = self._processor.preprocess(picture, height, width)
        return pixels.unsqueeze(2)

    def _check_size(self, width: int, height: int, param: str) -> None:
        if width % self._unit or height % self._unit:
            message = f"{param}: {width}x{height}: width and height must be multiples of {self._unit}"
            raise InvalidRequest(message, param=param)
        if width * height > self._options.max_pixels:
            message = f"{param}: {width}x{height} has more pixels than the limit, {self._options.max_pixels}"
            raise InvalidRequest(message, param=param)

    def step(self) -> Iterator[StageOutput]:
        """Encode the next picture of the first request that has one."""
        request = next(each for each in self._requests.values() if each.ready)
        request.latents.append(self._encode(request.pictures.popleft(), request.params.seed))
        if not request.pictures:
            self.abort(request.id)
            several = len(request.latents) > 1
            named = {f"latents.{n}" if several else "latents": latents for n, latents in enumerate(request.latents)}
            yield StageOutput(request.id, {name: to_wire(latents) for name, latents in named.items()}, last=True)

    @torch.inference_mode()
    def _encode(self, pixels: Tensor, seed: int | None) -> Tensor:
        """Return the normalised latents, (channels, height, width)."""
        vae = self._vae
        distribution = vae.model.encode(pixels.to(vae.device, vae.dtype)).latent_dist
        if self._looks_at_pictures:
            latents = (distribution.mode() - vae.mean()) / vae.std()
        else:
            random = None if seed is None else torch.Generator().manual_seed(seed & (2**64 - 1))
            sampled = distribution.mode() if random is None else distribution.sample(random)
            latents = (sampled - vae.mean()) * vae.inverse_std()
        picture: Tensor = latents[0, :, 0]
        return picture

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return self._vae.replace(files)
