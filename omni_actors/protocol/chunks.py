"""How a chunk lies in a ring: one bundle, whose meta is the chunk's header and small data.

A chunk is identified by request, source and sequence number. Whichever incarnation of the source sends it, and however
often, its content is the same. So a receiver drops the chunks that it has, and a replay may begin again at 0.
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
"""How many bytes of each end of a chunk (header and small data are there), and about as many in between, its digest
covers. A digest of all bytes of a large chunk would take as long as a dozen copies of it."""


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of a chunk.

    request: number of the request. source: the producing stage. seq: 0, 1, 2 … on this edge for this request. last:
    whether it is the source's last chunk for this request. data: small values, such as text.
    """

    request: int
    source: str
    seq: int
    last: bool
    data: dict[str, Any]


class ChunkCorrupted(ringbuf.RingError):
    """A frame does not hold a chunk, or a chunk is out of sequence."""


class ReplayDiverged(ChunkCorrupted):
    """A replayed chunk differs from the original; the parts of two answers must not be joined."""


def encode(header: ChunkHeader, tensors: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> list[memoryview]:
    """Return the buffers to gather into a ring. They share the tensors' memory, which must not change until sent."""
    return ringbuf.encode_bundle(msgspec.to_builtins(header, builtin_types=(bytes,)), tensors)


def decode(data: memoryview) -> tuple[ChunkHeader, dict[str, Tensor]]:
    """Return the header, and the tensors as views into ``data``. Raises ChunkCorrupted, BundleCorrupted."""
    bundle = ringbuf.decode_bundle(data)
    try:
        return msgspec.convert(bundle.meta, ChunkHeader), bundle.tensors
    except msgspec.ValidationError as error:
        raise ChunkCorrupted(f"not a chunk: {error}") from error


class ChunkSequence:
    """Accepts the chunks of one request from one source: each once, in order."""

    def __init__(self, request: int, source: str) -> None:
        self._request, self._source = request, source
        self._digests = array("I")
        self._complete = False

    @property
    def started(self) -> bool:
        """Whether a chunk was accepted."""
        return bool(self._digests)

    def accept(self, seq: int, frame: memoryview, *, last: bool) -> bool:
        """Return whether this chunk is the next one; False if it was accepted before, or comes after the last one.

        frame: the chunk as it lies in the ring. Raises ChunkCorrupted if a chunk is missing before it or the number is
        negative, ReplayDiverged if it was accepted before with other content.
        """
        if self._complete:
            return False
        due = len(self._digests)
        if not 0 <= seq <= due:
            raise ChunkCorrupted(
                f"request {self._request} from {self._source}: received chunk {seq}, expected chunk {due}"
            )
        digest = _digest(frame)
        if seq == due:
            self._digests.append(digest)
            self._complete = last
            return True
        if digest != self._digests[seq]:
            raise ReplayDiverged(f"chunk {seq} of stage {self._source!r} differs between the original and the replay")
        return False


def _digest(frame: memoryview) -> int:
    digest = zlib.crc32(frame[-DIGEST_BYTES:], zlib.crc32(frame[:DIGEST_BYTES]))
    if len(frame) > 2 * DIGEST_BYTES:
        step = len(frame) // DIGEST_BYTES | 1  # an odd step covers every byte position of the items
        digest = zlib.crc32(np.frombuffer(frame, np.uint8)[::step].tobytes(), digest)
    return digest
