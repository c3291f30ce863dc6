"""JSON with pictures, made while the event loop goes on.

msgspec keeps the lock of the interpreter until it has copied everything, in a thread too: half a second for ten large
pictures. So it encodes the rest, and a thread puts the pictures in: ``bytes.join`` does without the lock.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import trio

_PIECE_BYTES = 3 << 18
"""Bytes of a file that are encoded at once, in whole groups of three. They take a few milliseconds, with the lock."""
_PLACE = b"\xff"
"""Where a picture is put in. No text in UTF-8 has this byte."""


class PictureText:
    """The file of a picture in base64, as JSON: a string in pieces.

    file: it is encoded at once, so call it in a thread. begin: the text before it, with nothing to escape.
    """

    def __init__(self, file: bytes, begin: str = "") -> None:
        starts = range(0, len(file), _PIECE_BYTES)
        encoded = (base64.b64encode(file[at : at + _PIECE_BYTES]) for at in starts)
        self.pieces = [b'"' + begin.encode(), *encoded, b'"']


async def encode(data: Any, begin: bytes = b"", end: bytes = b"") -> bytes:
    """Return data with pictures (``PictureText``) in it as JSON. begin, end: bytes around it."""
    pictures: list[PictureText] = []

    def place(value: Any) -> msgspec.Raw:
        if not isinstance(value, PictureText):
            raise TypeError(f"JSON has no {type(value).__name__}")
        pictures.append(value)
        return msgspec.Raw(_PLACE)

    first, *others = msgspec.json.encode(data, enc_hook=place).split(_PLACE)
    pieces = [begin, first]
    for picture, other in zip(pictures, others, strict=True):
        pieces += [*picture.pieces, other]
    return await trio.to_thread.run_sync(b"".join, [*pieces, end])
