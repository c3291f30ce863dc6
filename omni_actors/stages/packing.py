"""Bytes as numbers of a journal: how an engine puts more than numbers into decisions (``stages.base``, rule 6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omni_actors.stages.base import Decisions

_BYTES = 8
"""Bytes of a number."""


def pack(data: bytes) -> Decisions:
    """Return the number of bytes, and the bytes as little-endian 64-bit integers."""
    padded = data.ljust(-(-len(data) // _BYTES) * _BYTES, b"\0")
    return (len(data), *np.frombuffer(padded, "<i8").tolist())


def unpack(numbers: Sequence[int]) -> bytes:
    """Return the bytes that ``pack`` got."""
    size, *packed = numbers
    return np.array(packed, "<i8").tobytes()[:size]
