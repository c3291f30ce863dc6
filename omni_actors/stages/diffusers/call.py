"""One call of a pipeline, one denoising step at a time.

A pipeline calls back after each step (``callback_on_step_end``, or ``callback`` in older ones). There the call stops
until it is to go on: see ``turns``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import diffusers
import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from omni_actors.stages.diffusers.arguments import Arguments
from omni_actors.stages.diffusers.options import DiffusersOptions, DiffusersParams
from omni_actors.stages.diffusers.pictures import Pictures, Pixels, Previews
from omni_actors.stages.diffusers.turns import Turns
from omni_actors.stages.diffusion.options import follows


class Step(NamedTuple):
    """A denoising step that was done.

    step: its number, from 1. shown: whether a preview or progress is due. preview: None also if the call has no
    previews, or the client has it.
    """

    step: int
    total: int
    shown: bool
    preview: Pixels | None


class Runner:
    """A pipeline, and what its calls take."""

    def __init__(self, pipeline: Any, options: DiffusersOptions) -> None:
        self.pipeline = pipeline
        self.arguments = Arguments(pipeline, options)
        self.previews = Previews(pipeline)
        self._shared: dict[int, Any] = {id(part): part for part in _shared(pipeline)}
        modules = (part for part in self._shared.values() if isinstance(part, torch.nn.Module))
        self.attending: list[Any] = [
            each
            for part in modules
            for each in part.modules()
            if hasattr(each, "set_processor") and hasattr(each, "processor")
        ]
        """The modules with an attention processor."""

    def fresh(self) -> Any:
        """Return a pipeline for one call, with the same modules and tokenizers.

        A call changes its pipeline, its scheduler, its guider, and the pipelines of which it is made.
        """
        return copy.deepcopy(self.pipeline, dict(self._shared))


def _shared(pipeline: Any) -> Iterator[Any]:
    """Yield what all calls of a pipeline share: it is large, and no call changes it but for ``_own_attention``."""
    for part in (*pipeline.components.values(), *vars(pipeline).values()):
        if isinstance(part, diffusers.DiffusionPipeline):
            yield from _shared(part)
        elif isinstance(part, torch.nn.Module | PreTrainedTokenizerBase | ProcessorMixin):
            yield part


class PipelineCall:
    """A call that goes on by one step with each ``advance``.

    arguments: as ``Arguments.make`` returns them. params: of the request; a preview is due after each
    ``params.previews`` steps, but not after the last one. step_seen: previews up to this step are not decoded.
    """

    def __init__(
        self, runner: Runner, arguments: Mapping[str, Any], params: DiffusersParams, step_seen: int = 0
    ) -> None:
        self._runner, self._arguments, self._params = runner, arguments, params
        self._step_seen = step_seen
        self._has_previews = runner.previews.possible
        self._seed = params.seed or 0  # the system draws one for a request that names none
        device = runner.pipeline.device
        self._cuda = [device] if device.type == "cuda" else []
        self._random_states: list[torch.Tensor] = []
        self._attention: list[Any] = []
        """The attention processors of the modules between two turns."""
        self._turns = Turns[Step | Pictures](self._run)

    def advance(self) -> Step | Pictures:
        """Compute the next step, or after the last one the pictures, which end the call.

        The first turn also encodes the prompt. Raises what the pipeline raises, which ends the call too.
        """
        with self._own_random_numbers(), self._own_attention():
            return self._turns.advance()

    def cancel(self) -> None:
        """End the call, wherever it is."""
        if not self._turns.done:
            with self._own_attention():
                self._turns.cancel()

    def _run(self, hand_over: Callable[[Step | Pictures], None]) -> Pictures:
        pipeline, params = self._runner.fresh(), self._params

        def after_step(_: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            total = getattr(pipeline, "num_timesteps", None) or len(pipeline.scheduler.timesteps)
            due, preview = follows(params.previews, index + 1) and index + 1 < total, None
            if due and index + 1 > self._step_seen and self._has_previews:
                preview = self._runner.previews.try_decode(pipeline, tensors["latents"], self._arguments)
                self._has_previews = preview is not None
            shown = due or (follows(params.progress, index + 1) and index + 1 < total)
            hand_over(Step(index + 1, total, shown, preview))
            return {}

        callback: dict[str, Any] = {"callback_on_step_end": after_step}
        if not self._runner.arguments.takes("callback_on_step_end"):
            older = lambda index, timestep, latents: after_step(pipeline, index, timestep, {"latents": latents})  # noqa: E731
            callback = {"callback": older, "callback_steps": 1}
        generator = torch.Generator().manual_seed(self._seed)  # on the host: the same noise on every device
        return Pictures(pipeline(**self._arguments, **callback, generator=generator, output_type="np"))

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Random numbers that are drawn without the call's generator follow from the seed too."""
        with torch.random.fork_rng(self._cuda):
            if not self._random_states:
                torch.manual_seed(self._seed)
            for state, device in zip(self._random_states, (None, *self._cuda), strict=False):
                torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)
            yield
            self._random_states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._cuda)]

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Some calls replace the attention of a shared module until they end (perturbed-attention guidance)."""
        shared = [each.processor for each in self._runner.attending]
        try:
            self._set_attention(self._attention or shared)
            yield
        finally:
            self._attention = [each.processor for each in self._runner.attending]
            self._set_attention(shared)

    def _set_attention(self, processors: Sequence[Any]) -> None:
        for module, processor in zip(self._runner.attending, processors, strict=True):
            if module.processor is not processor:
                module.set_processor(processor)
