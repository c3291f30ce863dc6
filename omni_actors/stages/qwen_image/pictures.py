"""A request's pictures, before a model sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from PIL import Image

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.images import check_pixels, decode_image
from omni_actors.stages.multimodal.prompt import Pixels

UNIT = 32
"""The sides of a scaled picture are multiples of this, as the models were trained."""


def opened(pictures: Mapping[int, Pixels | bytes], most: int, max_pixels: int) -> list[Image.Image]:
    """Return the pictures in order of their index.

    pictures: uint8 (height, width, 3) or a file's bytes each. most: their largest number. max_pixels: the largest width
    times height of each, known before it is decoded.
    Raises InvalidRequest.
    """
    if len(pictures) > most:
        raise InvalidRequest(f"image: found {len(pictures)} pictures; the limit is {most}", param="image")
    return [Image.fromarray(_pixels(index, pictures[index], max_pixels)) for index in sorted(pictures)]


def scaled_size(picture: Image.Image, area: int) -> tuple[int, int]:
    """Return the width and the height nearest to ``area`` pixels that keep the picture's aspect ratio.

    Raises InvalidRequest: the picture is too long and thin.
    """
    ratio = picture.width / picture.height
    wide = math.sqrt(area * ratio)  # as diffusers rounds
    width, height = round(wide / UNIT) * UNIT, round(wide / ratio / UNIT) * UNIT
    if not width or not height:
        message = f"image: {picture.width}x{picture.height} is too long and thin for {area} pixels"
        raise InvalidRequest(message, param="image")
    return width, height


def _pixels(index: int, content: Pixels | bytes, max_pixels: int) -> Pixels:
    if isinstance(content, bytes):
        return decode_image(content, index, max_pixels)
    height, width, _ = content.shape
    check_pixels(index, width, height, max_pixels)
    return content
