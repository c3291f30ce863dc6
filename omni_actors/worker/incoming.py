"""An edge that feeds an engine loop."""

from __future__ import annotations

from collections.abc import Mapping

from omni_actors.protocol.chunks import ChunkHeader
from omni_actors.stages.base import Chunk
from omni_actors.worker.pinning import UNPINNED, Pinning
from ringbuf import Consumer, Frame, Ring, RingClosed, Tensor


class Incoming:
    """The consumer's end of a ring."""

    def __init__(self, ring: Ring, pinning: Pinning = UNPINNED) -> None:
        self.ring, self._pinning = ring, pinning
        pinning.pin(ring)
        self.consumer: Consumer = ring.claim_consumer()
        self.early: Frame | None = None
        """A frame whose ``Start`` has not arrived yet. No later frame is read until then."""
        self.ended = False

    def next_frame(self) -> Frame | None:
        """Return the next frame, the early one first; None if there is none yet, or the producer has closed."""
        if self.early is not None:
            return self.early
        try:
            return self.consumer.try_recv()
        except RingClosed:
            self.ended = True
            return None

    def close(self) -> None:
        if self.early is not None:
            self.early.release()
        self.consumer.close()
        self._pinning.close(self.ring)


def chunk_of(header: ChunkHeader, tensors: Mapping[str, Tensor]) -> Chunk:
    """Return a received chunk as the engine sees it."""
    return Chunk(source=header.source, seq=header.seq, last=header.last, tensors=tensors, data=header.data)
