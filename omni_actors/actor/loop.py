"""The engine loop: rings in, engine, rings out, in one thread.

Rules
1. Chunks go ring -> ``feed`` in place and ``step`` -> ring with one copy; no other thread touches them.
2. The loop sleeps in one poll() over its command bell, the doorbells of its incoming rings and, where output waits for
   room, of its outgoing rings. Nothing else wakes it.
3. Commands come before chunks. A chunk may still arrive before its ``Start``, since they travel apart: as numbers grow
   with every ``Start``, a number above the last one started waits, and a number below that is not active is stale.
4. Back-pressure: with ``CONGESTED_BYTES`` waiting for room on any edge, the loop neither steps nor receives: a stage
   below that stands still holds up the whole stage, until that worker is killed or its requests' deadlines pass.
"""

from __future__ import annotations

import collections
import os
import select
import threading
import time
from collections.abc import Callable, Generator

from omni_actors.actor import chunks
from omni_actors.actor.chunks import ChunkHeader, SequenceCheck
from omni_actors.messages import Abort, Address, Finished, Message, Refused, StageStats, Start, Stop
from omni_actors.stages.base import Chunk, InvalidRequest, StageEngine, StageFailure, StageOutput, StageRequest
from ringbuf import Consumer, Frame, Producer, Ring, RingClosed

CONGESTED_BYTES = 8 * 1024 * 1024
RECEIVE_FRAMES = 64
RECEIVE_BYTES = 1024 * 1024
"""What one edge may bring in between two steps, so that a fast producer does not keep a busy engine from stepping."""
LONGEST_REFUSAL = 16_384


class Attach:
    """Command of the shell: this ring is now the edge from ``producer`` to ``consumer``."""

    def __init__(self, producer: Address, consumer: Address, ring: Ring) -> None:
        self.producer, self.consumer, self.ring = producer, consumer, ring


Command = Start | Abort | Stop | Attach


class _Incoming:
    """An edge that feeds this worker."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.consumer: Consumer = ring.claim_consumer()
        self.early: Frame | None = None
        """A frame whose ``Start`` is not here yet; nothing behind it is read until it is."""
        self.ended = False

    def close(self) -> None:
        if self.early is not None:
            self.early.release()
        self.consumer.close()
        self.ring.close()


class _Outgoing:
    """An edge that this worker feeds: what waits for room stays in order."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.producer: Producer = ring.claim_producer()
        self._waiting: collections.deque[tuple[int, Generator[None], int]] = collections.deque()
        """Request, the sending under way or to come, bytes."""
        self.waiting_bytes = 0

    def send(self, request: int, buffers: list[memoryview]) -> int:
        """Send, or queue what there is no room for; its size in bytes."""
        size = sum(buffer.nbytes for buffer in buffers)
        self._waiting.append((request, self.producer.sending(*buffers), size))
        self.waiting_bytes += size
        if len(self._waiting) == 1:
            self.flush()
        return size

    def flush(self) -> None:
        """Send what there is room for. When the consumer is gone nothing waits: its requests have failed."""
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


class _Active:
    """A request that has started here and not ended."""

    def __init__(self, start: Start) -> None:
        self.request, self.targets = start.request, start.targets
        self._checks = {source: SequenceCheck(start.request, source) for source in start.sources}
        self.seq = 0
        self.started = time.monotonic()
        self.first_input: float | None = None
        self.first_output: float | None = None
        self.step_s = 0.0
        self.sent_bytes = {str(target): 0 for target in start.targets}

    def take_in(self, chunk: Chunk) -> None:
        """Raises ChunkCorrupted for a gap in a source's sequence, KeyError for a source that was not announced."""
        self._checks[chunk.source](chunk.seq)
        self.first_input = self.first_input or time.monotonic()

    def stats(self, stage: str) -> StageStats:
        return StageStats(
            stage,
            self.started,
            self.first_input,
            self.first_output,
            time.monotonic(),
            self.step_s,
            self.seq,
            self.sent_bytes,
        )


class EngineLoop:
    """Runs one engine until ``Stop``. ``post`` may be called from any thread, everything else is the loop's own.

    notify: takes Finished and Refused; called in the loop's thread and may block it.
    """

    def __init__(self, address: Address, fence: int, notify: Callable[[Message], None]) -> None:
        self._address, self._newest, self._notify = address, fence, notify
        self._commands: collections.deque[Command] = collections.deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._incoming: dict[Address, _Incoming] = {}
        self._outgoing: dict[Address, _Outgoing] = {}
        self._active: dict[int, _Active] = {}
        self._stopping = False
        self.running = False
        self._ended = False
        self._ending = threading.Lock()

    def post(self, command: Command) -> None:
        """To a loop that has ended: goes nowhere."""
        self._commands.append(command)
        with self._ending:
            if not self._ended:
                os.eventfd_write(self._bell, 1)

    def run(self, engine: StageEngine) -> None:
        """Serve until ``Stop``, then close the engine and the rings. An engine's exception passes through."""
        self.running = True
        try:
            while not self._stopping:
                moved = self._obey(engine)
                congested = self._flush() > CONGESTED_BYTES
                if not congested:
                    moved |= self._receive(engine)
                    if engine.busy:
                        self._step(engine)
                        moved = True
                if not moved:
                    self._sleep(receiving=not congested)
            engine.close()
        finally:
            edges: list[_Incoming | _Outgoing] = [*self._incoming.values(), *self._outgoing.values()]
            for edge in edges:
                edge.close()
            with self._ending:
                self._ended = True
                os.close(self._bell)

    # commands

    def _obey(self, engine: StageEngine) -> bool:
        moved = False
        while self._commands:
            moved = True
            match self._commands.popleft():
                case Start() as start:
                    self._newest = start.request
                    self._active[start.request] = _Active(start)
                    try:
                        engine.start(StageRequest(start.request, start.sources, start.params))
                    except InvalidRequest as error:
                        self._refuse(start.request, error)
                case Abort(request):
                    for edge in self._outgoing.values():
                        edge.drop(request)
                    if self._active.pop(request, None):
                        engine.abort(request)
                case Attach() as attach:
                    self._attach(attach)
                case Stop():
                    self._stopping = True
        return moved

    def _attach(self, attach: Attach) -> None:
        if attach.consumer == self._address:
            if old_in := self._incoming.pop(attach.producer, None):
                old_in.close()
            self._incoming[attach.producer] = _Incoming(attach.ring)
        else:
            if old_out := self._outgoing.pop(attach.consumer, None):
                old_out.close()
            self._outgoing[attach.consumer] = _Outgoing(attach.ring)

    # chunks in

    def _receive(self, engine: StageEngine) -> bool:
        moved = False
        for edge in self._incoming.values():
            received = 0
            for _ in range(RECEIVE_FRAMES):
                frame = edge.early or self._next_frame(edge)
                if frame is None:
                    break
                header, tensors = chunks.decode(frame.data)
                if header.request > self._newest:
                    edge.early = frame
                    break
                edge.early = None
                moved = True
                with frame:
                    received += frame.data.nbytes
                    if active := self._active.get(header.request):
                        self._feed(engine, active, Chunk(header.source, header.seq, header.last, tensors, header.data))
                if received >= RECEIVE_BYTES:
                    break
        return moved

    def _next_frame(self, edge: _Incoming) -> Frame | None:
        try:
            return edge.consumer.try_recv()
        except RingClosed:
            edge.ended = True
            return None

    def _feed(self, engine: StageEngine, active: _Active, chunk: Chunk) -> None:
        active.take_in(chunk)
        try:
            engine.feed(active.request, chunk)
        except InvalidRequest as error:
            self._refuse(active.request, error)

    # chunks out

    def _step(self, engine: StageEngine) -> None:
        began = time.monotonic()
        for output in engine.step():
            if isinstance(output, StageFailure):
                self._refuse(output.request_id, output.error)
            else:
                self._emit(output, began)
        took = time.monotonic() - began
        for request in self._active.values():
            request.step_s += took

    def _emit(self, output: StageOutput, step_began: float) -> None:
        active = self._active[output.request_id]
        header = ChunkHeader(output.request_id, self._address.stage, active.seq, output.last, dict(output.data))
        buffers = chunks.encode(header, output.tensors)
        active.seq += 1
        active.first_output = active.first_output or time.monotonic()
        for target in active.targets:
            active.sent_bytes[str(target)] += self._outgoing[target].send(active.request, buffers)
        if output.last:
            del self._active[output.request_id]
            active.step_s += time.monotonic() - step_began
            self._notify(Finished(output.request_id, active.stats(self._address.stage)))

    def _refuse(self, request: int, error: InvalidRequest) -> None:
        del self._active[request]
        self._notify(Refused(request, error.message[:LONGEST_REFUSAL], error.param, error.code))

    # sleep

    def _flush(self) -> int:
        """Send what there is room for; the bytes that wait on the fullest edge."""
        for edge in self._outgoing.values():
            edge.flush()
        return max((edge.waiting_bytes for edge in self._outgoing.values()), default=0)

    def _sleep(self, *, receiving: bool) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        for out in self._outgoing.values():
            if out.waiting_bytes:
                poll.register(out.producer.fileno(), select.POLLIN)
        if receiving:
            for edge in self._incoming.values():
                if edge.early is None and not edge.ended:
                    if not edge.consumer.park():
                        return
                    poll.register(edge.consumer.fileno(), select.POLLIN)
        for fd, _ in poll.poll():
            if fd == self._bell:
                os.eventfd_read(self._bell)
