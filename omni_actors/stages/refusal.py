"""Refusing one request for its own input, while the worker and the other requests of the batch go on.

Rules
1. ``validated`` is for input with a known schema. Its error names the wrong field.
2. ``request_work`` is for work that concerns one request and may raise anything: tokenizers, templates, decoders,
   number words. Such work changes no state that requests share, so an exception leaves that state intact.
3. Work of the whole batch (a forward) is never inside ``request_work``: its exception ends the worker.
4. Lack of memory and a lost device are no fault of one request: they end the worker.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from omni_actors.stages.base import REFUSALS, InvalidRequest
from omni_actors.validation import explained

T = TypeVar("T")

_FATAL = frozenset({"OutOfMemoryError", "AcceleratorError"})
"""torch's exceptions of rule 4, by name, because this module imports no model library."""
_NO_MEMORY = "can't allocate memory"
"""Part of the text of the RuntimeError that torch's CPU allocator raises."""
_LONGEST_REASON = 200
"""Characters of the cause that the client receives; some libraries repeat the whole input in their errors."""


def validated(data: Mapping[str, Any], type: type[T]) -> T:
    """Convert ``data`` to the struct ``type``.

    Raises InvalidRequest, with ``param`` set to the wrong field.
    """
    try:
        return msgspec.convert(data, type)
    except (msgspec.ValidationError, UnicodeError) as error:  # UnicodeError: a lone surrogate
        message, param = explained(error, type, data)
        raise InvalidRequest(f"{param}: {message}" if param else message, param=param or None) from error


def refuse_unknown_tokens(tokens: Iterable[int], size: int, param: str) -> None:
    """Raise InvalidRequest if a model with ``size`` tokens does not have one of these: a forward would fail for all."""
    if (unknown := next((token for token in tokens if not 0 <= token < size), None)) is not None:
        raise InvalidRequest(f"{param}: the model has no token {unknown}; it has {size}", param=param)


def beyond_context(message: str, param: str = "messages") -> InvalidRequest:
    """Return the error for input that exceeds a model's context."""
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def ends_worker(error: Exception) -> bool:
    """Return whether an exception of one request's work is one of rule 4."""
    return isinstance(error, MemoryError) or type(error).__name__ in _FATAL or _NO_MEMORY in str(error)


@contextmanager
def request_work(param: str | None = None) -> Iterator[None]:
    """Turn any exception of one request's own work into ``InvalidRequest``, and print its traceback on stderr.

    param: the field of the request that the work reads, if it is known.
    The exceptions of rule 4 pass through.
    """
    try:
        yield
    except REFUSALS:
        raise
    except Exception as error:
        if ends_worker(error):
            raise
        traceback.print_exception(error)
        traceback.clear_frames(error.__traceback__)  # local variables may be views of a chunk, which must be released
        cause = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        message = f"this input could not be processed: {cause}"
        raise InvalidRequest(message, param=param, code="unprocessable_input") from error
