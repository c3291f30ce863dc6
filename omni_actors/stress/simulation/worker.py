"""Workers of a simulation: tasks of this process, behind the ``Spawner`` seam.

Rules
1. A worker runs the real engine loop and the engine that its pipeline names, on real rings: what is tested is what is
   shipped. Made up are the process, its control socket, and the time that things take.
2. It can be hurt between any two turns of its loop, and inside a turn wherever that leaves the loop's own code: at each
   call of the engine, at each of its outputs, at each thing that is said.
3. A worker that is killed closes nothing: its claims become nobody's, as when the kernel takes a process away, and its
   rings are unmapped when its block is left.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import pkgutil
import select
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias, cast

import trio

from omni_actors.errors import WorkerExit
from omni_actors.protocol import messages
from omni_actors.protocol.mailbox import Envelope, MailboxFull
from omni_actors.protocol.messages import (
    Abort,
    Address,
    Configure,
    Connect,
    ControlMessage,
    EngineFailed,
    LoadFailed,
    Pause,
    Ping,
    Pong,
    Ready,
    Resend,
    Resume,
    Start,
    Stop,
)
from omni_actors.stages.base import Chunk, Pausable, StageContext, StageEngine, StageFailure, StageOutput, StageRequest
from omni_actors.supervisor.process import Worker
from omni_actors.worker.engine_loop import AttachRing, EngineLoop
from ringbuf import Ring
from ringbuf._words import CONSUMER, PRODUCER

Note: TypeAlias = Callable[[str], None]


class PlannedKill(BaseException):
    """SIGKILL, inside a turn."""


class PlannedEngineError(RuntimeError):
    """An engine's own exception."""


@dataclass(frozen=True)
class WorkerBehavior:
    """What a worker is like, in virtual seconds.

    load_s: until it is ready. turn_s: a turn of its loop that moves something. dying_s: from the end of a process to
    the end of what was its. fails: what its engine raises instead of loading. refused: no memory for its first ring.
    """

    load_s: float = 0.0
    turn_s: float = 0.0
    dying_s: float = 0.0
    fails: str | None = None
    refused: bool = False


class SimulatedRing(Ring):
    """A ring whose owner can be killed without being a process."""

    def orphan(self) -> None:
        """The ends that were claimed through this mapping are nobody's, as those of a process that was killed."""
        if self._closed:
            return
        if self._producer is not None:
            self._segment.store_claim(PRODUCER, 0)
        if self._consumer is not None:
            self._segment.store_claim(CONSUMER, 0)

    @property
    def closed(self) -> bool:
        return self._closed


class SimulatedWorker:
    """A worker as the supervisor sees one, its mailbox included. ``live`` is its life, in a task of its own."""

    def __init__(self, address: Address, pid: int, behavior: WorkerBehavior, mailbox_capacity: int, note: Note) -> None:
        self.address, self.pid, self.behavior, self._note = address, pid, behavior, note
        self.mailbox = self
        self.fault = None
        self._inbox_send, self._inbox = trio.open_memory_channel[tuple[bytes, tuple[int, ...]]](mailbox_capacity)
        self._say_send, self.incoming = trio.open_memory_channel[Envelope](math.inf)
        self._capacity = mailbox_capacity
        self._exit: WorkerExit | None = None
        self._ending, self._dead = trio.Event(), trio.Event()
        self._scope = trio.CancelScope(shield=True)
        self._moved_on = trio.lowlevel.ParkingLot()
        self._bells = select.epoll()
        self._fds: set[int] = set()
        """Under way to it, with messages."""
        self.rings: list[SimulatedRing] = []
        self._planned_death: tuple[int, BaseException] | None = None
        self.loop: EngineLoop | None = None
        self.engine: StageEngine | None = None
        self.born = trio.current_time()
        self.ready_at: float | None = None
        self.died_at: float | None = None
        self.frozen = self.blocked = False
        self.loses_pong = False
        self.rested_at = -math.inf
        """When it was last continued after it had been stopped."""
        self.hung_at: float | None = None
        """Since when it gives no sign of life, for good."""

    # as the supervisor sees it

    @property
    def congested(self) -> bool:
        """As ``Mailbox.congested``."""
        return 2 * self._inbox_send.statistics().current_buffer_used >= self._capacity

    def post(self, message: ControlMessage, fds: Sequence[int] = ()) -> None:
        """As ``Mailbox.post``."""
        if not self.alive:
            return
        packet = messages.encode(message)
        owned = tuple(os.dup(fd) for fd in fds)
        self._fds.update(owned)
        try:
            self._inbox_send.send_nowait((packet, owned))
        except trio.WouldBlock:
            raise MailboxFull(self._capacity) from None

    def unread(self) -> Iterator[ControlMessage]:
        """As ``Mailbox.unread``."""
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                yield self.incoming.receive_nowait()[0]

    def kill(self) -> None:
        self.die(signal="SIGKILL")

    async def wait_ending(self) -> WorkerExit:
        await self._ending.wait()
        assert self._exit is not None
        return self._exit

    async def wait_dead(self) -> WorkerExit:
        await self._dead.wait()
        return await self.wait_ending()

    # as the simulation hurts it

    @property
    def alive(self) -> bool:
        return self._exit is None

    @property
    def hung(self) -> bool:
        return self.alive and self.hung_at is not None

    def die(self, *, signal: str | None = None, exit_code: int | None = None) -> None:
        """Now, between two turns. Harmless when it is dead already."""
        if self._exit is not None:
            return
        self._exit, self.died_at = WorkerExit(self.pid, signal, exit_code), trio.current_time()
        self._note(f"{self} {self._exit}")
        for ring in self.rings:
            ring.orphan()
        self._say_send.close()
        self._scope.cancel()
        self._ending.set()

    def die_inside_turn(self, breaths: int, how: BaseException) -> None:
        """Let it end inside a turn, after it has left the loop's own code ``breaths`` more times."""
        self._planned_death = breaths, how

    def cancel_planned_death(self) -> None:
        """Take ``die_inside_turn`` back."""
        self._planned_death = None

    def stop_process(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def continue_process(self) -> None:
        """SIGCONT."""
        self.frozen = False
        self._moved_on.unpark_all()

    def block_engine(self) -> None:
        """Let its engine's thread come back no more; its other thread goes on."""
        self.blocked = True

    def __str__(self) -> str:
        return f"{self.address}#{self.pid}"

    # its life

    async def live(self) -> None:
        with self._scope:
            message, _ = await self._next()
            assert isinstance(message, Configure), message
            self.loop = EngineLoop(message.spec.address, message.fence, self._notify)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, self.loop)
                await self._run(message, self.loop)
        with trio.CancelScope(shield=True):
            await trio.sleep(self.behavior.dying_s)
        self._dead.set()

    async def _next(self) -> tuple[ControlMessage, tuple[int, ...]]:
        packet, fds = await self._inbox.receive()
        while self.frozen:
            await self._moved_on.park()
        return messages.decode(packet), fds

    async def _obey(self, loop: EngineLoop) -> None:
        """``worker._obey``, message by message, and the end of the process that follows it."""
        while True:
            message, fds = await self._next()
            match message:
                case Start() | Resend() | Pause() | Resume() | Abort() | Ping():
                    loop.post(message)
                case Connect(producer, consumer, generation):
                    self._fds.difference_update(fds)
                    ring = SimulatedRing.attach(fds, generation=generation)
                    self.rings.append(cast(SimulatedRing, ring))
                    loop.post(AttachRing(producer, consumer, ring))
                case Stop(grace_s):
                    loop.post(message)
                    if self.ready_at is not None:
                        await trio.sleep(grace_s)
                    self.die(exit_code=0)
                case _:
                    raise TypeError(f"a worker does not take {type(message).__name__}")

    async def _run(self, configure: Configure, loop: EngineLoop) -> None:
        """``worker._run_engine``."""
        await trio.sleep(self.behavior.load_s)
        await self._stand_still()
        try:
            if self.behavior.fails is not None:
                self._notify(LoadFailed(self.behavior.fails))
                self.die(exit_code=1)
                return
            context = StageContext(
                configure.spec.address.stage, None, configure.spec.options, 1, "cpu", lambda note: None
            )
            self.engine = FaultInjectingEngine(pkgutil.resolve_name(configure.spec.factory)(context), self._fault_point)
            self._notify(Ready(self.behavior.load_s))
            self.ready_at = trio.current_time()
            while self.alive and not loop.stopping:
                moved, receiving = loop.turn(self.engine)
                await self._pause(loop, moved=moved, receiving=receiving)
            if self.alive:
                self.engine.close()
        except PlannedKill:
            self.kill()
        except Exception as error:  # noqa: BLE001 - it ends the worker
            self._note(f"{self} {type(error).__name__}: {error}")
            if self.ready_at is not None and self.alive:
                self._say_send.send_nowait((EngineFailed(loop.handling), ()))
        if self.alive:
            loop.close()
            await trio.lowlevel.checkpoint()
            self.die(exit_code=0 if loop.stopping else 1)

    async def _pause(self, loop: EngineLoop, *, moved: bool, receiving: bool) -> None:
        """Between two turns."""
        if moved:
            await trio.sleep(self.behavior.turn_s)
        elif bells := loop.park(receiving=receiving):
            for bell in bells:
                self._bells.register(bell, select.EPOLLIN)
            try:
                await trio.lowlevel.wait_readable(self._bells)
                loop.unpark([bell for bell, _ in self._bells.poll(0)])
            finally:
                for bell in bells:
                    self._bells.unregister(bell)
        else:
            await trio.lowlevel.checkpoint()
        await self._stand_still()

    async def _stand_still(self) -> None:
        while self.frozen or self.blocked:
            await self._moved_on.park()

    def _notify(self, message: ControlMessage) -> None:
        self._fault_point()
        if self.loses_pong and isinstance(message, Pong):
            self._note(f"{self} its {message} is lost")
            self.loses_pong, self.hung_at = False, trio.current_time()
            return
        if self.alive:
            self._say_send.send_nowait((message, ()))
        self._fault_point()

    def _fault_point(self) -> None:
        if self._planned_death is not None:
            breaths, how = self._planned_death
            if not breaths:
                raise how
            self._planned_death = breaths - 1, how

    def free(self) -> None:
        """What the kernel does when a process is gone. By then its edges are closed for it."""
        if self.loop is not None:
            self.loop.close()
        for ring in self.rings:
            ring.close()
        for fd in self._fds:
            os.close(fd)
        self._bells.close()


class FaultInjectingEngine:
    """An engine whose worker may die at each of its calls and outputs."""

    def __init__(self, engine: StageEngine, fault_point: Callable[[], None]) -> None:
        self._engine, self._fault_point = engine, fault_point

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def start(self, request: StageRequest) -> None:
        self._fault_point()
        self._engine.start(request)

    def feed(self, request_id: int, chunk: Chunk) -> None:
        self._fault_point()
        self._engine.feed(request_id, chunk)

    def abort(self, request_id: int) -> None:
        self._fault_point()
        self._engine.abort(request_id)

    def pause(self, request_id: int) -> None:
        self._fault_point()
        if isinstance(self._engine, Pausable):
            self._engine.pause(request_id)

    def resume(self, request_id: int) -> None:
        self._fault_point()
        if isinstance(self._engine, Pausable):
            self._engine.resume(request_id)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in self._engine.step():
            self._fault_point()
            yield output
        self._fault_point()

    def close(self) -> None:
        self._engine.close()


class SimulatedSpawner:
    """Gives workers that live as tasks of this process.

    nature: of the next worker at this place; raises SpawnFailed where there is to be none.
    """

    def __init__(self, behavior: Callable[[Address, int], WorkerBehavior], note: Note) -> None:
        self._behavior, self._note = behavior, note
        self._pids = itertools.count(1)
        self._refused: Address | None = None
        self.workers: list[SimulatedWorker] = []
        """All that were spawned."""
        self.living: dict[Address, SimulatedWorker] = {}
        self._rings: list[SimulatedRing] = []

    @asynccontextmanager
    async def spawn(self, address: Address, mailbox_capacity: int) -> AsyncIterator[Worker]:
        pid = next(self._pids)
        behavior = self._behavior(address, pid)
        worker = SimulatedWorker(address, pid, behavior, mailbox_capacity, self._note)
        self._note(f"{worker} is spawned: {behavior}")
        self._refused = address if behavior.refused else None
        self.living[address] = worker
        self.workers.append(worker)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.live)
                try:
                    yield cast(Worker, worker)
                finally:
                    worker.kill()
                    with trio.CancelScope(shield=True):
                        await worker.wait_dead()
        finally:
            del self.living[address]
            worker.free()

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> Ring:
        if self._refused in (producer, consumer):
            self._refused = None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        ring = cast(SimulatedRing, SimulatedRing.create(capacity, generation=generation))
        self._rings.append(ring)
        return ring

    def all_rings(self) -> Iterator[SimulatedRing]:
        """Every mapping that was made, here and in workers."""
        yield from self._rings
        for worker in self.workers:
            yield from worker.rings
