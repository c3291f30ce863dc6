"""An engine loop in a thread of this process, the far ends of its rings, and its messages."""

from __future__ import annotations

import collections
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import ChunkHeader
from omni_actors.protocol.messages import (
    CLIENT,
    CLIENT_ADDRESS,
    Address,
    Bounds,
    ControlMessage,
    Decided,
    Decisions,
    Start,
    Stop,
    WorkerSpec,
)
from omni_actors.protocol.packets import Envelope, close_all
from omni_actors.stages.base import StageEngine
from omni_actors.stages.echo.engine import EchoEngine
from omni_actors.worker.control import AttachRing, Command, Control
from omni_actors.worker.engine_loop import EngineLoop
from ringbuf import Consumer, Producer, Ring
from tests.support.stage_context import stage_context

WATCHDOG_S = 60.0
HERE = Address("here", 0)
AMPLE = Bounds(1 << 20, 1 << 30)


def echo(**options: Any) -> EchoEngine:
    return EchoEngine(stage_context(options))


class Watched(EngineLoop):
    """Puts each sleep into ``asleep``: True if the loop waits for input, False if it waits for room in its output."""

    def __init__(self, spec: WorkerSpec, control: Control) -> None:
        super().__init__(spec, 0, control)
        self.asleep: queue.Queue[bool] = queue.Queue()
        self.bells = 0
        """How many descriptors the last sleep was on."""

    def park(self, *, receiving: bool) -> list[int]:
        bells = super().park(receiving=receiving)
        self.bells = len(bells)
        self.asleep.put(receiving)
        return bells


class QueuedControl(Control):
    """A control connection within this process. ``post`` may be called from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: queue.Queue[ControlMessage] = queue.Queue()
        self.memories: list[int] = []
        """The descriptors that came with messages. ``close`` closes those that are left."""
        self._commands: collections.deque[Command] = collections.deque()
        self._arrived, self._bell = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))

    def post(self, *commands: Command, wakes: bool = True) -> None:
        """Queue commands, to be handled in one turn. Without any, the loop only wakes up."""
        self._commands.extend(commands)
        os.eventfd_write(self._arrived, 1)
        if wakes:
            os.eventfd_write(self._bell, 1)

    def fileno(self) -> int:
        return self._arrived

    def bell(self) -> int:
        return self._bell

    def commands(self) -> list[Command]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._arrived)
        return [self._commands.popleft() for _ in range(len(self._commands))]

    def _write(self, notices: Sequence[Envelope]) -> None:
        for message, fds in notices:
            self.memories.extend(fds)
            self.messages.put(message)

    def close(self) -> None:
        close_all(self.memories)
        os.close(self._arrived)
        os.close(self._bell)


class LoopHarness:
    """A loop with the far ends of its rings, and its messages."""

    def __init__(self, *, resumable: bool = False, bounds: Bounds = AMPLE, gathers: bool = False) -> None:
        self._control = QueuedControl()
        self.messages, self.post = self._control.messages, self._control.post
        self.memories = self._control.memories
        spec = WorkerSpec(address=HERE, factory="", resumable=resumable, bounds=bounds, gathers=gathers)
        self.loop = Watched(spec, self._control)
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._rings: list[Ring] = []

    def input(self, ring_bytes: int = 1 << 20, source: str = CLIENT, replica: int = 0) -> Producer:
        ring = self._ring(ring_bytes)
        self.post(AttachRing(Address(source, replica), HERE, self._share(ring)))
        return ring.claim_producer()

    def output(self, ring_bytes: int = 1 << 20, target: Address = CLIENT_ADDRESS) -> Consumer:
        ring = self._ring(ring_bytes)
        self.post(AttachRing(HERE, target, self._share(ring)))
        return ring.claim_consumer()

    def _ring(self, ring_bytes: int) -> Ring:
        ring = Ring.create(ring_bytes)
        self._rings.append(ring)
        return ring

    def _share(self, ring: Ring) -> Ring:
        return Ring.attach([os.dup(fd) for fd in ring.fds], generation=0)

    def run(self, engine: StageEngine) -> None:
        def target() -> None:
            try:
                self.loop.run(engine)
            except BaseException as error:  # noqa: BLE001 - the test checks it
                self.error = error

        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()

    def start(
        self,
        request: int,
        sources: tuple[str, ...] = (CLIENT,),
        targets: tuple[Address, ...] = (CLIENT_ADDRESS,),
        *,
        retained: bool = False,
        replayed: bool = False,
        checkpointed: bool = False,
        needed_from: tuple[int, ...] = (),
        computed_from: int = 0,
        wakes: bool = True,
    ) -> None:
        self.post(
            Start(
                request=request,
                sources=sources,
                targets=targets,
                params=msgspec.Raw(msgspec.msgpack.encode({})),
                downstream=True,
                retained=retained,
                replayed=replayed,
                checkpointed=checkpointed,
                needed_from=needed_from,
                computed_from=computed_from,
            ),
            wakes=wakes,
        )

    def rings_slept_on(self) -> int:
        """Return on how many doorbells of rings the loop slept last."""
        return self.loop.bells - 1

    def next_message(self) -> ControlMessage:
        return self.messages.get(timeout=WATCHDOG_S)

    def wait_asleep(self, *, receiving: bool = True) -> None:
        """Wait until the loop has nothing left to do: it has handled all that was posted and sent before this call.

        The first sleep after this call may have been decided on before it. The second one follows a whole turn.
        """
        while not self.loop.asleep.empty():
            self.loop.asleep.get()
        for _ in range(2):
            self.post()
            while self.loop.asleep.get(timeout=WATCHDOG_S) != receiving:
                pass

    def wait_ended(self) -> BaseException | None:
        assert self._thread is not None
        self._thread.join(WATCHDOG_S)
        assert not self._thread.is_alive()
        return self.error

    def close(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.post(Stop())
            assert self.wait_ended() is None
        for ring in self._rings:
            ring.close()
        self._control.close()


@contextmanager
def open_harness(*, resumable: bool = False, bounds: Bounds = AMPLE, gathers: bool = False) -> Iterator[LoopHarness]:
    """When the block ends, the loop has ended and every descriptor is closed."""
    before = len(os.listdir("/proc/self/fd"))
    harness = LoopHarness(resumable=resumable, bounds=bounds, gathers=gathers)
    yield harness
    harness.close()
    assert len(os.listdir("/proc/self/fd")) <= before, "fewer, if garbage of earlier tests was collected"


def send(
    producer: Producer,
    request: int,
    seq: int,
    *,
    last: bool = False,
    source: str = CLIENT,
    tensors: Mapping[str, Any] | None = None,
    decisions: Decisions | None = None,
    upstream: tuple[Decided, ...] = (),
    **data: Any,
) -> None:
    header = ChunkHeader(
        request=request, source=source, seq=seq, last=last, data=data, decisions=decisions, upstream=upstream
    )
    producer.send(*chunks.encode(header, tensors or {}), timeout=WATCHDOG_S)


def receive(consumer: Consumer) -> ChunkHeader:
    with consumer.recv(timeout=WATCHDOG_S) as frame:
        return chunks.decode(frame.data)[0]
