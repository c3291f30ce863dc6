"""Pieces of a request's input and output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Input:
    """One piece of a request's input: small data, and tensors by name."""

    data: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)


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
