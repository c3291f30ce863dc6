"""An edge that feeds an engine loop."""

from __future__ import annotations

from collections.abc import Mapping

from omni_actors.protocol.chunks import ChunkCorrupted, ChunkHeader
from omni_actors.worker.arena import Arena, SenderArena
from omni_actors.worker.pinning import UNPINNED, Pinning
from ringbuf import Consumer, Frame, Ring, RingClosed, Tensor


class Incoming:
    """The consumer's end of a ring."""

    def __init__(self, ring: Ring, pinning: Pinning = UNPINNED, arena: Arena | None = None) -> None:
        """arena: this worker's own; None: it opens no other one."""
        self.ring, self._pinning = ring, pinning
        pinning.pin(ring)
        self.consumer: Consumer = ring.claim_consumer()
        self.early: Frame | None = None
        """A frame whose ``Start`` has not arrived yet. No later frame is read until then."""
        self.ended = False
        self._senders = None if arena is None else SenderArena(arena)

    def next_frame(self) -> Frame | None:
        """Return the next frame, the early one first; None if there is none yet, or the producer has closed."""
        if self.early is not None:
            return self.early
        if self.ended:
            self.close()
            return None
        try:
            return self.consumer.try_recv()
        except RingClosed:
            self.ended = True
            self.close()  # its memory is freed with the producer's replica
            return None

    def complete(self, header: ChunkHeader, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return all tensors of a chunk: those in its frame, and copies of those in the sender's arena.

        None: the sender has begun to end, so there may be none to copy. Then the edge has ended.
        Raises ChunkCorrupted, and what ``SenderArena.copies`` raises.
        """
        if header.in_arena is None:
            return tensors
        if self._senders is None:
            raise ChunkCorrupted("received a chunk with tensors in an arena, but this worker opens no arenas")
        if (copies := self._senders.copies(header.in_arena)) is None:
            self.ended = True
            return None
        return {**tensors, **copies}

    def close(self) -> None:
        if self.early is not None:
            self.early.release()
        self.consumer.close()
        if self._senders is not None:
            self._senders.close()
        self._pinning.close(self.ring)
