"""The ``bagel_denoiser`` engine: contexts to pictures, a step of every running request at a time.

Input: the chunks of ``handoff``. Outputs: those of ``diffusion.denoiser``. Each but progress has ``tensors["image"]``,
uint8 (height, width, 3).

Rules, besides those of ``diffusion.denoiser``
1. A step is one forward for all running requests with one LoRA adapter, whatever their sizes and their number of steps
   (``flow``). A request has one row, whatever contexts it compares.
2. The contexts of requests that wait are in host memory, so that the device has those of active requests only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.adapters.engine import AdaptedEngine
from omni_actors.stages.adapters.files import named
from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.bagel import flow
from omni_actors.stages.bagel.contexts import Contexts
from omni_actors.stages.bagel.handoff import Receiver
from omni_actors.stages.bagel.model import BagelModel, Marks, adapters, load, marks, replace_weights
from omni_actors.stages.bagel.options import DenoiserOptions, DenoiserParams, OneStageOptions, guidances
from omni_actors.stages.base import Chunk, InvalidRequest, StageCheckpoint, StageContext, StageRequest, TensorLike
from omni_actors.stages.diffusion.denoiser import DenoiserBase, DenoisingRequest
from omni_actors.stages.refusal import validated


class Denoising(DenoisingRequest):
    """One request. steps: of a request that names none."""

    drawing: flow.Drawing
    """There once it has begun."""

    def __init__(self, request: StageRequest, params: DenoiserParams, steps: int, receiver: Receiver) -> None:
        super().__init__(request, params)
        self.params, self.receiver, self.adapter = params, receiver, named(params.lora)
        self.contexts: Contexts | None = None
        """None until they are complete, and once it has begun."""
        self._steps, self._latents = params.steps or steps, None
        if (checkpoint := request.checkpoint) is not None:
            self.step = int(checkpoint.data["step"])
            self._latents = torch.from_numpy(copied(checkpoint).tensors["latents"])

    @property
    def complete(self) -> bool:
        return self.has_begun or self.contexts is not None

    @property
    def total(self) -> int:
        return self._steps

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        """Take the complete contexts to the device."""
        assert self.contexts is not None, "a request that begins is complete"
        contexts, self.contexts = self.contexts.to(device, dtype), None
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
            times=flow.times(self._steps, params.shift),
            latents=latents,
            step=self.step,
        )

    def estimate(self, velocity: Tensor) -> Tensor:
        return self.drawing.estimate(velocity)

    def advance(self, velocity: Tensor) -> None:
        self.drawing.advance(velocity)
        self.step = self.drawing.step


class Denoiser(DenoiserBase[Denoising]):
    """The engine, on networks that are loaded. options: ``max_batch`` and ``steps`` count.

    adapters: of the networks. They have those of all its requests.
    """

    def __init__(
        self, model: BagelModel, marks: Marks, options: DenoiserOptions | OneStageOptions, adapters: BatchedAdapters
    ) -> None:
        super().__init__(options.max_batch)
        self._model, self._marks, self._steps, self._adapters = model, marks, options.steps, adapters
        self._capabilities["update_weights"] = self._update_weights

    def _new_request(self, request: StageRequest) -> Denoising:
        params = validated(request.params, DenoiserParams)
        if params.strength is not None:
            message = "strength: BAGEL reads the picture that it changes, and begins with noise alone"
            raise InvalidRequest(message, param="strength")
        return Denoising(request, params, self._steps, Receiver(self._model.config))

    def _take(self, request: Denoising, chunk: Chunk) -> None:
        request.contexts = request.receiver.feed(chunk)

    def take_contexts(self, request_id: int, contexts: Contexts) -> None:
        """Take the contexts of a started request, in place of its chunks. They are on the device."""
        waits = len(self._requests) > self._max_batch
        self._requests[request_id].contexts = contexts.to(torch.device("cpu"), self._model.dtype) if waits else contexts

    def _begin(self, request: Denoising) -> None:
        request.begin(self._model.device, self._model.dtype)

    def _velocities(self, requests: Sequence[Denoising]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for adapter in dict.fromkeys(request.adapter for request in requests):
            alike = [request for request in requests if request.adapter == adapter]
            with self._adapters.applied([adapter]):
                velocities = flow.velocities(self._model, self._marks, [request.drawing for request in alike])
            found.update(zip((request.id for request in alike), velocities, strict=True))
        return [found[request.id] for request in requests]

    def _latents(self, requests: Sequence[Denoising]) -> Sequence[Tensor]:
        return [request.drawing.latents for request in requests]

    def _tensors(self, request: Denoising, latents: Tensor) -> Mapping[str, TensorLike]:
        contexts = request.drawing.contexts
        return {"image": self._model.decode(latents, contexts.width, contexts.height).numpy()}

    @property
    def has_requests(self) -> bool:
        """Whether a request goes on."""
        return bool(self._requests)

    @property
    def used_adapters(self) -> set[Adapter]:
        """The adapters of its requests."""
        return {request.adapter for request in self._requests.values() if request.adapter is not None}

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return replace_weights(self._model, files)

    def close(self) -> None:
        super().close()
        del self._model


class DenoiserEngine(Denoiser, AdaptedEngine[Denoising, BatchedAdapters]):
    """The engine of a stage of its own. ``context.model``: a checkpoint of BAGEL."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files), ValueError."""
        options = msgspec.convert(context.options, DenoiserOptions)
        found = marks(AutoTokenizer.from_pretrained(context.tokenizer_directory, local_files_only=True))
        model = load(context, options.dtype, reads=False, draws=True)
        super().__init__(model, found, options, adapters(model, options.idle_loras))


def copied(checkpoint: StageCheckpoint) -> StageCheckpoint:
    """Return a checkpoint whose tensors are arrays of its own, so that they stay valid when ``start`` has returned."""
    arrays = {
        name: (tensor if isinstance(tensor, np.ndarray) else tensor.numpy()).copy()
        for name, tensor in checkpoint.tensors.items()
    }
    return msgspec.structs.replace(checkpoint, tensors=arrays)
