"""Errors as HTTP responses, with OpenAI's error object.

Rules
1. ``api.errors.to_http_error`` alone maps errors of the system to statuses.
2. A parameter has the name that the client knows: handlers translate the engines' names with ``api.errors.renaming``.
3. An error stays short: ``quote_value`` shortens a value before it becomes text, and ``HTTPError`` truncates every
   message.
4. An error that became a response is forgotten (``forget_frames``): a request of the system keeps its error.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

MAX_MESSAGE = 500
"""In characters. Even if each of them is escaped, the error object stays below 4 KiB."""
MAX_QUOTE = 80
"""The most characters of a client's text in a message."""

_TYPES = {429: "rate_limit_error", 500: "server_error", 501: "server_error", 503: "server_error", 504: "server_error"}

_quoting = reprlib.Repr()
_quoting.maxstring = _quoting.maxother = _quoting.maxlong = MAX_QUOTE


class HTTPError(Exception):
    """An error that the client receives.

    Args:
        status: the HTTP status.
        message: truncated to ``MAX_MESSAGE`` characters.
        param, code: see OpenAI's error object. Its type follows from the status.
        retry_after_s: sent as the header Retry-After, in whole seconds.
        headers: more headers of the response.
        facts: more fields of the error object, as text.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.code = status, code
        self.facts = {name: truncate(value, MAX_MESSAGE) for name, value in (facts or {}).items()}
        self.type = _TYPES.get(status, "invalid_request_error")
        self.message = truncate(message, MAX_MESSAGE)
        self.param = None if param is None else truncate(param, MAX_QUOTE)
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        super().__init__(self.message)

    def body(self) -> bytes:
        """Return OpenAI's error object as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error | self.facts})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that became a response, and of the errors that led to it.

    A request of the system refers to its error, and the error's frames to the request. So all variables of the frames,
    such as the client's body or an encoder, would stay until the garbage collector visits the oldest objects, which it
    does rarely (``system.garbage``).
    """
    found: BaseException | None = error
    seen: set[int] = set()  # causes may be a cycle
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        found.__traceback__ = None
        found = found.__cause__ or found.__context__


def truncate(text: str, size: int) -> str:
    """Return at most ``size`` characters of ``text``, without lone surrogates, which no response can carry."""
    if len(text) > size:
        text = text[: size - 1] + "…"
    return text.encode("utf-8", "replace").decode()


def quote_value(value: Any) -> str:
    """Return a client's value as text for a message. The cost does not depend on the length of the value's strings."""
    return truncate(_quoting.repr(value), MAX_QUOTE)


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> HTTPError:
    """Return an error with status 400: the client must change its request."""
    return HTTPError(400, message, param=param, code=code)


def internal_error() -> HTTPError:
    """Return an error with status 500, which reveals nothing about its cause. It ends the connection."""
    return HTTPError(500, "internal error", code="internal_error", headers={"connection": "close"})
