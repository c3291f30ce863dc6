"""The layout of a chunk in a ring: one bundle, whose meta is the chunk's header and small data.

A chunk is identified by request, source and sequence number. Whichever incarnation of the source sends it, and however
often, it means the same. So a receiver drops the chunks that it has, and a replay may begin again at 0.

A chunk of a deterministic stage has the same content each time, which the receiver checks; what it passes on from
stages upstream (``upstream``) may differ. A chunk of a resumable stage carries the decisions that it follows from
(``decisions``).
"""

from __future__ import annotations

import functools
import zlib
from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

import ringbuf
from omni_actors.protocol.messages import Decided, Decisions
from ringbuf import Deferred, SendBuffer, Tensor

Encoded: TypeAlias = "list[SendBuffer]"
"""The buffers that are a chunk, one after the other."""

DIGEST_BYTES, RUN_BYTES = 4096, 16
"""How many bytes of each end of a tensor, and as many in between, the digest of a chunk covers; and the length of the
runs of those in between. A digest of all bytes of a large chunk would take as long as a dozen copies of it. Single
bytes in place of runs, each on a cache line of its own, took two thirds of a copy of 1 MiB."""
RUNS = DIGEST_BYTES // RUN_BYTES
OVERHEAD_BYTES = 512
"""About the size of the objects around a retained chunk, so that a bound covers many small chunks, too."""


class ArenaName(msgspec.Struct, frozen=True, array_like=True):
    """Names the arena of a living process (``worker.arena``): its memory, which other processes open by ``handle``.

    pid, started: the process, and its start time in ticks. size: bytes of the arena.
    """

    pid: int
    started: int
    size: int
    handle: bytes


class InArena(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of a chunk that lie in its sender's arena: dtype, shape, offset and size in bytes by name.

    Their bytes stay as they are until the receiver has released the chunk's frame, or until the sender dies.
    """

    arena: ArenaName
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]]


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of a chunk.

    request: number of the request. source: the producing stage. seq: 0, 1, 2 … on this edge for this request. last:
    whether it is the source's last chunk for this request. data: small values, such as text. decisions: of a resumable
    source, what it decided for this chunk; else None. upstream: what resumable stages upstream decided, as far as the
    source had received it and not passed it on before. in_arena: tensors that are not in the frame.
    """

    request: int
    source: str
    seq: int
    last: bool
    data: dict[str, Any]
    decisions: Decisions | None = None
    upstream: tuple[Decided, ...] = ()
    in_arena: InArena | None = None

    @property
    def arena_bytes(self) -> int:
        """The bytes of the chunk's tensors that are not in the frame."""
        return 0 if self.in_arena is None else sum(nbytes for _, _, _, nbytes in self.in_arena.tensors.values())

    @property
    def all_decided(self) -> tuple[Decided, ...]:
        """What the chunk carries of the journals of its source and of the stages upstream."""
        if self.decisions is None:
            return self.upstream
        return (*self.upstream, Decided(self.source, self.seq, (self.decisions,)))


class ChunkCorrupted(ringbuf.RingError):
    """A frame does not contain a chunk, or a chunk is out of sequence."""


class ReplayDiverged(ChunkCorrupted):
    """A replayed chunk differs from the original; the parts of two answers must not be joined."""


def encode(header: ChunkHeader, tensors: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> Encoded:
    """Return the buffers to gather into a ring. They share the tensors' memory, which must not change until sent."""
    return ringbuf.encode_bundle(msgspec.to_builtins(header, builtin_types=(bytes,)), tensors)


def on_host(encoded: Encoded) -> list[memoryview]:
    """Return the buffers with the deferred ones copied to this process's memory."""
    return [buffer.to_host() if isinstance(buffer, Deferred) else buffer for buffer in encoded]


def decode(data: memoryview) -> tuple[ChunkHeader, dict[str, Tensor]]:
    """Return the header, and the tensors as views into ``data``. Raises ChunkCorrupted, BundleCorrupted."""
    bundle = ringbuf.decode_bundle(data)
    try:
        return msgspec.convert(bundle.meta, ChunkHeader), bundle.tensors
    except msgspec.ValidationError as error:
        raise ChunkCorrupted(f"not a chunk: {error}") from error


class ChunkSequence:
    """Accepts the chunks of one request from one source: each once, in order."""

    __slots__ = ("_digests", "_request", "_source", "complete")

    def __init__(self, request: int, source: str) -> None:
        self._request, self._source = request, source
        self._digests = array("I")
        """The digest of each accepted chunk; 0 if the source is resumable."""
        self.complete = False
        """Whether the last chunk was accepted."""

    @property
    def received(self) -> int:
        """The number of chunks that were accepted."""
        return len(self._digests)

    def accept(self, header: ChunkHeader, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether this chunk is the next one; False if it was accepted before, or comes after the last one.

        Raises ChunkCorrupted if a chunk is missing before it or the number is negative, ReplayDiverged if a
        deterministic source sent it before with other content.
        """
        if self.complete:
            return False
        seq, due = header.seq, len(self._digests)
        if not 0 <= seq <= due:
            raise ChunkCorrupted(
                f"request {self._request} from {self._source}: received chunk {seq}, expected chunk {due}"
            )
        digest = _digest(header, tensors) if header.decisions is None else 0
        if seq == due:
            self._digests.append(digest)
            self.complete = header.last
            return True
        if digest != self._digests[seq]:
            raise ReplayDiverged(f"chunk {seq} of stage {self._source!r} differs between the original and the replay")
        return False


def _digest(header: ChunkHeader, tensors: Mapping[str, Tensor]) -> int:
    shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    digest = zlib.crc32(msgspec.msgpack.encode((header.last, header.data, shapes)))
    for tensor in tensors.values():
        data = tensor.data
        if len(data) > 2 * DIGEST_BYTES:
            count = len(data) // RUN_BYTES
            runs = np.frombuffer(data, np.uint8, count * RUN_BYTES).reshape(count, RUN_BYTES)
            between = runs[_places(count)].tobytes()
            data = memoryview(b"".join((data[:DIGEST_BYTES], between, data[-DIGEST_BYTES:])))
        digest = zlib.crc32(data, digest)
    return digest


@functools.lru_cache(maxsize=64)
def _places(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return which of ``count`` runs a digest covers: a random one of each of ``RUNS`` equal parts, always the same.

    Runs at equal distances could all lie in the same columns of a picture.
    """
    within = np.random.default_rng(0).random(RUNS)
    return ((np.arange(RUNS) + within) * count / RUNS).astype(np.int64)
