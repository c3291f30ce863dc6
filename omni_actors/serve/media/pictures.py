"""Encode the pictures of responses.

Rules
1. A thread encodes a picture, because that takes up to seconds. Few are encoded at the same time.
2. Pillow, which encodes, is not a part of every installation. ``require_encoder`` comes before any other work.
"""

from __future__ import annotations

import trio

from omni_actors.errors import InvalidRequest
from omni_actors.installed import is_importable
from omni_actors.outputs import Picture, PictureFormat, too_large
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media.picture_json import PictureText

_ENCODERS = trio.CapacityLimiter(2)
"""An encoder keeps a picture and its file, even after its client has left."""


def require_encoder() -> None:
    """Raise HTTPError 501 if this installation cannot encode pictures."""
    if not is_importable("PIL"):
        message = "this server cannot encode pictures: Pillow is not installed (pip install '.[image]' in the clone)"
        raise HTTPError(501, message, code="missing_library")


def require_possible(format: PictureFormat, width: int, height: int) -> None:
    """Raise InvalidRequest if a file of this format cannot have a picture of this size."""
    if (reason := too_large(format, width, height)) is not None:
        raise InvalidRequest(f"output_format: {reason}", param="output_format")


async def encoded(
    picture: Picture, format: PictureFormat = "png", quality: int | None = None, *, begin: str = ""
) -> PictureText:
    """Return the file of a picture, in base64. Raises InvalidRequest: it is too large for the format.

    quality: from 0 to 100; None means the format's default. PNG has none. begin: the text before it.
    Cancellation: the thread finishes its work in the background.
    """
    require_possible(format, picture.width, picture.height)

    def encode() -> PictureText:
        options = {} if quality is None else {"quality": max(1, quality)}
        return PictureText(picture.encode(format, **options), begin)

    return await trio.to_thread.run_sync(encode, abandon_on_cancel=True, limiter=_ENCODERS)
