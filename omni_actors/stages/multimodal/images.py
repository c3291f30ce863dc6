"""Decoding image files.

Rules
1. The size is read from the header and checked first, because a file of some kilobytes may decode to gigabytes. So is
   what else makes a small file slow (``jpeg``). Pillow reads a file's markers, chunks and blocks one by one in Python,
   so each read checks the time. A process of its own decodes AVIF (``avif``).
2. Only pixel formats that Pillow decodes by itself are accepted: none that starts another program, no vector graphics,
   and no run-length encoded BMP, which it decodes byte by byte in Python.
3. The model gets what a viewer shows: rotated by EXIF, transparent parts on white, the first picture of an animation,
   16 bits scaled to 8.
"""

from __future__ import annotations

import io
import struct
import warnings
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageFile

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal import avif, jpeg
from omni_actors.stages.multimodal.files import refuse_unreadable
from omni_actors.stages.multimodal.limits import Deadline
from omni_actors.stages.multimodal.prompt import Pixels

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "WEBP")
RATIO = 200
"""How many times as long as the shorter side the longer one may be. A thinner picture, scaled, would take gigabytes."""
_TURNS: dict[Any, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns an image upright, by its EXIF orientation."""


class _TimedFile(io.BytesIO):
    """A file in memory whose reading ends with the time for the request's media. index: of the image, for the error."""

    def __init__(self, data: bytes, index: int, deadline: Deadline) -> None:
        super().__init__(data)
        self._index, self._deadline = index, deadline

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as ``io.BytesIO`` does. Raises InvalidRequest: the time is over."""
        self._deadline.check("image", self._index)
        return super().read(size)


def decode_image(data: bytes, index: int, max_pixels: int, deadline: Deadline) -> Pixels:
    """Decode the first picture in an image file: uint8 (height, width, 3).

    data: the file's bytes. index: the number of the image in the request, for errors. max_pixels: the limit of width ×
    height. deadline: of the request.
    Raises InvalidRequest.
    """
    with refuse_unreadable("image", index, FORMATS), warnings.catch_warnings():
        # Pillow warns of large images, for which we have a limit, and of small irregularities in a file.
        warnings.simplefilter("ignore")
        if avif.is_avif(data):
            try:
                data = avif.as_png(data, index, max_pixels, deadline)
            except avif.TooLarge as error:
                raise _too_large(index, f"{error.width} × {error.height} pixels", max_pixels) from error
        if is_jpeg := data.startswith(jpeg.BEGIN):
            jpeg.check_exif(data, index)
        try:
            image = Image.open(_TimedFile(data, index, deadline), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise _too_large(index, "more than twice the pixels that Pillow opens", max_pixels) from error
        with image:
            check_size(index, image.width, image.height, max_pixels)
            if is_jpeg:
                jpeg.check_scans(data, index, image.width, image.height, deadline)
            if image.tile and image.tile[0].codec_name == "bmp_rle":
                message = f"image {index}: this BMP file is run-length encoded; accepted: BMP without compression"
                raise InvalidRequest(message, param="image", code="invalid_image")
            _scale_transparent_value(image)
            return np.asarray(_rgb(_upright(image)))


def check_size(index: int, width: int, height: int, max_pixels: int) -> None:
    """Raise InvalidRequest if an image has too many pixels, or is too thin."""
    if width * height > max_pixels:
        raise _too_large(index, f"{width} × {height} pixels", max_pixels)
    check_ratio("image", index, width, height)


def check_ratio(kind: str, index: int, width: int, height: int) -> None:
    """Raise InvalidRequest if an image or a video's frame is too thin. kind, index: the input, such as "image" 0."""
    if max(width, height) > RATIO * min(width, height):
        message = f"{kind} {index}: found {width} × {height} pixels; the limit is a ratio of {RATIO}"
        raise InvalidRequest(message, param=kind)


def _scale_transparent_value(image: ImageFile.ImageFile) -> None:
    """Give the transparent value of a PNG file, which is not decoded yet, the 8 bits of the decoded pixels.

    Pillow leaves it as it is in the file. Of colours of 16 bits, Pillow decodes the higher 8: all that share them with
    the transparent colour become transparent.
    """
    match image.tile[0].args if image.tile else None, image.info.get("transparency"):
        case "L;2", int(value):
            image.info["transparency"] = (value & 0b11) * 0x55
        case "L;4", int(value):
            image.info["transparency"] = (value & 0b1111) * 0x11
        case "RGB;16B", tuple(values):
            image.info["transparency"] = tuple(value >> 8 for value in values)


def _upright(image: ImageFile.ImageFile) -> Image.Image:
    """Turn an image as its EXIF orientation says. Without a readable one it stays as it is, as in a viewer."""
    image.load()
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except (SyntaxError, ValueError, TypeError, LookupError, struct.error, OSError):  # Pillow's, for damaged EXIF data
        turn = None
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I;16":  # Pillow's own conversion makes all values above 255 white
        values = np.asarray(image)
        grey = (values >> 8).astype(np.uint8)
        if (transparent := image.info.get("transparency")) is not None:  # a PNG file may have one such value
            grey[values == transparent] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _too_large(index: int, found: str, max_pixels: int) -> InvalidRequest:
    message = f"image {index}: found {found}; the limit is {max_pixels} pixels"
    return InvalidRequest(message, param="image", code="image_too_large")
