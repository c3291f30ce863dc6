"""Errors of the system as HTTP errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

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
from omni_actors.serve.http.errors import MAX_MESSAGE, HTTPError, bad_request, quote_value, truncate

NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients read this header before the status. The status, 422, stops those that do not."""


def to_http_error(error: OmniError) -> HTTPError:
    """What a client is told about an error of the system."""
    text = str(error)
    match error:
        case InvalidRequest(param=param, code=code):
            return bad_request(text, param, code)
        case Overloaded(retry_after_s=seconds):
            return HTTPError(429, text, type="rate_limit_error", code="overloaded", retry_after_s=seconds)
        case SlowConsumer():
            return bad_request(text, code="slow_consumer")
        case StageUnavailable(retry_after_s=seconds):
            return HTTPError(503, text, type="server_error", code="stage_unavailable", retry_after_s=seconds)
        case StageCrashed(retryable=False):
            return HTTPError(422, text, code="stage_crashed", headers=NO_RETRY)
        case Quarantined():
            return HTTPError(422, text, code="quarantined", headers=NO_RETRY)
        case StageCrashed():
            return HTTPError(500, text, type="server_error", code="stage_crashed")
        case DeadlineExceeded():
            return HTTPError(504, text, type="server_error", code="deadline_exceeded")
        case Aborted():
            return HTTPError(503, text, type="server_error", code="aborted")
        case _:
            return HTTPError(500, text, type="server_error", code="internal_error")


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, an InvalidRequest that names one of ``names`` leaves as a HTTPError that names what the client sent."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None or error.param not in names:
            raise
        theirs, ours = error.param, names[error.param]
        message = error.message.replace(f"{theirs}:", f"{ours}:").replace(repr(theirs), repr(ours))
        raise bad_request(message, ours, error.code) from error


def from_validation(error: msgspec.ValidationError, accepted_at: Callable[[str], Sequence[Any]]) -> HTTPError:
    """A field of a body that is missing, or is not what it should be.

    accepted_at: the values that a field can have, where they are listed.
    """
    text = str(error)
    # The last one is msgspec's own: a value that the client sent may hold these words too.
    message, found, place = text.rpartition(" - at `$")
    message, param = (truncate(message, MAX_MESSAGE), place.rstrip("`").lstrip(".")) if found else (text, "")
    if message.startswith("Object missing required field"):
        param = f"{param}.{message.split('`')[1]}".lstrip(".")
        return bad_request(f"missing required parameter '{param}'", param, "missing_required_parameter")
    if accepted := accepted_at(param):
        message = f"{message.replace('enum value', 'value')}; accepted: {', '.join(map(repr, accepted))}"
    return bad_request(f"{param}: {message}" if param else message, param or None)


def unsupported(param: str, value: Any, accepted: str) -> HTTPError:
    """A parameter of OpenAI's API whose effect this server cannot give."""
    return bad_request(
        f"{param}: {quote_value(value)} is not supported; accepted: {accepted}", param, "unsupported_parameter"
    )
