"""The sizes of a request's pictures, as a model sees them."""

from __future__ import annotations

import math

from PIL import Image

from omni_actors.stages.base import InvalidRequest

UNIT = 32
"""The sides of a scaled picture are multiples of this, as the models were trained."""


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
