"""What leaves an engine loop: edges with what waits for room on them, and what is retained to be sent again.

Rules
1. Nothing is copied but into a ring: what waits and what is retained share the engine's own tensors.
2. What is retained of a request is all of its outputs or none: past its bound all of it is let go, for good. Past the
   bound of the worker, the largest request is let go.
"""

from __future__ import annotations

import collections
from collections.abc import Generator, Set

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
        self.limit_bytes, self.bytes = limit_bytes, 0
        self.chunks: list[tuple[list[memoryview], int]] = []
        """Buffers and their size."""
        self.let_go: str | None = None
        """Why nothing is retained any more, in words."""


class Retention:
    """What one worker retains, by request, within a bound for each and one for all."""

    def __init__(self) -> None:
        self._of: dict[int, Retained] = {}
        self._limit_bytes = self._bytes = 0

    @property
    def requests(self) -> Set[int]:
        return self._of.keys()

    def begin(self, request: int, limit_bytes: int, worker_limit_bytes: int) -> None:
        """Retain the outputs of a request, from its first on; what was retained of it before is forgotten."""
        self.forget(request)
        self._of[request], self._limit_bytes = Retained(limit_bytes), worker_limit_bytes

    def forget(self, request: int) -> None:
        """The request has ended. Harmless where nothing is retained of it."""
        if retained := self._of.pop(request, None):
            self._bytes -= retained.bytes

    def add(self, request: int, buffers: list[memoryview], size: int) -> list[tuple[int, str]]:
        """Retain one more output. Returns the requests that were let go for it, and why."""
        retained = self._of.get(request)
        if retained is None or retained.let_go is not None:
            return []
        retained.chunks.append((buffers, size))
        retained.bytes += size + OVERHEAD_BYTES
        self._bytes += size + OVERHEAD_BYTES
        dropped = []
        if retained.bytes > retained.limit_bytes:
            why = f"its outputs are more than the {retained.limit_bytes} bytes that are retained (limits.retain_bytes)"
            dropped.append((request, self._let_go(request, why)))
        while self._bytes > self._limit_bytes:
            largest = max(self._of, key=lambda each: self._of[each].bytes)
            why = (
                f"its outputs were let go, the largest of more than the {self._limit_bytes} bytes that a worker retains"
                " (limits.worker_retain_bytes)"
            )
            dropped.append((largest, self._let_go(largest, why)))
        return dropped

    def chunks(self, request: int) -> list[tuple[list[memoryview], int]] | str:
        """What is retained of a request; or why nothing is, in words."""
        retained = self._of.get(request)
        if retained is None:
            return "nothing of it is retained"
        return retained.chunks if retained.let_go is None else retained.let_go

    def _let_go(self, request: int, why: str) -> str:
        retained = self._of[request]
        self._bytes -= retained.bytes
        retained.chunks, retained.bytes, retained.let_go = [], 0, why
        return why
