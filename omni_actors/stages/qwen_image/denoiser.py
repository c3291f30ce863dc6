"""Qwen-Image's denoiser: noise to the latents of a picture, a step of every request at a time.

Input, from the text encoder: ``prompt``, hidden states (n, width), and with a negative prompt ``negative``, (m, width).
From the picture encoder, if the request has pictures: ``latents``, (channels, height, width), or ``latents.0``,
``latents.1``, …, normalised as the transformer wants them.

Outputs: those of ``diffusion.denoiser``. Each but progress has ``latents``, float32 (channels, height, width),
normalised, and the data ``width`` and ``height`` of the picture in pixels.

Rules, besides those of ``diffusion.denoiser``
1. A step takes as few forwards as it pays (``transformer``).
2. The noise of a request depends on its seed alone (``latents.Noise``), and is drawn when it begins.
3. A companion, the row of the negative prompt, exists if there is a negative prompt and the guidance is above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.adapters.engine import AdaptedEngine
from omni_actors.stages.base import Chunk, StageContext, StageRequest, TensorLike
from omni_actors.stages.diffusion.denoiser import DenoiserBase
from omni_actors.stages.diffusion.pipeline_index import read_index
from omni_actors.stages.qwen_image.denoising import Denoising, ModelLimits
from omni_actors.stages.qwen_image.latents import unpack
from omni_actors.stages.qwen_image.options import DenoiserOptions, DenoiserParams
from omni_actors.stages.qwen_image.schedule import Schedules
from omni_actors.stages.qwen_image.transformer import Transformer
from omni_actors.stages.refusal import validated


class _VaeConfig(msgspec.Struct, frozen=True):
    temperal_downsample: list[bool]
    """One entry for each time that the VAE halves a picture's sides."""


class DenoiserEngine(DenoiserBase[Denoising], AdaptedEngine[Denoising, BatchedAdapters]):
    """Denoises with the ``transformer`` and the ``scheduler`` of ``context.model``, a directory of diffusers."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files), ValueError."""
        options = msgspec.convert(context.options, DenoiserOptions)
        super().__init__(options.max_batch)
        torch.set_num_threads(context.threads)
        directory, device = context.model_directory, torch.device(context.device)
        context.report("reading the weights of the transformer")
        dtype = getattr(torch, options.dtype)
        self._transformer = Transformer(directory, device, dtype, idle_loras=options.idle_loras)
        self._adapters = self._transformer.adapters
        self._schedules = Schedules(directory / "scheduler", device)
        self._limits = ModelLimits(
            options=options,
            pixels=_pixels_of_a_latent(directory),
            channels=self._transformer.channels,
            width=self._transformer.width,
            positions=self._transformer.positions,
            conditions=read_index(directory).looks_at_pictures,
        )
        self._capabilities["update_weights"] = self._update_weights

    def _new_request(self, request: StageRequest) -> Denoising:
        return Denoising(request, validated(request.params, DenoiserParams), self._limits)

    def _take(self, request: Denoising, chunk: Chunk) -> None:
        request.take(chunk)
        if not request.open:
            request.prepare(self._schedules)

    def _begin(self, request: Denoising) -> None:
        request.begin(self._transformer.device, self._transformer.dtype)

    def _velocities(self, requests: Sequence[Denoising]) -> list[Tensor]:
        network = self._transformer
        return [network.velocity(*requests)] if len(requests) == 1 else network.velocities(requests)

    def _latents(self, requests: Sequence[Denoising]) -> Sequence[Tensor]:
        """Return the packed latents of each request, (rows, channels)."""
        latents = torch.cat([request.latents[0] for request in requests]).float().cpu()  # one transfer for all
        return torch.split(latents, [request.grid.rows for request in requests])

    def _tensors(self, request: Denoising, latents: Tensor) -> Mapping[str, TensorLike]:
        return {"latents": unpack(latents, request.grid).contiguous().numpy()}

    def _data(self, request: Denoising, step: int) -> dict[str, Any]:
        height, width = (side * self._limits.pixels for side in request.grid)
        return {**super()._data(request, step), "width": width, "height": height}

    def warm_up(self) -> None:
        """Compute one step of the smallest picture."""
        self._transformer.warm_up()

    def close(self) -> None:
        super().close()
        del self._transformer, self._adapters

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return self._transformer.replace(files)


def _pixels_of_a_latent(directory: Path) -> int:
    """Return how many pixels a side of a latent has. Raises OSError, msgspec.ValidationError."""
    config = msgspec.json.decode((directory / "vae" / "config.json").read_bytes(), type=_VaeConfig)
    return 1 << len(config.temperal_downsample)
