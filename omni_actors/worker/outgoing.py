"""The outputs of an engine loop: edges with the chunks that wait for room, and chunks retained for a replay.

Rules
1. An output is copied once, into a ring: waiting and retained chunks share the engine's own tensors. An output of a
   device is copied from there into the ring, unless it is retained or has several targets: then to the host first. What
   is passed by handle is copied into the arena instead (``worker.arena``).
2. Either all outputs of a request are retained or none. When they exceed the request's bound, all are evicted, for
   good. When all retained outputs together exceed the worker's bound, the request with the most is evicted.
"""

from __future__ import annotations

import collections
from collections.abc import Generator, Mapping, Set
from typing import NamedTuple

import msgspec

from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import OVERHEAD_BYTES
from omni_actors.protocol.messages import Bounds
from omni_actors.stages.base import TensorLike
from omni_actors.worker.arena import Arena
from omni_actors.worker.pinning import UNPINNED, Pinning
from ringbuf import Producer, Ring, RingClosed, Tensor


class Output(NamedTuple):
    """An encoded output.

    buffers: as bytes. size: of these. by_handle: as it is sent where the receiver opens the arena; None: nothing of it
    is there. placed: its tensors in the arena.
    """

    buffers: chunks.Encoded
    size: int
    by_handle: chunks.Encoded | None = None
    placed: Mapping[str, Tensor] = {}


def encode(
    header: chunks.ChunkHeader, tensors: Mapping[str, TensorLike], *, kept: bool = False, arena: Arena | None = None
) -> Output:
    """Encode an output. It shares the tensors' memory, which must not change until it is sent.

    kept: it is retained, or sent more than once, so deferred tensors are copied now. arena: where to copy those that
    fit; None: no target takes handles.
    """
    placed = {} if arena is None else arena.place(tensors)
    for name, tensor in tensors.items() if kept else ():
        if isinstance(tensor, Tensor) and name not in placed:
            tensor.fetch()
    buffers = chunks.encode(header, {**tensors, **placed} if placed else tensors)
    size = sum(map(len, buffers))
    if arena is None or not placed:
        return Output(buffers, size)
    naming = msgspec.structs.replace(header, in_arena=arena.in_arena(placed))
    others = {name: tensor for name, tensor in tensors.items() if name not in placed}
    return Output(buffers, size, chunks.encode(naming, others), placed)


class _Waiting(NamedTuple):
    """A chunk that waits for room: the sending in progress or still to begin. placed: what it refers to by handle."""

    request: int
    sending: Generator[None]
    size: int
    placed: Mapping[str, Tensor]


class Outgoing:
    """An edge that this worker feeds. Chunks that wait for room stay in order.

    by_handle: whether the consumer opens this worker's arena.
    """

    def __init__(self, ring: Ring, pinning: Pinning = UNPINNED, *, by_handle: bool = False) -> None:
        self.ring, self._pinning, self.by_handle = ring, pinning, by_handle
        pinning.pin(ring)
        self.producer: Producer = ring.claim_producer()
        self._waiting = collections.deque[_Waiting]()
        self._unreleased = collections.deque[tuple[int, Mapping[str, Tensor]]]()
        """Where each message ends whose tensors the consumer reads in the arena, and these."""
        self._waiting_of = collections.Counter[int]()
        """How many of these chunks belong to each request."""
        self.waiting_bytes = 0

    def send(self, request: int, output: Output, *, at_once: bool = True) -> None:
        """Send a chunk; queue it if there is no room, or for ``flush`` without ``at_once``."""
        by_handle = output.by_handle if self.by_handle else None
        if by_handle is not None and sum(map(len, by_handle)) > self.producer.max_reserve:
            by_handle = None  # the space of a message in fragments is given back before the message is read
        buffers, placed = (output.buffers, {}) if by_handle is None else (by_handle, output.placed)
        fits = at_once and not (placed or self._waiting) and output.size <= self.producer.max_reserve
        try:
            if fits and self.producer.try_send(*buffers):
                return
        except RingClosed:
            return
        self._waiting.append(_Waiting(request, self.producer.sending(*buffers), output.size, placed))
        self._waiting_of[request] += 1
        self.waiting_bytes += output.size
        if at_once and len(self._waiting) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what there is room for. If the consumer is gone, drop everything."""
        try:
            while self._waiting:
                request, sending, size, placed = self._waiting[0]
                for _ in sending:
                    return  # no room: the doorbell rings when there is
                self._waiting.popleft()
                if placed:
                    self._unreleased.append((self.producer.position, placed))
                self.waiting_bytes -= size
                self._waiting_of[request] -= 1
                if not self._waiting_of[request]:
                    del self._waiting_of[request]
        except RingClosed:
            self.drop()

    def free_passed(self) -> None:
        """Give back what the consumer has read in the arena, or will not read as it has closed."""
        while self._unreleased and self.producer.has_passed(self._unreleased[0][0]):
            self._unreleased.popleft()

    def drop(self, request: int | None = None) -> None:
        """Drop the unsent chunks of one request, or of all. A chunk that is partly in the ring is taken back."""
        if request is not None and request not in self._waiting_of:
            return
        kept = collections.deque[_Waiting]()
        for waiting in self._waiting:
            if request in (None, waiting.request):
                waiting.sending.close()
            else:
                kept.append(waiting)
        self._waiting = kept
        self._waiting_of = collections.Counter(each.request for each in kept)
        self.waiting_bytes = sum(each.size for each in kept)

    def close_if_unread(self) -> None:
        """Close the ring if its consumer has, so that its memory is freed with the consumer's replica.

        Not while chunks wait: the ring's bell, which has rung, wakes the loop, and ``flush`` drops them.
        """
        if not (self._waiting or self.ring.closed) and self.producer.consumer_closed:
            self.close()

    def close(self) -> None:
        """Close the ring. Its consumer is dead, or reads no more of it than what it has copied."""
        self.drop()
        self._unreleased.clear()
        self.producer.close()
        self._pinning.close(self.ring)


class Retained:
    """The outputs of one request, encoded, from the first one on."""

    def __init__(self) -> None:
        self.bytes = 0
        self.chunks: list[Output] = []
        self.evicted: str | None = None
        """Why nothing is retained any more, in words."""


class Retention:
    """The outputs that one worker retains, within ``bounds``."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._by_request: dict[int, Retained] = {}
        self._held: dict[int, Retained] = {}
        """The requests of which outputs are retained."""
        self._bytes = 0

    @property
    def requests(self) -> Set[int]:
        return self._by_request.keys()

    def begin(self, request: int) -> None:
        """Retain the outputs of a request from its first one on, and forget what was retained of it before."""
        self.forget(request)
        self._by_request[request] = Retained()

    def retains(self, request: int) -> bool:
        """Return whether the next output of this request is retained."""
        retained = self._by_request.get(request)
        return retained is not None and retained.evicted is None

    def forget(self, request: int) -> None:
        """Drop the outputs of a request that has ended. Harmless if nothing is retained of it."""
        if retained := self._by_request.pop(request, None):
            self._bytes -= retained.bytes
            self._held.pop(request, None)

    def end(self, request: int) -> list[tuple[int, str]]:
        """Retain nothing more of a request whose first outputs are partial. Returns it, and why, if it was retained."""
        if not self.retains(request):
            return []
        return [(request, self._evict(request, "its first outputs were not computed again after a death"))]

    def add(self, request: int, output: Output) -> list[tuple[int, str]]:
        """Retain one more output. Returns the requests that were evicted for it, and why."""
        if not self.retains(request):
            return []
        retained = self._held[request] = self._by_request[request]
        retained.chunks.append(output)
        retained.bytes += output.size + OVERHEAD_BYTES
        self._bytes += output.size + OVERHEAD_BYTES
        evicted, bounds = [], self._bounds
        if retained.bytes > bounds.request_bytes:
            why = f"its outputs exceed the {bounds.request_bytes} bytes that are retained (limits.retain_bytes)"
            evicted.append((request, self._evict(request, why)))
        while self._bytes > bounds.worker_bytes:
            largest = max(self._held, key=lambda each: self._held[each].bytes)
            why = (
                f"its retained outputs were evicted, as the largest of more than {bounds.worker_bytes} bytes"
                " in one worker (limits.worker_retain_bytes)"
            )
            evicted.append((largest, self._evict(largest, why)))
        return evicted

    def chunks(self, request: int) -> list[Output] | str:
        """Return the retained outputs of a request; or the reason why there are none."""
        retained = self._by_request.get(request)
        if retained is None:
            return "the stage retains no outputs of it"
        return retained.chunks if retained.evicted is None else retained.evicted

    def _evict(self, request: int, why: str) -> str:
        retained = self._by_request[request]
        self._held.pop(request, None)
        self._bytes -= retained.bytes
        retained.chunks, retained.bytes, retained.evicted = [], 0, why
        return why
