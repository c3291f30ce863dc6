"""What a client brings and gets: pieces of input and of output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Input:
    """A piece of what the client brings: small data, and tensors by name."""

    data: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A piece of what comes out. ``tensors`` own their memory. ``arrived`` is CLOCK_MONOTONIC, in seconds."""

    stage: str
    data: Mapping[str, Any]
    tensors: Mapping[str, Any]
    last: bool
    arrived: float
    nbytes: int
