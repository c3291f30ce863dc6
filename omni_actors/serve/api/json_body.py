"""JSON bodies: measured first, decoded second, so that no body holds the event loop.

Rules
1. The decoder runs to its end on the event loop. A thread would not help: the decoder keeps the interpreter's lock. So
   its cost is bounded before it starts.
2. The survey reads the body in slices and gives way to other tasks between them. It counts what is slow to decode.
3. Plain ASCII in strings costs less than a millisecond per MiB. It is limited by ``max_body_bytes`` alone, so the
   base64 of a large file fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec
import trio
from starlette.requests import Request

from omni_actors.serve.http.errors import bad_request

SLICE_BYTES = 1 << 16
"""Bytes between two turns of the event loop: well below a millisecond, and 10 ms at the worst."""
MAX_VALUES = 20_000
"""Strings; and commas, colons, brackets, braces and digits outside strings. Some 2,000 messages fit. The slowest values
are numbers such as 9e-324, which take 7 µs each, 30 ms in all."""
MAX_SLOW_BYTES = 2 << 20
"""Backslashes, strings with characters beyond ASCII, and bytes outside strings. They take up to 10 ms."""
MAX_DEPTH = 64

_OF_VALUES = b"[]{},:0123456789"
_OTHER = bytes(set(range(256)) - set(_OF_VALUES))
_STEPS = {**dict.fromkeys(_OF_VALUES, 0), **dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body's object without its nulls. The body itself is not kept. Raises HTTPError 400."""
    body = await read_body(request)
    survey = DecodingCost()
    for at in range(0, len(body), SLICE_BYTES):
        await trio.lowlevel.checkpoint()
        survey.add(body[at : at + SLICE_BYTES])
    fields = decode(body)
    await trio.lowlevel.checkpoint()
    return fields


async def read_body(request: Request) -> bytes:
    """Return the body, and keep no reference to it: Starlette's own ``body`` would."""
    return b"".join([piece async for piece in request.stream()])


def decode(body: bytes) -> dict[str, Any]:
    """Return the object that a surveyed body holds, without its nulls. Raises HTTPError 400."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise bad_request("the body is not a JSON object", code="invalid_json")
    return {name: value for name, value in fields.items() if value is not None}


class DecodingCost:
    """What decoding a JSON document will cost, counted slice by slice.

    The count is exact for a valid document. For an invalid one it is exact up to the byte at which the decoder stops.
    """

    def __init__(self) -> None:
        self._values = self._slow = self._depth = 0
        self._escape = b""
        """A backslash at the end of the last slice: what it escapes is in the next one."""
        self._in_string = self._is_wide = False
        self._string = 0
        """Bytes of the string that the last slice ended in, and whether it has characters beyond ASCII."""

    def add(self, piece: bytes) -> None:
        """Count one more slice. Raises HTTPError 400 where the document passes a bound."""
        self._slow += piece.count(b"\\")
        outside = b"".join(self._outside_strings(self._split(piece)))
        self._slow += len(outside)
        if self._slow > MAX_SLOW_BYTES:
            message = f"more than {MAX_SLOW_BYTES} bytes of spacing, escapes and text beyond ASCII"
            raise bad_request(message, code="too_much_text")
        of_values = outside.translate(None, _OTHER)
        self._values += len(of_values)
        if self._values > MAX_VALUES:
            message = f"too many values: more than {MAX_VALUES} strings, commas, colons, brackets, braces and digits"
            raise bad_request(message, code="too_many_values")
        depths = list(accumulate(map(_STEPS.__getitem__, of_values), initial=self._depth))
        if max(depths) > MAX_DEPTH:
            raise bad_request(f"the body is nested more than {MAX_DEPTH} levels deep", code="nested_too_deeply")
        self._depth = depths[-1]

    def _split(self, piece: bytes) -> list[bytes]:
        """``piece`` at the quotes that begin and end strings. A string loses escaped quotes and backslashes."""
        piece = self._escape + piece
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")
            self._escape = b"\\" if piece.endswith(b"\\") else b""
            piece = piece.removesuffix(b"\\").replace(b'\\"', b"")
        return piece.split(b'"')

    def _outside_strings(self, parts: list[bytes]) -> Iterator[bytes]:
        """The parts outside strings. Counts the strings, and the bytes of those with characters beyond ASCII."""
        for number, part in enumerate(parts):
            if number:
                self._in_string = not self._in_string
                self._values += self._in_string
                self._string, self._is_wide = 0, False
            if not self._in_string:
                yield part
                continue
            self._string += len(part)
            self._is_wide = self._is_wide or not part.isascii() or b"\\u" in part
            if self._is_wide:
                self._slow += self._string
                self._string = 0
