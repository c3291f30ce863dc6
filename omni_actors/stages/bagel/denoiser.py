"""The ``bagel_denoiser`` engine: contexts to pictures, a step of every running request at a time.

Input: the chunks of ``handoff``. Outputs: previews and the picture, ``tensors["image"]``, uint8 (height, width, 3),
with the data ``step``, ``total`` and ``final``.

Rules
1. The running requests are those that have begun, then others by priority and arrival, up to ``max_batch``. A paused
   request gives up its place.
2. A step is one forward for all running requests, whatever their sizes and their number of steps (``flow``).
3. A preview is the picture that would result if the velocity stayed as it is.
4. Resumption: after each step but the last comes a checkpoint, the latents and the number of steps done. The decision
   of an output is its step. A request that goes on from a checkpoint puts out the previews of earlier steps again,
   but without a picture: they were delivered, or are lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from omni_actors.stages.bagel import flow
from omni_actors.stages.bagel.contexts import Contexts
from omni_actors.stages.bagel.handoff import Receiver
from omni_actors.stages.bagel.model import BagelModel, Marks, load, marks, replace_weights
from omni_actors.stages.bagel.options import DenoiserOptions, DenoiserParams, guidances
from omni_actors.stages.base import (
    Chunk,
    InvalidRequest,
    StageCheckpoint,
    StageContext,
    StageFailure,
    StageOutput,
    StageRequest,
)
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.refusal import validated

Event: TypeAlias = StageOutput | StageFailure | StageCheckpoint

_WEIGHT = 0.2
"""The weight of the latest step in the mean of recent steps."""


class Denoising:
    """One request."""

    paused = False

    def __init__(self, request: StageRequest, params: DenoiserParams, steps: int, receiver: Receiver) -> None:
        self.id, self.params, self.receiver = request.request_id, params, receiver
        self.steps = params.steps or steps
        self.has_begun = False
        self.drawing: flow.Drawing | None = None
        """None until the contexts are complete."""
        self._journal = request.journal
        self._step, self._latents = 0, None
        if (checkpoint := request.checkpoint) is not None:
            self._step = int(checkpoint.data["step"])
            self._latents = torch.from_numpy(copied(checkpoint).tensors["latents"])

    @property
    def ready(self) -> bool:
        return self.drawing is not None and not self.paused

    def begin(self, contexts: Contexts) -> None:
        """Take the complete contexts."""
        params, edits = self.params, contexts.edits
        text, image = guidances(params, edits=edits)
        guidance = flow.Guidance(
            text=text,
            image=image,
            begin=(0.0 if edits else 0.4) if params.guidance_from is None else params.guidance_from,
            end=params.guidance_to,
            renorm=params.renorm or ("text_channel" if edits else "global"),
            least=params.renorm_min,
        )
        latents = contexts.noise if self._latents is None else self._latents
        self.drawing = flow.Drawing(
            contexts=contexts,
            guidance=guidance,
            times=flow.times(self.steps, params.shift),
            latents=latents,
            step=self._step,
        )

    def lost_previews(self) -> list[int]:
        """Return the steps of the journal's previews that the checkpoint lies behind."""
        return [decisions[-1] for decisions in self._journal if decisions and decisions[-1] <= self._step]

    @property
    def preview_follows(self) -> bool:
        """Whether a preview comes with the next step."""
        drawing, every = self.drawing, self.params.previews
        assert drawing is not None
        return bool(every) and (drawing.step + 1) % every == 0 and drawing.step + 1 < drawing.total


class Denoiser(PausableEngine[Denoising]):
    """The engine, on networks that are loaded. steps: of a request that names none."""

    def __init__(self, model: BagelModel, marks: Marks, max_batch: int, steps: int) -> None:
        super().__init__()
        self._model, self._marks, self._max_batch, self._steps = model, marks, max_batch, steps
        self._step_seconds = 0.0
        self._capabilities["update_weights"] = self._update_weights

    def _new_request(self, request: StageRequest) -> Denoising:
        params = validated(request.params, DenoiserParams)
        if params.strength is not None:
            message = "strength: BAGEL reads the picture that it changes, and begins with noise alone"
            raise InvalidRequest(message, param="strength")
        receiver = Receiver(self._model.config, self._model.device, self._model.dtype)
        return Denoising(request, params, self._steps, receiver)

    def _take(self, request: Denoising, chunk: Chunk) -> None:
        if (contexts := request.receiver.feed(chunk)) is not None:
            request.begin(contexts)

    def begin(self, request_id: int, contexts: Contexts) -> None:
        """Take the contexts of a started request, in place of its chunks."""
        self._requests[request_id].begin(contexts)

    def step(self) -> Iterator[Event]:
        """Do one denoising step of every running request."""
        started = time.perf_counter()
        running = self._running()
        for request in running:
            if not request.has_begun:
                request.has_begun = True
                for step in request.lost_previews():
                    yield StageOutput(request.id, data=_data(step, request.steps), decisions=(step,))
        drawings = [request.drawing for request in running if request.drawing is not None]
        found = flow.velocities(self._model, self._marks, drawings)
        for request, drawing, velocity in zip(running, drawings, found, strict=True):
            yield from self._advance(request, drawing, velocity)
        took = time.perf_counter() - started
        self._step_seconds += (took - self._step_seconds) * (_WEIGHT if self._step_seconds else 1.0)

    def gauges(self) -> Mapping[str, float]:
        """Return how many requests run and wait, the steps that they need, and the mean seconds of recent steps."""
        running = len(self._running())
        drawings = [request.drawing for request in self._requests.values() if request.drawing is not None]
        return {
            "running": float(running),
            "waiting": float(len(self._requests) - running),
            "steps_left": float(sum(drawing.total - drawing.step for drawing in drawings)),
            "step_seconds": self._step_seconds,
        }

    @property
    def has_requests(self) -> bool:
        """Whether a request goes on."""
        return bool(self._requests)

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return replace_weights(self._model, files)

    def close(self) -> None:
        super().close()
        del self._model

    def _running(self) -> list[Denoising]:
        """Return the requests of the next step (rule 1)."""
        ready = [request for request in self._requests.values() if request.ready]
        ready.sort(key=lambda request: (not request.has_begun, request.params.priority))  # stable: then by arrival
        return ready[: self._max_batch]

    def _advance(self, request: Denoising, drawing: flow.Drawing, velocity: Tensor) -> Iterator[Event]:
        estimate = drawing.estimate(velocity) if request.preview_follows else None
        drawing.advance(velocity)
        if not drawing.latents.isfinite().all():
            self.abort(request.id)
            message = f"the latents of this request are not finite after step {drawing.step}"
            yield StageFailure(request.id, InvalidRequest(message, code="output_not_finite"))
        elif drawing.step == drawing.total:
            self.abort(request.id)
            yield self._output(request, drawing, drawing.latents)
        else:
            if estimate is not None:
                yield self._output(request, drawing, estimate)
            yield StageCheckpoint(request.id, {"latents": drawing.latents.numpy()}, {"step": drawing.step})

    @torch.inference_mode()
    def _output(self, request: Denoising, drawing: flow.Drawing, latents: Tensor) -> StageOutput:
        """Return the picture of latents, behind the step that was just done."""
        picture = self._model.decode(latents, drawing.contexts.width, drawing.contexts.height)
        data = _data(drawing.step, drawing.total)
        tensors = {"image": picture.numpy()}
        return StageOutput(request.id, tensors, data, last=data["final"], decisions=(drawing.step,))


class DenoiserEngine(Denoiser):
    """The engine of a stage of its own. ``context.model``: a checkpoint of BAGEL."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files), ValueError."""
        options = msgspec.convert(context.options, DenoiserOptions)
        found = marks(AutoTokenizer.from_pretrained(context.tokenizer_directory, local_files_only=True))
        model = load(context, options.dtype, reads=False, draws=True)
        super().__init__(model, found, options.max_batch, options.steps)


def _data(step: int, total: int) -> dict[str, Any]:
    return {"step": step, "total": total, "final": step == total}


def copied(checkpoint: StageCheckpoint) -> StageCheckpoint:
    """Return a checkpoint whose tensors are arrays of its own, so that they stay valid when ``start`` has returned."""
    arrays = {
        name: (tensor if isinstance(tensor, np.ndarray) else tensor.numpy()).copy()
        for name, tensor in checkpoint.tensors.items()
    }
    return msgspec.structs.replace(checkpoint, tensors=arrays)
