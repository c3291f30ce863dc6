"""Multipart forms with one file, which are parsed slice by slice.

Rules
1. The parser gets the body in slices, with a checkpoint between them.
2. The file stays in memory: ``max_body_bytes`` limits its size, and its ticket counts it already.
3. Names and values are UTF-8, as RFC 7578 recommends. A ``charset`` in the content type has no effect.
"""

from __future__ import annotations

import logging
from typing import Any

import trio
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from omni_actors.serve.api.json_body import SLICE_BYTES, read_body
from omni_actors.serve.http.errors import HTTPError, bad_request, quote_value

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a client's mistake is not the operator's concern

MAX_PARTS = 32
MAX_FIELD_BYTES = 1 << 16


async def read_form(request: Request, file_name: str) -> tuple[bytes | None, dict[str, Any]]:
    """Return the bytes of the file in the field ``file_name``, and the other fields that are not empty.

    The file is None if the form has no such field. Raises HTTPError 400.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        message = f"missing required parameter {file_name!r}, an audio file in a multipart form"
        raise bad_request(message, file_name, "missing_required_parameter")
    body = await read_body(request)
    form = _Form(file_name)
    callbacks: Any = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)
        for at in range(0, len(body), SLICE_BYTES):
            await trio.lowlevel.checkpoint()
            parser.write(bytes(body[at : at + SLICE_BYTES]))
    except FormParserError as error:
        raise _broken(str(error)) from error
    return form.file, form.fields


class _Form:
    """A form, filled in by the parser's callbacks: the methods with the parser's names of its events."""

    def __init__(self, file_name: str) -> None:
        self.file: bytes | None = None
        self.fields: dict[str, str] = {}
        self._file_name = file_name
        self._name = ""
        self._is_file = False
        self._parts = 0
        self._header, self._value, self._data = bytearray(), bytearray(), bytearray()

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        self._name, self._is_file, self._data = "", False, bytearray()

    def on_header_field(self, data: bytes, begin: int, end: int) -> None:
        self._header += data[begin:end]

    def on_header_value(self, data: bytes, begin: int, end: int) -> None:
        self._value += data[begin:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = _text(options.get(b"name", b""))
            self._is_file = b"filename" in options
        self._header, self._value = bytearray(), bytearray()

    def on_headers_finished(self) -> None:
        if not self._name:
            raise _broken("a part has no name")
        if not self._is_file:
            return
        if self._name != self._file_name:
            raise bad_request(f"unknown file {quote_value(self._name)}; accepted: {self._file_name!r}", self._name)
        if self.file is not None:
            raise _broken("it has more than one file")

    def on_part_data(self, data: bytes, begin: int, end: int) -> None:
        self._data += data[begin:end]
        if not self._is_file and len(self._data) > MAX_FIELD_BYTES:
            raise _broken(f"the field {quote_value(self._name)} has more than {MAX_FIELD_BYTES} bytes")

    def on_part_end(self) -> None:
        if self._is_file:
            self.file = bytes(self._data)
        elif self._data:
            self.fields[self._name] = _text(self._data)
        self._data = bytearray()


def _text(data: bytes | bytearray) -> str:
    """Raises HTTPError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _broken(f"it has text that is not UTF-8: {error}") from error


def _broken(reason: str) -> HTTPError:
    return bad_request(f"the multipart form cannot be read: {reason}", code="invalid_form")
