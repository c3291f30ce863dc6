"""Refusing files that a decoder cannot read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omni_actors.stages.base import InvalidRequest


@contextmanager
def refuse_unreadable(kind: str, index: int, accepted: Sequence[str]) -> Iterator[None]:
    """Turn any exception from decoding a client's file into ``InvalidRequest``, except MemoryError.

    Decoders raise all kinds of exceptions for broken files, such as IndexError or AttributeError.
    kind, index: the input, such as "image" 0. accepted: names of the formats, for the error's text.
    """
    try:
        yield
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:
        message = f"{kind} {index}: this file cannot be read; accepted: {', '.join(accepted)} ({type(error).__name__})"
        raise InvalidRequest(message, param=kind, code=f"invalid_{kind}") from error
