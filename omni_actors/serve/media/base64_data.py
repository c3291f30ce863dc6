"""Encode and decode base64 in JSON."""

from __future__ import annotations

import base64

import msgspec
import trio

from omni_actors.serve.http.errors import bad_request

_PIECE = 1 << 20
"""Characters between two checkpoints, in whole groups of four. They take a few milliseconds."""
_PIECE_BYTES = _PIECE // 4 * 3


async def from_base64(text: str, param: str, begin: int = 0) -> bytes:
    """Return the bytes that ``text`` encodes from character ``begin`` on. Raises HTTPError about ``param``."""
    pieces = []
    for at in range(begin, len(text), _PIECE):
        await trio.lowlevel.checkpoint()
        try:
            pieces.append(base64.b64decode(text[at : at + _PIECE], validate=True))
        except ValueError as error:  # this includes binascii.Error, and text that is not ASCII
            raise bad_request(f"{param}: this is not base64: {error}", param, "invalid_base64") from error
    if any(len(piece) % 3 for piece in pieces[:-1]):
        raise bad_request(f"{param}: this is not base64: padding before the end", param, "invalid_base64")
    return b"".join(pieces)


async def to_base64_json(data: bytes) -> msgspec.Raw:
    """Return data of any size as a JSON string in base64. It is JSON already, because it has nothing to escape."""
    pieces = [b'"']
    for at in range(0, len(data), _PIECE_BYTES):
        await trio.lowlevel.checkpoint()
        pieces.append(base64.b64encode(data[at : at + _PIECE_BYTES]))
    joined = msgspec.Raw(b"".join([*pieces, b'"']))
    await trio.lowlevel.checkpoint()  # the caller will copy all of it again
    return joined


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
