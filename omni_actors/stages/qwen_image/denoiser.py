"""Qwen-Image's denoiser: noise to the latents of a picture, a step of every request at a time.

Input, from the text encoder: ``prompt``, hidden states (n, width), and with a negative prompt ``negative``, (m, width).
From the picture encoder, if the request has pictures: ``latents``, (channels, height, width), or ``latents.0``,
``latents.1``, …, normalised as the transformer wants them.

Outputs: previews, and the picture. Each has ``latents``, float32 (channels, height, width), normalised, and the data
``step``, ``total``, ``final``, and ``width`` and ``height`` of the picture in pixels. A preview has the latents that
the last step would give if the velocity stayed as it is. The final output has those of the last step.

Rules
1. The running requests are the first ones whose rows fit into ``max_batch``: those that have begun, then by priority,
   then by arrival. A paused request gives up its rows, so it delays no other one.
2. A step is one denoising step of every running request. Those with one layout share a forward (``transformer``).
3. The noise of a request depends on its seed alone (``latents.Noise``), and is drawn when it begins.
4. A companion, the row of the negative prompt, exists if there is a negative prompt and the guidance is above 1.
5. Resumption: after each step but the last the engine yields a checkpoint: the latents and the number of steps done.
   The decision of an output is its step. A request that goes on from a checkpoint puts out the previews of the steps
   that it does not repeat without latents: they were delivered, or are lost.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.adapters.engine import AdaptedEngine
from omni_actors.stages.base import (
    Chunk,
    InvalidRequest,
    StageCheckpoint,
    StageContext,
    StageFailure,
    StageOutput,
    StageRequest,
)
from omni_actors.stages.diffusion.pipeline_index import read_index
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.qwen_image.denoising import Denoising, ModelLimits
from omni_actors.stages.qwen_image.latents import unpack
from omni_actors.stages.qwen_image.options import DenoiserOptions, DenoiserParams
from omni_actors.stages.qwen_image.schedule import Schedules
from omni_actors.stages.qwen_image.transformer import Layout, Transformer
from omni_actors.stages.refusal import validated

_Event: TypeAlias = StageOutput | StageFailure | StageCheckpoint

_WEIGHT = 0.2
"""The weight of the latest step in the mean of recent steps."""


class _VaeConfig(msgspec.Struct, frozen=True):
    temperal_downsample: list[bool]
    """One entry for each time that the VAE halves a picture's sides."""


class DenoiserEngine(AdaptedEngine[Denoising, BatchedAdapters], PausableEngine[Denoising]):
    """Denoises with the ``transformer`` and the ``scheduler`` of ``context.model``, a directory of diffusers."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files), ValueError."""
        super().__init__()
        options = msgspec.convert(context.options, DenoiserOptions)
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
        self._max_batch, self._step_seconds = options.max_batch, 0.0
        self._capabilities["update_weights"] = self._update_weights

    def _new_request(self, request: StageRequest) -> Denoising:
        return Denoising(request, validated(request.params, DenoiserParams), self._limits)

    def _take(self, request: Denoising, chunk: Chunk) -> None:
        request.take(chunk)
        if not request.open:
            request.complete(self._schedules)

    def step(self) -> Iterator[_Event]:
        """Do one denoising step of every running request."""
        started = time.perf_counter()
        groups: dict[Layout, list[Denoising]] = defaultdict(list)
        running = self._running()
        for request in running:
            if not request.has_begun:
                request.begin(self._transformer.device, self._transformer.dtype)
                for step in request.lost_previews():
                    yield StageOutput(request.id, data=self._data(request, step), decisions=(step,))
            groups[request.layout].append(request)
        for members in groups.values():
            alone = len(running) == 1
            network = self._transformer
            yield from self._advance(members, [network.velocity(*members)] if alone else network.velocities(members))
        took = time.perf_counter() - started
        self._step_seconds += (took - self._step_seconds) * (_WEIGHT if self._step_seconds else 1.0)

    def gauges(self) -> Mapping[str, float]:
        """Return how many requests run and wait, the steps that they need, and the mean seconds of recent steps."""
        running, complete = len(self._running()), [each for each in self._requests.values() if not each.open]
        return {
            "running": float(running),
            "waiting": float(len(self._requests) - running),
            "steps_left": float(sum(request.total - request.step for request in complete)),
            "step_seconds": self._step_seconds,
        }

    def warm_up(self) -> None:
        """Compute one step of the smallest picture."""
        self._transformer.warm_up()

    def close(self) -> None:
        super().close()
        del self._transformer, self._adapters

    def _running(self) -> list[Denoising]:
        """Return the requests of the next step (rule 1). At least one runs, if one is ready."""
        ready = [request for request in self._requests.values() if request.ready]
        ready.sort(key=lambda request: (not request.has_begun, request.priority))  # stable: then by arrival
        rows = itertools.accumulate(request.rows for request in ready)
        fitting = sum(1 for taken in rows if taken <= self._max_batch)
        return ready[: max(fitting, 1)]

    @torch.inference_mode()
    def _advance(self, requests: list[Denoising], velocities: list[Tensor]) -> Iterator[_Event]:
        """Let requests that have one layout go one step along their velocities."""
        estimates: dict[int, Tensor] = {}
        for request, velocity in zip(requests, velocities, strict=True):
            if request.preview_follows:
                estimates[request.id] = request.schedule.estimate(request.latents, velocity, request.step)
            request.latents = request.schedule.step(request.latents, velocity, request.step)
            request.step += 1
        latents = torch.cat([request.latents for request in requests]).float().cpu()
        for request, reached in zip(requests, latents, strict=True):
            if not reached.isfinite().all():
                self.abort(request.id)
                yield StageFailure(request.id, _not_finite(request.step))
            elif request.step == request.total:
                self.abort(request.id)
                yield self._output(request, reached)
            else:
                if request.id in estimates:
                    yield self._output(request, estimates[request.id][0].cpu())
                yield StageCheckpoint(request.id, {"latents": reached.numpy()[None]}, {"step": request.step})

    def _output(self, request: Denoising, packed: Tensor) -> StageOutput:
        """Return the output with these packed latents, (rows, channels), behind the step that was just done."""
        tensors = {"latents": unpack(packed, request.grid).contiguous().numpy()}
        data = self._data(request, request.step)
        return StageOutput(request.id, tensors, data, last=data["final"], decisions=(request.step,))

    def _data(self, request: Denoising, step: int) -> dict[str, Any]:
        """Return the data of the output behind a step."""
        height, width = (side * self._limits.pixels for side in request.grid)
        total = request.total
        return {"step": step, "total": total, "final": step == total, "width": width, "height": height}

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return self._transformer.replace(files)


def _pixels_of_a_latent(directory: Path) -> int:
    """Return how many pixels a side of a latent has. Raises OSError, msgspec.ValidationError."""
    config = msgspec.json.decode((directory / "vae" / "config.json").read_bytes(), type=_VaeConfig)
    return 1 << len(config.temperal_downsample)


def _not_finite(step: int) -> InvalidRequest:
    message = f"the latents of this request are not finite after step {step}"
    return InvalidRequest(message, code="output_not_finite")
