"""How a chunk lies in a ring: one bundle, whose meta is the chunk's header and small data.

A chunk is a value, named by request, source and sequence number: whichever incarnation of the source sends it, and
however often, it is the same. So whoever takes chunks in drops those it has, and a replay may begin again at 0.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

import ringbuf
from ringbuf import Tensor

DIGEST_BYTES = 4096
"""Of each end of a chunk (its header and small data are there), and as many in between: the whole of a large one would
take as long as a dozen copies of it."""


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


class ReplayDiverged(ChunkCorrupted):
    """A chunk that came again is not what it was: two answers must not be spliced."""


class ChunkSequence:
    """Takes the chunks of one request from one source: each once, in order."""

    def __init__(self, request: int, source: str) -> None:
        self._request, self._source = request, source
        self._digests = array("I")
        self._complete = False

    @property
    def started(self) -> bool:
        return bool(self._digests)

    def accept(self, seq: int, frame: memoryview, *, last: bool) -> bool:
        """Whether this chunk is the next one; False for one that was taken before, or after the last.

        frame: the chunk as it lies in the ring. Raises ChunkCorrupted at a gap, ReplayDiverged.
        """
        if self._complete:
            return False
        due = len(self._digests)
        if seq > due:
            raise ChunkCorrupted(f"request {self._request} from {self._source}: chunk {seq} where {due} was due")
        digest = _digest(frame)
        if seq == due:
            self._digests.append(digest)
            self._complete = last
            return True
        if digest != self._digests[seq]:
            raise ReplayDiverged(f"chunk {seq} of stage {self._source!r} came out differently the second time")
        return False


def _digest(frame: memoryview) -> int:
    digest = zlib.crc32(frame[-DIGEST_BYTES:], zlib.crc32(frame[:DIGEST_BYTES]))
    if len(frame) > 2 * DIGEST_BYTES:
        step = len(frame) // DIGEST_BYTES | 1  # odd: all bytes of an item have their turn
        digest = zlib.crc32(np.frombuffer(frame, np.uint8)[::step].tobytes(), digest)
    return digest
