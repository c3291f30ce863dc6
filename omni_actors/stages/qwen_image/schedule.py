"""The noise levels of a request's steps, by diffusers' flow-matching scheduler, and the steps themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.qwen_image.options import Scheduler

_PLAIN = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
_LEVELS: dict[Scheduler, dict[str, bool]] = {
    "euler": {},
    "euler_karras": {**_PLAIN, "use_karras_sigmas": True},
    "euler_exponential": {**_PLAIN, "use_exponential_sigmas": True},
}
"""What each scheduler changes in the configuration of the model's own."""


class Schedule(NamedTuple):
    """The steps of one request.

    timesteps: float32 (steps,), what the transformer is given. sigmas: float32 (steps + 1,), the share of noise before
    each step and after the last one.
    """

    timesteps: Tensor
    sigmas: Tensor

    @property
    def total(self) -> int:
        """The number of steps."""
        return len(self.timesteps)

    def since(self, strength: float) -> Schedule:
        """Return the last steps, for a picture of which ``strength`` is replaced by noise.

        Raises InvalidRequest: no step is left.
        """
        first = int(max(self.total - min(self.total * strength, self.total), 0))
        if first == self.total:
            message = f"strength: {strength:g} of {self.total} steps leaves no step"
            raise InvalidRequest(message, param="strength")
        return Schedule(self.timesteps[first:], self.sigmas[first:])

    def noisy(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Return what the first step begins with if the picture has these latents."""
        sigma = self.sigmas[:1].to(latents.dtype)
        return sigma * noise + (1.0 - sigma) * latents

    def step(self, latents: Tensor, velocity: Tensor, step: int) -> Tensor:
        """Return the latents after step number ``step``, from those before it. The dtype is the velocity's."""
        change = (self.sigmas[step + 1] - self.sigmas[step]) * velocity
        return (latents.to(torch.float32) + change).to(velocity.dtype)

    def estimate(self, latents: Tensor, velocity: Tensor, step: int) -> Tensor:
        """Return what the latents would be after the last step if the velocity stayed as it is: float32."""
        return latents.to(torch.float32) - self.sigmas[step] * velocity


class Schedules:
    """Makes schedules as Qwen-Image's pipelines do.

    directory: the scheduler's configuration. Raises OSError, and ValueError for a scheduler of another kind.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        config = FlowMatchEulerDiscreteScheduler.load_config(directory, local_files_only=True)
        found = config.get("_class_name")
        if found != FlowMatchEulerDiscreteScheduler.__name__ or config.get("stochastic_sampling"):
            expected = f"{FlowMatchEulerDiscreteScheduler.__name__} without stochastic_sampling"
            raise ValueError(f"{directory}: the scheduler must be {expected}; found {found}")
        self._config, self._device = config, device

    def make(self, scheduler: Scheduler, steps: int, rows: int) -> Schedule:
        """Return the schedule of a request. rows: of the packed latents. Raises InvalidRequest."""
        kind: Any = FlowMatchEulerDiscreteScheduler
        made = kind.from_config(self._config, **_LEVELS[scheduler])  # a scheduler keeps what it last computed
        sigmas = np.linspace(1.0, 1 / steps, steps)
        with np.errstate(invalid="ignore", divide="ignore"):
            made.set_timesteps(sigmas=sigmas, device=self._device, mu=_shift(made.config, rows))
        if not made.sigmas.isfinite().all():  # one step, if the configuration has a shift_terminal
            raise InvalidRequest(f"steps: the model's scheduler has no noise levels for {steps} steps", param="steps")
        return Schedule(made.timesteps, made.sigmas)


def _shift(config: Any, rows: int) -> float:
    """Return how far the noise levels of a picture of so many rows are shifted (``mu``)."""
    lowest, highest = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (most - least) / (highest - lowest)
    return float(rows * slope + (least - slope * lowest))
