"""Bytes as text in JSON, and back."""

from __future__ import annotations

import base64

import trio

from omni_actors.serve.http.errors import bad_request

_PIECE = 1 << 20
"""Characters, whole groups of four: some milliseconds. Nobody is served while one is decoded."""


async def from_base64(text: str, param: str, begin: int = 0) -> bytes:
    """The bytes that ``text`` stands for, from character ``begin`` on. Raises HTTPError."""
    pieces = []
    for at in range(begin, len(text), _PIECE):
        await trio.lowlevel.checkpoint()
        try:
            pieces.append(base64.b64decode(text[at : at + _PIECE], validate=True))
        except ValueError as error:  # binascii.Error is one, and so is text that is not ASCII
            raise bad_request(f"{param}: this is not base64: {error}", param, "invalid_base64") from error
    if any(len(piece) % 3 for piece in pieces[:-1]):
        raise bad_request(f"{param}: this is not base64: there is padding before its end", param, "invalid_base64")
    return b"".join(pieces)


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
