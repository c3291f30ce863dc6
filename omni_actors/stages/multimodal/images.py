"""Image files to pixels.

Rules
1. The size is read in the header and checked first: a file of some kilobytes may decode to gigabytes.
2. Only formats that Pillow decodes by itself, of pixels: none that starts another program, none that draws.
3. What one sees in a viewer is what the model gets: turned as EXIF says, transparent parts on white, the first picture
   of an animation, 16 bits scaled to 8.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.prompt import Pixels

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


def decode_image(data: bytes, index: int, max_pixels: int) -> Pixels:
    """The first picture in an image file: uint8 (height, width, 3). Raises ``InvalidRequest``."""
    try:
        with warnings.catch_warnings():
            # Ours is the limit, and a file's small irregularities are no news to an operator.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                check_pixels(index, image.width, image.height, max_pixels)
                return np.asarray(_rgb(ImageOps.exif_transpose(image)))
    except InvalidRequest:
        raise
    except Image.DecompressionBombError as error:
        raise _refusal(index, f"it is too large; the limit is {max_pixels} pixels", "image_too_large") from error
    except MemoryError:
        raise
    except Exception as error:
        # A decoder that is given a broken file raises whatever it runs into: the file is at fault.
        reason = f"this is no image that can be read ({', '.join(FORMATS)}): {type(error).__name__}"
        raise _refusal(index, reason, "invalid_image") from error


def check_pixels(index: int, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        message = f"it has {width} × {height} pixels; the limit is {max_pixels}"
        raise _refusal(index, message, "image_too_large")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in _SIXTEEN_BITS:  # Pillow's own conversion takes all above 255 for white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "I":
        values = np.asarray(image)
        return Image.fromarray((values.clip(0, 0xFFFF) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _refusal(index: int, reason: str, code: str) -> InvalidRequest:
    return InvalidRequest(f"image {index}: {reason}", param="image", code=code)
