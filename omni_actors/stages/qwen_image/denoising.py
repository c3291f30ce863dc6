"""One request of the denoiser: its input, checked before anything is computed, and how far it is.

A size, a step count, a prompt or a picture out of bounds raises InvalidRequest, which names the field.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

import ringbuf
from omni_actors.stages.adapters.files import named
from omni_actors.stages.base import Chunk, InvalidRequest, StageCheckpoint, StageRequest, TensorLike
from omni_actors.stages.diffusion.denoiser import DenoisingRequest
from omni_actors.stages.diffusion.options import width_and_height
from omni_actors.stages.qwen_image.latents import Grid, Noise, pack
from omni_actors.stages.qwen_image.options import DenoiserOptions, DenoiserParams
from omni_actors.stages.qwen_image.schedule import Schedule, Schedules
from omni_actors.stages.qwen_image.transformer import Layout
from omni_actors.stages.sources import OpenSources
from omni_actors.stages.tensors import to_torch


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a model and the stage's options allow.

    Attributes:
        options: The stage's options.
        pixels: Pixels of a latent's side.
        channels: Channels of the latents.
        width: Numbers in a row of a prompt.
        positions: Prompt rows and half of a picture's longer side in rows, together, are at most this.
        conditions: Whether the transformer looks at a request's pictures. If not, the new picture starts from one.
    """

    options: DenoiserOptions
    pixels: int
    channels: int
    width: int
    positions: int
    conditions: bool

    def grid(self, size: str) -> Grid:
        """Return the size of a picture's latents. Raises InvalidRequest: the picture cannot have this size."""
        width, height = width_and_height(size)
        unit = 2 * self.pixels
        if width % unit or height % unit:
            raise InvalidRequest(f"size: found {size}; width and height must be multiples of {unit}", param="size")
        self._check_pixels(width, height, "size")
        return Grid(height // self.pixels, width // self.pixels)

    def picture(self, latents: ringbuf.Tensor) -> Grid:
        """Return the size of an input picture's latents. Raises InvalidRequest."""
        shape = latents.shape
        fits = len(shape) == 3 and shape[0] == self.channels and min(shape) > 1 and not (shape[1] % 2 or shape[2] % 2)
        if not fits or "float" not in latents.dtype:
            expected = f"image: floats of shape ({self.channels}, height, width), both even, were expected"
            raise InvalidRequest(f"{expected}, not {latents.dtype} {shape}", param="image")
        self._check_pixels(shape[2] * self.pixels, shape[1] * self.pixels, "image")
        return Grid(shape[1], shape[2])

    def check_prompt(self, states: ringbuf.Tensor, param: str) -> None:
        """Raise InvalidRequest unless these are the hidden states of a prompt that is not too long."""
        shape, longest = states.shape, self.options.max_prompt
        if len(shape) != 2 or shape[1] != self.width or not shape[0] or "float" not in states.dtype:
            message = f"{param}: floats of shape (n, {self.width}) were expected, not {states.dtype} {shape}"
            raise InvalidRequest(message, param=param)
        if shape[0] > longest:
            message = f"{param}: it has {shape[0]} rows; the limit is {longest}"
            raise InvalidRequest(message, param=param, code="context_length_exceeded")

    def check_positions(self, layout: Layout, longest_prompt: int) -> None:
        """Raise InvalidRequest if the transformer has too few positions for the largest picture and its prompt."""
        side = max(max(grid) for grid in layout) // 4
        if side + longest_prompt > self.positions:
            most = (self.positions - longest_prompt) * 4 * self.pixels
            raise InvalidRequest(f"size: with this prompt, a side has at most {most} pixels", param="size")

    def _check_pixels(self, width: int, height: int, param: str) -> None:
        if width * height > self.options.max_pixels:
            message = f"{param}: {width}x{height} has {width * height} pixels; the limit is {self.options.max_pixels}"
            raise InvalidRequest(message, param=param)


class Denoising(DenoisingRequest):
    """One request. ``transformer.Job`` describes what the transformer reads of it.

    After ``prepare`` it can be computed; ``latents`` is there once it has begun.
    """

    schedule: Schedule
    layout: Layout
    """The new picture, and the pictures that the transformer looks at."""
    prompt: Tensor
    latents: Tensor
    """Packed: (1, rows, channels)."""

    def __init__(self, request: StageRequest, params: DenoiserParams, limits: ModelLimits) -> None:
        """Raises InvalidRequest: a parameter is out of the model's bounds."""
        super().__init__(request, params)
        self.params, self._limits, options = params, limits, limits.options
        self.adapter = named(params.lora)
        self.guidance = options.guidance if params.guidance is None else params.guidance
        self._steps = options.steps if params.steps is None else params.steps
        if self._steps > options.max_steps:
            message = f"steps: found {self._steps}; the limit is {options.max_steps}"
            raise InvalidRequest(message, param="steps")
        self._grid = None if params.size is None else limits.grid(params.size)
        self.open = OpenSources(request.sources)
        self.negative: Tensor | None = None
        self._pictures: list[Tensor] = []
        """The latents of its pictures, (1, 1, channels, height, width)."""
        self._picture_grids: list[Grid] = []
        self._conditions: list[Tensor] = []
        """The packed latents of the pictures that the transformer looks at."""
        self._restored: Tensor | None = None
        """The packed latents after ``step`` steps of an earlier incarnation, until it begins."""
        if request.checkpoint is not None:
            self._restore(request.checkpoint)

    @property
    def complete(self) -> bool:
        return not self.open

    @property
    def rows(self) -> int:
        return 1 if self.negative is None else 2

    @property
    def total(self) -> int:
        return self.schedule.total

    @property
    def grid(self) -> Grid:
        """The size of the new picture's latents."""
        return self.layout[0]

    @property
    def hidden(self) -> Tensor:
        """The packed latents of all pictures, (1, rows, channels)."""
        return torch.cat([self.latents, *self._conditions], dim=1) if self._conditions else self.latents

    @property
    def timestep(self) -> Tensor:
        """The next step's timestep, a scalar."""
        return self.schedule.timesteps[self.step]

    def take(self, chunk: Chunk) -> None:
        """Take a chunk of input. Raises InvalidRequest."""
        for name, tensor in sorted(chunk.tensors.items(), key=lambda item: (len(item[0]), item[0])):  # 2 before 10
            if name == "prompt":
                self._limits.check_prompt(tensor, "prompt")
                self.prompt = to_torch(tensor)
            elif name == "negative":
                self._limits.check_prompt(tensor, "negative_prompt")
                if self.guidance > 1:
                    self.negative = to_torch(tensor)
            elif name.startswith("latents"):
                self._add_picture(tensor)
        self.open.update(chunk)

    def prepare(self, schedules: Schedules) -> None:
        """Prepare the steps, once all input is there. Raises InvalidRequest: something is missing or does not fit."""
        options, params = self._limits.options, self.params
        if not hasattr(self, "prompt"):
            raise InvalidRequest("prompt: there is none", param="prompt")
        grid = self._grid or (self._picture_grids[-1] if self._picture_grids else self._limits.grid(options.size))
        starts = bool(self._pictures) and not self._limits.conditions
        if params.strength is not None and not starts:
            raise InvalidRequest("strength: the request has no picture to start from", param="strength")
        if starts and self._picture_grids != [grid]:
            raise InvalidRequest("image: one picture of the new picture's size was expected", param="image")
        self.layout = (grid,) if starts else (grid, *self._picture_grids)
        prompts = [len(self.prompt), 0 if self.negative is None else len(self.negative)]
        self._limits.check_positions(self.layout, max(prompts))
        self.schedule = schedules.make(params.scheduler or options.scheduler, self._steps, grid.rows)
        if starts:
            self.schedule = self.schedule.since(options.strength if params.strength is None else params.strength)

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make the latents that the next step begins with: of a checkpoint, or noise."""
        self.prompt = self.prompt.to(device, dtype)
        self.negative = None if self.negative is None else self.negative.to(device, dtype)
        pictures, self._pictures = [picture.to(device, dtype) for picture in self._pictures], []
        if self._limits.conditions:
            self._conditions = [pack(picture) for picture in pictures]
        if self._restored is not None:
            self.latents, self._restored = self._restored.to(device, dtype), None
            return
        noise = Noise(self.params.seed, device, dtype)
        channels = self._limits.channels
        if pictures and not self._limits.conditions:
            noise.draw(channels, self.grid)  # the picture encoder sampled with these numbers, as diffusers does
            self.latents = pack(self.schedule.noisy(pictures[0], noise.draw(channels, self.grid)))
        else:
            self.latents = pack(noise.draw(channels, self.grid))

    def estimate(self, velocity: Tensor) -> Tensor:
        return self.schedule.estimate(self.latents, velocity, self.step)[0].cpu()

    def advance(self, velocity: Tensor) -> None:
        self.latents = self.schedule.step(self.latents, velocity, self.step)
        self.step += 1

    def _add_picture(self, latents: ringbuf.Tensor) -> None:
        most = self._limits.options.max_images
        if len(self._pictures) == most:
            raise InvalidRequest(f"image: at most {most} pictures were expected", param="image")
        self._picture_grids.append(self._limits.picture(latents))
        self._pictures.append(to_torch(latents)[None, None])

    def _restore(self, checkpoint: StageCheckpoint) -> None:
        self.step = checkpoint.data["step"]
        self._restored = torch.tensor(_array(checkpoint.tensors["latents"]))[None]


def _array(tensor: TensorLike) -> np.ndarray[Any, Any]:
    return tensor if isinstance(tensor, np.ndarray) else tensor.numpy()
