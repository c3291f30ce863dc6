"""How one request's fault becomes that request's refusal, while the worker and the rest of its batch go on.

Rules
1. ``validated`` is for input whose shape is known in advance: it names the field that is wrong.
2. ``request_work`` is for one request's own work that may raise anything: tokenizers, templates, decoders, number
   words. That work changes nothing that other requests share, so an exception leaves no half-made state behind.
3. Work of the whole batch (a forward) is never inside ``request_work``: its exception ends the worker.
4. Lack of memory and a lost device are not the fault of one request: they end the worker.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from omni_actors.stages.base import InvalidRequest

__all__ = ["request_work", "validated"]

T = TypeVar("T")

_FATAL = frozenset({"OutOfMemoryError", "AcceleratorError"})
"""torch's exceptions of rule 4, by name: this module loads no library."""
_NO_MEMORY = "can't allocate memory"
"""What torch's allocator for the CPU says, in a plain RuntimeError."""
_LONGEST_REASON = 200
"""Characters of the cause that the client gets: some libraries repeat the whole input."""


def validated(data: Mapping[str, Any], type: type[T]) -> T:
    """Convert to a struct. Raises ``InvalidRequest`` that names the field."""
    try:
        return msgspec.convert(data, type)
    except (msgspec.ValidationError, UnicodeError) as error:  # UnicodeError: half a surrogate pair
        _, _, path = str(error).partition("$.")
        raise InvalidRequest(str(error), param=path.rstrip("`") or None) from error


@contextmanager
def request_work(param: str | None = None) -> Iterator[None]:
    """Turn any exception of one request's own work into ``InvalidRequest``; the traceback goes to stderr.

    param: the field that the work reads, where there is one.
    """
    try:
        yield
    except InvalidRequest:
        raise
    except Exception as error:
        if _ends_worker(error):
            raise
        traceback.print_exception(error)
        traceback.clear_frames(error.__traceback__)  # their variables may be views of a chunk, which must be gone soon
        cause = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        message = f"this input could not be processed: {cause}"
        raise InvalidRequest(message, param=param, code="unprocessable_input") from error


def _ends_worker(error: Exception) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ in _FATAL or _NO_MEMORY in str(error)
