"""Pictures as the model takes them: resized, cut into patches, and with the place of each patch."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omni_actors.stages.multimodal.prompt import Pixels

MOST_PIXELS = 14 * 14 * 9 * 1024
"""Pixels of a resized picture, at most."""


def fitted(width: int, height: int, bounds: tuple[int, int], stride: int) -> tuple[int, int]:
    """Return the width and height to which a picture is resized, multiples of ``stride``.

    bounds: the least short side and the greatest long side. Between them, a picture keeps its size and its ratio.
    """
    least, most = bounds
    size = width, height
    size = _scaled(size, max(min(most / max(size), 1.0), least / min(size)), stride)
    if size[0] * size[1] > MOST_PIXELS:
        size = _scaled(size, MOST_PIXELS / (size[0] * size[1]), stride)
    if max(size) > most:
        size = _scaled(size, most / max(size), stride)
    return size


def resized(pixels: Pixels, bounds: tuple[int, int], stride: int) -> Pixels:
    """Return a picture, uint8 (height, width, 3), in the size of ``fitted``."""
    height, width = pixels.shape[:2]
    size = fitted(width, height, bounds, stride)
    if size == (width, height):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def normalised(pixels: Pixels) -> Tensor:
    """Return a picture as float32 (3, height, width) in [-1, 1]."""
    return (torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous().float() / 255 - 0.5) / 0.5


def cut(picture: Tensor, size: int) -> Tensor:
    """Return the patches of (channels, height, width), in reading order: (patches, size * size * channels)."""
    channels, height, width = picture.shape
    grid = picture.reshape(channels, height // size, size, width // size, size)
    return grid.permute(1, 3, 2, 4, 0).reshape(-1, size * size * channels)


def joined(patches: Tensor, size: int, rows: int, columns: int) -> Tensor:
    """Return the picture, (channels, rows * size, columns * size), of which ``cut`` made the patches."""
    grid = patches.reshape(rows, columns, size, size, -1)
    return grid.permute(4, 0, 2, 1, 3).reshape(-1, rows * size, columns * size)


def places(rows: int, columns: int, side: int) -> Tensor:
    """Return the place of each patch of a picture in a grid of ``side`` patches a row: int64 (rows * columns,)."""
    return (torch.arange(rows)[:, None] * side + torch.arange(columns)).flatten()


def _scaled(size: tuple[int, int], scale: float, stride: int) -> tuple[int, int]:
    width, height = (max(stride, int(round(round(side * scale) / stride) * stride)) for side in size)
    return width, height
