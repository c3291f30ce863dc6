"""The HTTP error for each error of the system, and for each mistake in a request's body."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from omni_actors import errors
from omni_actors.serve.http.errors import HTTPError, bad_request
from omni_actors.validation import UNKNOWN, explained

_STATUSES: dict[type[errors.OmniError], tuple[int, str]] = {
    errors.InputFailed: (400, "input_failed"),
    errors.Overloaded: (429, "overloaded"),
    errors.SlowConsumer: (400, "slow_consumer"),
    errors.StageUnavailable: (503, "stage_unavailable"),
    errors.StageAsleep: (503, "stage_asleep"),
    errors.StageFailed: (503, "stage_failed"),  # with the load error: only calls of an operator raise it
    errors.SystemClosed: (503, "closed"),
    errors.StageCrashed: (500, "stage_crashed"),
    errors.Quarantined: (422, "quarantined"),
    errors.DeadlineExceeded: (504, "deadline_exceeded"),
    errors.Aborted: (503, "aborted"),
    errors.CallTimedOut: (504, "call_timed_out"),
    errors.TooManyCalls: (503, "too_many_calls"),
    errors.WorkerLost: (503, "worker_lost"),
}
"""The status and the code of each error."""
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients do not retry a response with this header. Other clients do not retry the status 422."""


def to_http_error(error: errors.OmniError) -> HTTPError:
    """Return the error that the client receives for an error of the system."""
    if isinstance(error, errors.InvalidRequest):
        return bad_request(str(error), error.param, error.code)
    if isinstance(error, errors.TemporarilyRefused):
        return HTTPError(503, error.message, code=error.code, retry_after_s=error.retry_after_s)
    message = str(error)
    if isinstance(error, errors.StageUnavailable):
        message = _brief(error)
    status, code = _STATUSES.get(type(error), (500, "internal_error"))
    if isinstance(error, errors.StageCrashed) and not error.retryable:
        status = 422
    retry_after_s = getattr(error, "retry_after_s", None)
    headers = NO_RETRY if status == 422 else None
    return HTTPError(status, message, code=code, retry_after_s=retry_after_s, headers=headers)


def _brief(error: errors.StageUnavailable) -> str:
    """Return the message without the stage's own error, which may name the server's files. The log has it."""
    if error.retry_after_s is None:
        return f"stage {error.stage!r} is not available"
    return f"stage {error.stage!r} is not available; it is tried again and may be ready in {error.retry_after_s:.0f} s"


@contextmanager
def unsupported_as_501() -> Iterator[None]:
    """Let ``Unsupported`` leave a block as an HTTPError 501. For routes that a client can do without.

    Routes that answer prompts give 400 instead: there it concerns a field of the request.
    """
    try:
        yield
    except errors.Unsupported as error:
        facts = {"stage": error.stage, "capability": error.capability, "why": error.why}
        raise HTTPError(501, str(error), code=error.code, headers=NO_RETRY, facts=facts) from error


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Translate parameter names in the errors of a block.

    names: the client's name of each parameter, by the engines' name. An InvalidRequest about one of them leaves the
    block as an HTTPError about the client's name.
    """
    try:
        yield
    except errors.InvalidRequest as error:
        if (found := renamed(error, names)) is None:
            raise
        raise found from error


def renamed(error: errors.InvalidRequest, names: Mapping[str, str]) -> HTTPError | None:
    """Return the error about the client's name of a parameter; None if ``names`` does not have the parameter."""
    if error.param is None or error.param not in names:
        return None
    name, client_name = error.param, names[error.param]
    message = error.message.replace(f"{name}:", f"{client_name}:").replace(repr(name), repr(client_name))
    return bad_request(message, client_name, error.code)


def from_validation(error: msgspec.ValidationError, schema: Any, given: Any, *, place: str = "") -> HTTPError:
    """Return the error for a body that does not match its schema.

    schema, given: see ``explained``. place: the client's name of ``given``; "" for a body.
    """
    message, path = explained(error, schema, given)
    if message.startswith("Object missing required field"):
        param = ".".join(filter(None, (place, path, message.split("`")[1])))
        return bad_request(f"missing required parameter '{param}'", param, "missing_required_parameter")
    param = ".".join(filter(None, (place, path)))
    param = re.sub(r"\[\]\[\d+\]$", "[]", param)  # the values of a form's list are fields of one name
    code = "unknown_parameter" if message.startswith(UNKNOWN) else "invalid_value"
    return bad_request(f"{param}: {message}" if param else message, param or None, code)
