"""What leaves an engine loop: edges with what waits for room on them, and what is retained to be sent again.

Rules
1. Nothing is copied but into a ring: what waits and what is retained share the engine's own tensors.
2. What is retained of a request is all of its outputs or none: past its bound all of it is let go, for good.
"""

from __future__ import annotations

import collections
from collections.abc import Generator

from ringbuf import Producer, Ring, RingClosed

OVERHEAD_BYTES = 512
"""About what the objects around a retained chunk take, so that the bound holds for a flood of small ones too."""


class Outgoing:
    """An edge that this worker feeds: what waits for room stays in order."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.producer: Producer = ring.claim_producer()
        self._waiting: collections.deque[tuple[int, Generator[None], int]] = collections.deque()
        """Request, the sending under way or to come, bytes."""
        self.waiting_bytes = 0

    def send(self, request: int, buffers: list[memoryview], size: int, *, at_once: bool = True) -> None:
        """Send, or queue what there is no room for; not ``at_once``: queue it for ``flush``."""
        self._waiting.append((request, self.producer.sending(*buffers), size))
        self.waiting_bytes += size
        if at_once and len(self._waiting) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what there is room for. When the consumer is gone nothing waits: it takes no more."""
        try:
            while self._waiting:
                _, sending, size = self._waiting[0]
                for _ in sending:
                    return  # parked: the doorbell will tell
                self._waiting.popleft()
                self.waiting_bytes -= size
        except RingClosed:
            self.drop()

    def drop(self, request: int | None = None) -> None:
        """Forget what of a request, or of all, is not sent; a message that is half in the ring is taken back."""
        kept = collections.deque[tuple[int, Generator[None], int]]()
        for waiting in self._waiting:
            if request in (None, waiting[0]):
                waiting[1].close()
            else:
                kept.append(waiting)
        self._waiting = kept
        self.waiting_bytes = sum(size for _, _, size in kept)

    def close(self) -> None:
        self.drop()
        self.producer.close()
        self.ring.close()


class Retained:
    """The outputs of one request, encoded, from the first one on."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self.chunks: list[tuple[list[memoryview], int]] | None = []
        """Buffers and their size; None once they were let go."""

    def add(self, buffers: list[memoryview], size: int) -> bool:
        """Keep one more, or let all go. False once: when that happens."""
        if self.chunks is None:
            return True
        self._bytes += size + OVERHEAD_BYTES
        if self._bytes > self._limit_bytes:
            self.chunks = None
            return False
        self.chunks.append((buffers, size))
        return True

    @property
    def too_many(self) -> str:
        """Why they were let go, in words."""
        return f"its outputs are more than the {self._limit_bytes} bytes that are retained (limits.retain_bytes)"
