"""Whose fault it is when a file cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omni_actors.stages.base import InvalidRequest


@contextmanager
def reading(kind: str, index: int, accepted: Sequence[str]) -> Iterator[None]:
    """Around the decoding of a user's file. accepted: the formats that are.

    A decoder that is given a broken file raises whatever it runs into (a list is not to be had: an IndexError, an
    AttributeError of its binding): all of it becomes ``InvalidRequest``, but for a want of memory.
    """
    try:
        yield
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:
        message = f"{kind} {index}: this file cannot be read; accepted: {', '.join(accepted)} ({type(error).__name__})"
        raise InvalidRequest(message, param=kind, code=f"invalid_{kind}") from error
