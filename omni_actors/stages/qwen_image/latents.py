"""Latents of pictures, as Qwen-Image's transformer reads them.

Latents are (1, 1, channels, height, width). *Packed* latents are rows for the transformer, (1, height * width / 4,
4 * channels): a row has a square of 2x2 latents.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """The size of a picture's latents; both numbers are even."""

    height: int
    width: int

    @property
    def rows(self) -> int:
        """The number of rows of the packed latents."""
        return self.height * self.width // 4

    @property
    def shape(self) -> tuple[int, int, int]:
        """Frames, height and width in rows, as the transformer wants them."""
        return 1, self.height // 2, self.width // 2


def pack(latents: Tensor) -> Tensor:
    """Return the packed form of latents (1, 1, channels, height, width)."""
    *_, channels, height, width = latents.shape
    squares = latents.reshape(1, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(1, height * width // 4, channels * 4)


def unpack(packed: Tensor, grid: Grid) -> Tensor:
    """Return latents (channels, height, width) from their packed form."""
    channels = packed.shape[-1] // 4
    squares = packed.reshape(grid.height // 2, grid.width // 2, channels, 2, 2).permute(2, 0, 3, 1, 4)
    return squares.reshape(channels, grid.height, grid.width)


class Noise:
    """A request's noise, as diffusers draws it: from torch's generator of the host, whatever the device is.

    seed: any number, of which the lowest 64 bits count; None: one from the system.
    """

    def __init__(self, seed: int | None, device: torch.device, dtype: torch.dtype) -> None:
        number = secrets.randbits(64) if seed is None else seed
        self._random = torch.Generator().manual_seed(number & (2**64 - 1))
        self._device, self._dtype = device, dtype

    def draw(self, channels: int, grid: Grid) -> Tensor:
        """Return the next latents of noise, (1, 1, channels, height, width)."""
        shape = (1, 1, channels, grid.height, grid.width)
        return torch.randn(shape, generator=self._random, dtype=self._dtype).to(self._device)
