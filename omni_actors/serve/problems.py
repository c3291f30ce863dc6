"""Errors as HTTP answers, in the shape of OpenAI's API.

Rules
1. ``as_problem`` alone maps errors to statuses; nothing else names a status for an error of the system.
2. A parameter is named as the client knows it: handlers translate the engines' names with ``renamed``.
3. An error is short whatever the client sent: ``quoted`` shortens a value before it becomes text, and ``Problem`` clips
   every message.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.responses import Response

from omni_actors.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    OmniError,
    Overloaded,
    Quarantined,
    SlowConsumer,
    StageCrashed,
    StageUnavailable,
)

NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients read this header before the status. The status, 422, stops those that do not."""
MAX_MESSAGE = 500
"""Characters. With every one of them escaped the error object stays below 4 KiB."""
MAX_QUOTE = 80
"""Characters of a client's text in a message."""

_quoting = reprlib.Repr()
_quoting.maxstring = _quoting.maxother = _quoting.maxlong = MAX_QUOTE


class Problem(Exception):
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
        self.message = clipped(message, MAX_MESSAGE)
        self.param = None if param is None else clipped(param, MAX_QUOTE)
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        super().__init__(self.message)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def clipped(text: str, size: int) -> str:
    """``text``, at most ``size`` characters of it, without lone surrogates, which no answer can carry."""
    if len(text) > size:
        text = text[: size - 1] + "…"
    return text.encode("utf-8", "replace").decode()


def quoted(value: Any) -> str:
    """What a client sent, for a message. The cost does not depend on the length of its strings."""
    return clipped(_quoting.repr(value), MAX_QUOTE)


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> Problem:
    """A 400: the client must change its request."""
    return Problem(400, message, param=param, code=code)


def as_problem(error: OmniError) -> Problem:
    """What a client is told about an error of the system."""
    text = str(error)
    match error:
        case InvalidRequest(param=param, code=code):
            return invalid(text, param, code)
        case Overloaded(retry_after_s=seconds):
            return Problem(429, text, type="rate_limit_error", code="overloaded", retry_after_s=seconds)
        case SlowConsumer():
            return invalid(text, code="slow_consumer")
        case StageUnavailable(retry_after_s=seconds):
            return Problem(503, text, type="server_error", code="stage_unavailable", retry_after_s=seconds)
        case StageCrashed(retryable=False):
            return Problem(422, text, code="stage_crashed", headers=NO_RETRY)
        case Quarantined():
            return Problem(422, text, code="quarantined", headers=NO_RETRY)
        case StageCrashed():
            return Problem(500, text, type="server_error", code="stage_crashed")
        case DeadlineExceeded():
            return Problem(504, text, type="server_error", code="deadline_exceeded")
        case Aborted():
            return Problem(503, text, type="server_error", code="aborted")
        case _:
            return Problem(500, text, type="server_error", code="internal_error")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, an InvalidRequest that names one of ``names`` leaves as a Problem that names what the client sent."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None or error.param not in names:
            raise
        theirs, ours = error.param, names[error.param]
        message = error.message.replace(f"{theirs}:", f"{ours}:").replace(repr(theirs), repr(ours))
        raise invalid(message, ours, error.code) from error


def from_validation(error: msgspec.ValidationError, accepted_at: Callable[[str], Sequence[Any]]) -> Problem:
    """A field of a body that is missing, or is not what it should be.

    accepted_at: the values that a field can have, where they are listed.
    """
    text = str(error)
    # The last one is msgspec's own: a value that the client sent may hold these words too.
    message, found, place = text.rpartition(" - at `$")
    message, param = (clipped(message, MAX_MESSAGE), place.rstrip("`").lstrip(".")) if found else (text, "")
    if message.startswith("Object missing required field"):
        param = f"{param}.{message.split('`')[1]}".lstrip(".")
        return invalid(f"missing required parameter '{param}'", param, "missing_required_parameter")
    if accepted := accepted_at(param):
        message = f"{message.replace('enum value', 'value')}; accepted: {', '.join(map(repr, accepted))}"
    return invalid(f"{param}: {message}" if param else message, param or None)


def unsupported(param: str, value: Any, accepted: str) -> Problem:
    """A parameter of OpenAI's API whose effect this server cannot give."""
    return invalid(f"{param}: {quoted(value)} is not supported; accepted: {accepted}", param, "unsupported_parameter")
