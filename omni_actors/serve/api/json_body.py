"""JSON bodies: their cost is measured before they are decoded, so that no body blocks the event loop.

Rules
1. The decoder runs on the event loop without a pause. A thread would not help, because the decoder holds the global
   interpreter lock. So its cost is bounded before it starts.
2. ``DecodingCost`` reads the body in slices, with a checkpoint between them, and counts what is slow to decode.
3. Plain ASCII in strings costs less than a millisecond per MiB. Only ``max_body_bytes`` limits it, so the base64 of a
   large file fits.
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
"""The bytes between two checkpoints: they take well below a millisecond, and 10 ms at worst."""
MAX_VALUES = 20_000
"""The limit of strings, and of commas, colons, brackets, braces and digits outside strings. About 2,000 messages fit.
The slowest values are numbers such as 9e-324, which take 7 µs each, 30 ms in all."""
MAX_SLOW_BYTES = 2 << 20
"""The limit of backslashes, of bytes in strings that are not ASCII, and of bytes outside strings: up to 10 ms."""
MAX_DEPTH = 64

_VALUE_BYTES = b"[]{},:0123456789"
_OTHER_BYTES = bytes(set(range(256)) - set(_VALUE_BYTES))
_STEPS = {**dict.fromkeys(_VALUE_BYTES, 0), **dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


async def read_json(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Return the body's JSON object without its nulls. The body itself is not kept. Raises HTTPError 400.

    may_be_empty: whether a body of no bytes is an empty object.
    """
    body = await read_body(request)
    if may_be_empty and not len(body):
        return {}
    return await decode(body)


async def read_body(request: Request) -> memoryview:
    """Return the body, which is one piece, uncopied. No reference to it is kept, as Starlette's own ``body`` would."""
    pieces = [piece async for piece in request.stream() if piece]
    return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))


async def decode(document: bytes | memoryview, what: str = "body") -> dict[str, Any]:
    """Measure a document, and return its JSON object without its nulls. Raises HTTPError 400.

    what: what the document is called in an error.
    """
    cost = DecodingCost(what)
    for at in range(0, len(document), SLICE_BYTES):
        await trio.lowlevel.checkpoint()
        cost.add(bytes(document[at : at + SLICE_BYTES]))
    fields = _decoded(document, what)
    await trio.lowlevel.checkpoint()
    return {name: value for name, value in fields.items() if value is not None}


def _decoded(document: bytes | memoryview, what: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the {what} is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise bad_request(f"the {what} is not a JSON object", code="invalid_json")
    return fields


class DecodingCost:
    """Counts, slice by slice, what is slow to decode in a JSON document.

    The counts are exact for a valid document, and for an invalid one up to the byte at which the decoder stops.

    what: what the document is called in an error.
    """

    def __init__(self, what: str = "body") -> None:
        self._what = what
        self._values = self._slow = self._depth = 0
        self._escape = b""
        """The backslash at the end of the previous slice, which escapes the first byte of the next one."""
        self._in_string = self._is_not_ascii = False
        self._string = 0
        """The bytes of the string in which the previous slice ended, until the string turns out to be not ASCII."""

    def add(self, piece: bytes) -> None:
        """Count one more slice. Raises HTTPError 400 if the document exceeds a limit."""
        self._slow += piece.count(b"\\")
        outside = b"".join(self._outside_strings(self._split(piece)))
        self._slow += len(outside)
        if self._slow > MAX_SLOW_BYTES:
            message = (
                f"the {self._what} has more than {MAX_SLOW_BYTES} bytes of spaces, escapes and text that is not ASCII"
            )
            raise bad_request(message, code="too_much_text")
        value_bytes = outside.translate(None, _OTHER_BYTES)
        self._values += len(value_bytes)
        if self._values > MAX_VALUES:
            message = f"more than {MAX_VALUES} strings, commas, colons, brackets, braces and digits"
            raise bad_request(f"the {self._what} has too many values: {message}", code="too_many_values")
        depths = list(accumulate(map(_STEPS.__getitem__, value_bytes), initial=self._depth))
        if max(depths) > MAX_DEPTH:
            raise bad_request(f"the {self._what} is nested more than {MAX_DEPTH} levels deep", code="nested_too_deeply")
        self._depth = depths[-1]

    def _split(self, piece: bytes) -> list[bytes]:
        """Split ``piece`` at the quotes that begin and end strings, without escaped quotes and backslashes."""
        piece = self._escape + piece
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")
            self._escape = b"\\" if piece.endswith(b"\\") else b""
            piece = piece.removesuffix(b"\\").replace(b'\\"', b"")
        return piece.split(b'"')

    def _outside_strings(self, parts: list[bytes]) -> Iterator[bytes]:
        """Return the parts outside strings. Count the strings, and the bytes of those that are not ASCII."""
        for number, part in enumerate(parts):
            if number:
                self._in_string = not self._in_string
                self._values += self._in_string
                self._string, self._is_not_ascii = 0, False
            if not self._in_string:
                yield part
                continue
            self._string += len(part)
            self._is_not_ascii = self._is_not_ascii or not part.isascii() or b"\\u" in part
            if self._is_not_ascii:
                self._slow += self._string
                self._string = 0
