"""What the denoisers share: steps for many requests, their outputs, checkpoints, and figures of their pace.

Outputs: previews, progress, and the picture. Each has the data ``step``, ``total`` and ``final``. A preview has the
tensors that the picture would have if the velocity stayed as it is; progress has no tensors.

Rules
1. A step is one denoising step of each request that takes part (``turns``). A paused request does not, and delays no
   other one.
2. Resumption: after each step but the last the engine yields a checkpoint: the latents and the number of steps done.
   The decision of an output is its step. A request that goes on from a checkpoint puts out what lies before it without
   tensors: the previews were delivered, or are lost.
3. Latents that are not finite fail their own request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from omni_actors.stages.base import (
    InvalidRequest,
    StageCheckpoint,
    StageFailure,
    StageOutput,
    StageRequest,
    TensorLike,
)
from omni_actors.stages.diffusion.options import ImageParams, follows
from omni_actors.stages.diffusion.pace import Pace
from omni_actors.stages.diffusion.turns import Candidate, Turn, turn
from omni_actors.stages.engine import PausableEngine

Event: TypeAlias = StageOutput | StageFailure | StageCheckpoint


class DenoisingRequest:
    """One request of a denoiser. A subclass has its latents."""

    def __init__(self, request: StageRequest, params: ImageParams) -> None:
        self.id, self.priority = request.request_id, params.priority
        self._previews, self._progress = params.previews, params.progress
        self.paused = self.has_begun = False
        self.left_out = 0
        """Steps in a row that left it out."""
        self.step = 0
        """Steps done."""

    @property
    def complete(self) -> bool:
        """Whether all its input is there, so that ``total`` is known."""
        raise NotImplementedError

    @property
    def total(self) -> int:
        """The number of its steps."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        return self.complete and not self.paused

    @property
    def rows(self) -> int:
        """How many rows of a batch it takes (``turns``)."""
        return 1

    def estimate(self, velocity: Tensor) -> Tensor:
        """Return what the latents would be after the last step if the velocity stayed as it is."""
        raise NotImplementedError

    def advance(self, velocity: Tensor) -> None:
        """Do a step."""
        raise NotImplementedError

    def has_preview(self, step: int) -> bool:
        """Return whether a preview follows this step."""
        return follows(self._previews, step) and step < self.total

    def has_output(self, step: int) -> bool:
        """Return whether a preview or progress follows this step."""
        return self.has_preview(step) or (follows(self._progress, step) and step < self.total)


D = TypeVar("D", bound=DenoisingRequest)


class DenoiserBase(PausableEngine[D], Generic[D]):
    """An engine whose steps are denoising steps. max_batch: rows of a step."""

    def __init__(self, max_batch: int) -> None:
        super().__init__()
        self._max_batch, self._pace = max_batch, Pace()

    def _begin(self, request: D) -> None:
        """Make the latents that a request's first step begins with."""
        raise NotImplementedError

    def _velocities(self, requests: Sequence[D]) -> list[Tensor]:
        """Return the velocity of each request's latents at its next step."""
        raise NotImplementedError

    def _latents(self, requests: Sequence[D]) -> Sequence[Tensor]:
        """Return the latents of each request: float32, on the host."""
        raise NotImplementedError

    def _tensors(self, request: D, latents: Tensor) -> Mapping[str, TensorLike]:
        """Return the tensors of an output with these latents. They are as ``_latents`` or ``estimate`` gives them."""
        raise NotImplementedError

    def _data(self, request: D, step: int) -> dict[str, Any]:
        """Return the data of the output behind a step."""
        return {"step": step, "total": request.total, "final": step == request.total}

    def step(self) -> Iterator[Event]:
        """Do one denoising step of every request whose turn it is."""
        with self._pace.measured():
            running, left_out = self._turn()
            for request in left_out:
                request.left_out += 1
            for request in running:
                request.left_out = 0
                if not request.has_begun:
                    self._begin(request)
                    request.has_begun = True
                    for step in filter(request.has_output, range(1, request.step + 1)):
                        yield self._output(request, step, {})
            yield from self._advance(running, self._velocities(running))

    def gauges(self) -> Mapping[str, float]:
        """Return the figures of the requests and of their pace (``pace.Pace``)."""
        running = len(self._turn()[0])
        steps_left = [request.total - request.step for request in self._requests.values() if request.complete]
        return self._pace.gauges(steps_left, taking_part=running, waiting=len(self._requests) - running)

    def _turn(self) -> tuple[list[D], list[D]]:
        """Return the requests of the next step, and those that it leaves out."""
        ready = [request for request in self._requests.values() if request.ready]
        found: Turn = turn([_candidate(request) for request in ready], self._max_batch)
        return [ready[n] for n in found.running], [ready[n] for n in found.left_out]

    @torch.inference_mode()
    def _advance(self, requests: list[D], velocities: list[Tensor]) -> Iterator[Event]:
        """Let requests go one step along their velocities."""
        estimates: dict[int, Tensor] = {}
        for request, velocity in zip(requests, velocities, strict=True):
            if request.has_preview(request.step + 1):
                estimates[request.id] = request.estimate(velocity)
            request.advance(velocity)
        for request, latents in zip(requests, self._latents(requests), strict=True):
            step = request.step
            if not latents.isfinite().all():
                self.abort(request.id)
                message = f"the latents of this request are not finite after step {step}"
                yield StageFailure(request.id, InvalidRequest(message, code="output_not_finite"))
            elif step == request.total:
                self.abort(request.id)
                yield self._output(request, step, self._tensors(request, latents))
            else:
                if request.has_output(step):
                    estimate = estimates.get(request.id)
                    yield self._output(request, step, {} if estimate is None else self._tensors(request, estimate))
                yield StageCheckpoint(request.id, {"latents": latents.numpy()}, {"step": step})

    def _output(self, request: D, step: int, tensors: Mapping[str, TensorLike]) -> StageOutput:
        data = self._data(request, step)
        return StageOutput(request.id, tensors, data, last=data["final"], decisions=(step,))


def _candidate(request: DenoisingRequest) -> Candidate:
    return Candidate(
        rows=request.rows,
        has_begun=request.has_begun,
        priority=request.priority,
        steps_left=request.total - request.step,
        left_out=request.left_out,
    )
