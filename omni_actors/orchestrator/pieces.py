"""Pieces of a request's input and output."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Input:
    """One piece of a request's input: small data, and tensors by name."""

    data: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Live input of one kind: its pieces arrive while the request runs.

    Attributes:
        source: Its iterator yields the segments. It is read by one task, and closed when the request ends.
        to_piece: Makes a piece of a segment; None if the segment only adds to what ``finish`` returns. Raises
            InvalidRequest.
        first: Pieces that are there already.
        finish: Returns a last piece after the last segment. Raises InvalidRequest.
    """

    source: AsyncIterable[Any]
    to_piece: Callable[[Any], Input | None]
    first: Sequence[Input] = ()
    finish: Callable[[], Input | None] = lambda: None


Inputs: TypeAlias = Mapping[str, Sequence[Input] | Segments]
"""A request's input by kind: all of its pieces, or live input."""


@dataclass(frozen=True)
class Piece:
    """One piece of a request's output, received for the client."""

    stage: str
    data: Mapping[str, Any]
    tensors: Mapping[str, Any]
    """They own their memory."""
    last: bool
    """Whether this is the stage's last piece."""
    arrived: float
    """CLOCK_MONOTONIC, in seconds."""
    nbytes: int
    """The size of the whole piece, data included."""
