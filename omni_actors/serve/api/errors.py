"""The HTTP error for each error of the system, and for each mistake in a request's body."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from omni_actors import errors
from omni_actors.serve.http.errors import MAX_MESSAGE, HTTPError, bad_request, quote_value, truncate
from omni_actors.validation import split_place

NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients obey this header. Other clients are stopped by the status 422."""


def to_http_error(error: errors.OmniError) -> HTTPError:
    """Return the error that the client receives for an error of the system."""
    text = str(error)
    match error:
        case errors.InvalidRequest(param=param, code=code):
            return bad_request(text, param, code)
        case errors.Overloaded(retry_after_s=seconds):
            return HTTPError(429, text, type="rate_limit_error", code="overloaded", retry_after_s=seconds)
        case errors.SlowConsumer():
            return bad_request(text, code="slow_consumer")
        case errors.StageUnavailable(retry_after_s=seconds):
            return HTTPError(503, text, type="server_error", code="stage_unavailable", retry_after_s=seconds)
        case errors.StageCrashed(retryable=False):
            return HTTPError(422, text, code="stage_crashed", headers=NO_RETRY)
        case errors.Quarantined():
            return HTTPError(422, text, code="quarantined", headers=NO_RETRY)
        case errors.StageCrashed():
            return HTTPError(500, text, type="server_error", code="stage_crashed")
        case errors.DeadlineExceeded():
            return HTTPError(504, text, type="server_error", code="deadline_exceeded")
        case errors.Aborted():
            return HTTPError(503, text, type="server_error", code="aborted")
        case _:
            return HTTPError(500, text, type="server_error", code="internal_error")


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Translate parameter names in the errors of a block.

    names: the client's name of each parameter, by the engines' name. An InvalidRequest about one of them leaves the
    block as an HTTPError about the client's name.
    """
    try:
        yield
    except errors.InvalidRequest as error:
        if error.param is None or error.param not in names:
            raise
        name, renamed = error.param, names[error.param]
        message = error.message.replace(f"{name}:", f"{renamed}:").replace(repr(name), repr(renamed))
        raise bad_request(message, renamed, error.code) from error


def from_validation(error: msgspec.ValidationError, accepted_at: Callable[[str], Sequence[Any]]) -> HTTPError:
    """Return the error for a body that does not match its schema.

    accepted_at: returns the values that a field can have, if its schema lists them. Its argument is the field's path.
    """
    message, param = split_place(error)
    message = truncate(message, MAX_MESSAGE)
    if message.startswith("Object missing required field"):
        param = f"{param}.{message.split('`')[1]}".lstrip(".")
        return bad_request(f"missing required parameter '{param}'", param, "missing_required_parameter")
    if accepted := accepted_at(param):
        message = f"{message.replace('enum value', 'value')}; accepted: {', '.join(map(repr, accepted))}"
    return bad_request(f"{param}: {message}" if param else message, param or None)


def unsupported(param: str, value: Any, accepted: str) -> HTTPError:
    """Return the error for a parameter of OpenAI's API that this server does not implement."""
    return bad_request(
        f"{param}: {quote_value(value)} is not supported; accepted: {accepted}", param, "unsupported_parameter"
    )
