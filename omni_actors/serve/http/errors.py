"""Errors as HTTP answers, in the shape of OpenAI's API.

Rules
1. ``api.errors.to_http_error`` alone maps errors of the system to statuses.
2. A parameter has the name that the client knows: handlers translate the engines' names with ``api.errors.renaming``.
3. An error stays short: ``quote_value`` shortens a value before it becomes text, and ``HTTPError``
   truncates every message.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

MAX_MESSAGE = 500
"""Characters. With every one of them escaped the error object stays below 4 KiB."""
MAX_QUOTE = 80
"""Characters of a client's text in a message."""

_quoting = reprlib.Repr()
_quoting.maxstring = _quoting.maxother = _quoting.maxlong = MAX_QUOTE


class HTTPError(Exception):
    """An error for the client. type, param, code: as in OpenAI's error object. retry_after_s: sent as Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.type, self.code = status, type, code
        self.message = truncate(message, MAX_MESSAGE)
        self.param = None if param is None else truncate(param, MAX_QUOTE)
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        super().__init__(self.message)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def truncate(text: str, size: int) -> str:
    """``text``, at most ``size`` characters of it, without lone surrogates, which no answer can carry."""
    if len(text) > size:
        text = text[: size - 1] + "…"
    return text.encode("utf-8", "replace").decode()


def quote_value(value: Any) -> str:
    """What a client sent, for a message. The cost does not depend on the length of its strings."""
    return truncate(_quoting.repr(value), MAX_QUOTE)


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> HTTPError:
    """A 400: the client must change its request."""
    return HTTPError(400, message, param=param, code=code)
