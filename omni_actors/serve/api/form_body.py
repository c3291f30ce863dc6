"""Multipart forms with files, which are parsed slice by slice.

Rules
1. The parser gets the body in slices, with a checkpoint between them.
2. The files stay in memory: ``max_body_bytes`` limits their size, and their ticket counts them already.
3. A part with the name of the files is a file, also without a ``filename``: RFC 7578 does not require one. It forbids
   ``filename*``, and the parser ignores it.
4. Names and values are UTF-8, as RFC 7578 recommends. A ``charset`` in the content type has no effect.
5. What reads a header takes a millisecond for each KiB. So the content type is short; the parser bounds those of parts.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import trio
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from omni_actors.serve.api.json_body import SLICE_BYTES, read_body
from omni_actors.serve.http.errors import HTTPError, bad_request, quote_value

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a client's mistake is not the operator's concern

MAX_PARTS = 32
MAX_FIELD_BYTES = 1 << 16
MAX_CONTENT_TYPE = 1 << 10


class FileField(NamedTuple):
    """The field of a form that has its files.

    names: the names that the field may have, the usual one first. description: of one file, with its article.
    most: the most files.
    """

    names: tuple[str, ...]
    description: str
    most: int = 1

    def missing(self) -> HTTPError:
        """Return the error for a form without a file."""
        message = f"missing required parameter {self.names[0]!r}, {self.description} in a multipart form"
        return bad_request(message, self.names[0], "missing_required_parameter")


async def read_form(request: Request, file_field: FileField) -> tuple[list[bytes], dict[str, Any]]:
    """Return the bytes of each file in ``file_field``, in order, and the other fields that are not empty.

    The values of a field whose name ends with "[]" are a list. There may be no file. Raises HTTPError 400.
    """
    content_type = request.headers.get("content-type", "")
    if len(content_type) > MAX_CONTENT_TYPE:
        raise _broken(f"its content type has {len(content_type)} characters; the limit is {MAX_CONTENT_TYPE}")
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise file_field.missing()
    body = await read_body(request)
    form = _Form(file_field)
    callbacks: Any = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)
        for at in range(0, len(body), SLICE_BYTES):
            await trio.lowlevel.checkpoint()
            parser.write(bytes(body[at : at + SLICE_BYTES]))
    except FormParserError as error:
        raise _broken(str(error)) from error
    if not form.is_complete:
        raise _broken("it ends before its last boundary")
    return form.files, form.fields


class _Form:
    """A form, filled in by the parser's callbacks: the methods with the parser's names of its events."""

    def __init__(self, file_field: FileField) -> None:
        self.files: list[bytes] = []
        self.fields: dict[str, str | list[str]] = {}
        self._file_field = file_field
        self._name = ""
        self._is_file = False
        self._parts = 0
        self.is_complete = True
        """False between the beginning of the first part and the last boundary."""
        self._header, self._value, self._data = bytearray(), bytearray(), bytearray()

    def on_part_begin(self) -> None:
        self._parts += 1
        self.is_complete = False
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
            self._is_file = b"filename" in options or self._name in self._file_field.names
        self._header, self._value = bytearray(), bytearray()

    def on_headers_finished(self) -> None:
        if not self._name:
            raise _broken("a part has no name")
        if not self._is_file:
            return
        names, most = self._file_field.names, self._file_field.most
        if self._name not in names:
            accepted = " or ".join(map(repr, names))
            raise bad_request(f"unknown file {quote_value(self._name)}; accepted: {accepted}", self._name)
        if len(self.files) == most:
            raise _broken("it has more than one file" if most == 1 else f"it has more than {most} files")

    def on_part_data(self, data: bytes, begin: int, end: int) -> None:
        self._data += data[begin:end]
        if not self._is_file and len(self._data) > MAX_FIELD_BYTES:
            raise _broken(f"the field {quote_value(self._name)} has more than {MAX_FIELD_BYTES} bytes")

    def on_end(self) -> None:
        self.is_complete = True

    def on_part_end(self) -> None:
        if self._is_file:
            self.files.append(bytes(self._data))
        elif self._data and self._name.endswith("[]"):
            values = self.fields.setdefault(self._name, [])
            assert isinstance(values, list)
            values.append(_text(self._data))
        elif self._data:
            self.fields[self._name] = _text(self._data)


def _text(data: bytes | bytearray) -> str:
    """Raises HTTPError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _broken(f"it has text that is not UTF-8: {error}") from error


def _broken(reason: str) -> HTTPError:
    return bad_request(f"the multipart form cannot be read: {reason}", code="invalid_form")
