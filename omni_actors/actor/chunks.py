"""How a chunk lies in a ring: one bundle, whose meta is the chunk's header and small data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

import ringbuf
from ringbuf import Tensor


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """request: its number. source: the producing stage. seq: 0, 1, 2 … on this edge for this request."""

    request: int
    source: str
    seq: int
    last: bool
    data: dict[str, Any]


class ChunkCorrupted(ringbuf.RingError):
    """A frame whose header is not a chunk's, or a chunk out of sequence."""


def encode(header: ChunkHeader, tensors: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> list[memoryview]:
    """Buffers to gather into a ring. Nothing is copied here: the tensors must not change until they are sent."""
    return ringbuf.encode_bundle(msgspec.to_builtins(header, builtin_types=(bytes,)), tensors)


def decode(data: memoryview) -> tuple[ChunkHeader, dict[str, Tensor]]:
    """The header, and the tensors as views into ``data``. Raises ChunkCorrupted, BundleCorrupted."""
    bundle = ringbuf.decode_bundle(data)
    try:
        return msgspec.convert(bundle.meta, ChunkHeader), bundle.tensors
    except msgspec.ValidationError as error:
        raise ChunkCorrupted(f"not a chunk: {error}") from error


class SequenceCheck:
    """Holds the rule that the chunks of a request arrive on an edge complete and in order."""

    def __init__(self, request: int, source: str) -> None:
        self._request, self._source, self._next = request, source, 0

    def __call__(self, seq: int) -> None:
        """Raises ChunkCorrupted at a gap or a repetition."""
        if seq != self._next:
            raise ChunkCorrupted(f"request {self._request} from {self._source}: chunk {seq} where {self._next} was due")
        self._next += 1
