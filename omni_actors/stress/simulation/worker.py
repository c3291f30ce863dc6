"""A simulated worker: a task of this process that the supervisor takes for a process.

Rules
1. A worker runs the real engine loop and the engine that its pipeline names, on real rings. Simulated are the process,
   its control socket, and the time that things take.
2. A fault hits it between any two turns of its loop, and inside a turn wherever the loop's own code calls out: at each
   call of the engine, at each of its outputs, at each control message that it sends.
3. A worker that is killed closes nothing. Its claims are released as the kernel's teardown of a process would, and its
   rings are unmapped when the spawner frees it.
"""

from __future__ import annotations

import math
import os
import pkgutil
import select
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import trio

from omni_actors.errors import WorkerExit
from omni_actors.protocol import messages
from omni_actors.protocol.mailbox import MailboxFull, available
from omni_actors.protocol.packets import Envelope, close_all
from omni_actors.stages.base import StageContext, StageEngine
from omni_actors.stress.simulation.control import SimulatedControl
from omni_actors.stress.simulation.fault_points import PlannedKill, add_fault_points
from omni_actors.supervisor.process import Worker
from omni_actors.worker.control import AttachCheckpoint, AttachRing, Command
from omni_actors.worker.engine_loop import EngineLoop
from ringbuf import Ring

CONGESTED_BYTES = 6_000
"""The bound of the engine loop. It is so small that the few chunks of a schedule congest an edge."""

Note: TypeAlias = Callable[[str], None]
OnStart: TypeAlias = Callable[[messages.Address, messages.Start], object]


class Reports(Protocol):
    """What a worker sends its messages for the parent through."""

    def send_nowait(self, envelope: Envelope, /) -> None: ...

    def close(self) -> None:
        """Called when it dies."""
        ...


class _Posted(NamedTuple):
    """A message on its way to the worker."""

    packet: bytes
    fds: tuple[int, ...]
    wakes: bool


@dataclass(frozen=True)
class WorkerBehavior:
    """How a worker behaves. Times are virtual seconds.

    load_s: until it is ready.
    turn_s: a turn of its loop.
    dying_s: from the death of the process to the end of its teardown.
    fails: the error with which its engine fails to load.
    refused: there is no memory for its first ring.
    """

    load_s: float = 0.0
    turn_s: float = 0.0
    dying_s: float = 0.0
    fails: str | None = None
    refused: bool = False


class SimulatedWorker(Worker):
    """A worker as the supervisor sees it, and its mailbox. ``run`` is its main task."""

    def __init__(
        self, address: messages.Address, pid: int, behavior: WorkerBehavior, mailbox_capacity: int, note: Note
    ) -> None:
        super().__init__(pid, self)
        self.on_start: OnStart = lambda address, message: None
        """Called with its address and the message when a request is about to start in it."""
        self.address, self.behavior, self._note = address, behavior, note
        self.fault: str | None = None
        self._inbox_send, self._inbox = trio.open_memory_channel[_Posted](mailbox_capacity)
        self._reports: Reports
        self._reports, self.incoming = trio.open_memory_channel[Envelope](math.inf)
        self._capacity = mailbox_capacity
        self._freed = False
        self.on_taken: Callable[[], None] = lambda: None
        """Called when it has read a message."""
        self._scope = trio.CancelScope(shield=True)
        self._continued = trio.lowlevel.ParkingLot()
        self._bells = select.epoll()
        self._fds: set[int] = set()
        """Descriptors in messages that were not received: those to it, and those that it has not sent."""
        self._attached: list[AttachCheckpoint] = []
        """The commands that had descriptors of checkpoint memory."""
        self._control = SimulatedControl(self)
        self.rings: list[Ring] = []
        self.planned_death: tuple[int, BaseException] | None = None
        """After how many more fault points (see rule 2) it dies inside a turn, and of what."""
        self.dies_of: type[messages.ControlMessage] | None = None
        """It dies with the next control message of this type: before it reads it, or when it has sent it."""
        self.loop: EngineLoop | None = None
        self.engine: StageEngine | None = None
        self.born = trio.current_time()
        self.ready_at: float | None = None
        self.died_at: float | None = None
        self.frozen = False
        self.blocked = False
        """Whether its engine thread is blocked for good. The control thread continues."""
        self.loses_pong = False
        self.rested_at = -math.inf
        """When it was last continued after a stop."""
        self.hung_at: float | None = None
        """When it began to hang for good."""

    # as the supervisor sees it

    @property
    def congested(self) -> bool:
        """As ``Mailbox.congested``."""
        return 2 * self.waiting >= self._capacity

    @property
    def waiting(self) -> int:
        """How many messages have reached its node that it has not read."""
        return self._inbox_send.statistics().current_buffer_used

    def post(self, message: messages.ControlMessage, fds: Sequence[int] = (), *, wakes: bool = True) -> None:
        """As ``Mailbox.post``."""
        if not self.alive:
            return
        if isinstance(message, messages.Start):
            self.on_start(self.address, message)
        packet = messages.encode(message)
        owned = tuple(os.dup(fd) for fd in fds)
        self._fds.update(owned)
        try:
            self._inbox_send.send_nowait(_Posted(packet, owned, wakes))
        except trio.WouldBlock:
            raise MailboxFull(self._capacity) from None
        if type(message) is self.dies_of:
            self.kill()

    def unread(self) -> Iterator[Envelope]:
        """As ``Mailbox.unread``."""
        return available(self.incoming)

    def kill(self) -> None:
        self.die(signal="SIGKILL")

    def report_to(self, reports: Reports) -> None:
        """Send what it reports elsewhere, and not to ``incoming``."""
        self._reports = reports

    def fail(self, reason: str) -> None:
        """Let the supervisor kill it for this reason, as for an undecodable packet."""
        if self.fault is None:
            self.fault = reason
            self._reports.close()

    # faults

    @property
    def exit(self) -> WorkerExit | None:
        """How it died; None while it lives."""
        return self._exit

    @property
    def alive(self) -> bool:
        return self._exit is None

    @property
    def at_work(self) -> Set[int]:
        """Numbers of the requests that its engine has, also when it has died."""
        return frozenset() if self.loop is None else self.loop._active.keys()

    @property
    def hung(self) -> bool:
        return self.alive and self.hung_at is not None

    def die(self, *, signal: str | None = None, exit_code: int | None = None) -> None:
        """Die now, between two turns. Does nothing when it is dead already."""
        if self._exit is not None:
            return
        self._exit, self.died_at = WorkerExit(self.pid, signal, exit_code), trio.current_time()
        self._note(f"{self} {self._exit}")
        for ring in self.rings:
            if not ring.closed:
                ring.abandon()
        self._reports.close()
        self._scope.cancel()
        self._ending.set()

    def stop_process(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def continue_process(self) -> None:
        """SIGCONT."""
        self.frozen = False
        self._continued.unpark_all()

    def __str__(self) -> str:
        return f"{self.address}#{self.pid}"

    # the worker's tasks

    async def run(self) -> None:
        with self._scope:
            message, _, _ = await self._next()
            assert isinstance(message, messages.Configure), message
            self.loop = EngineLoop(message.spec, message.fence, self._control, congested_bytes=CONGESTED_BYTES)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._deliver)
                await self._run_engine(message, self.loop)
        with trio.CancelScope(shield=True):
            await trio.sleep(self.behavior.dying_s)
        self._dead.set()

    async def _next(self) -> tuple[messages.ControlMessage, tuple[int, ...], bool]:
        packet, fds, wakes = await self._inbox.receive()
        self.on_taken()
        while self.frozen:
            await self._continued.park()
        (message,) = messages.unpack(messages.pack([packet]))
        return message, fds, wakes

    async def _deliver(self) -> None:
        """Move messages to the socket, later than they were posted: what was sent through a ring may arrive earlier."""
        while True:
            self._control.deliver(*await self._next())

    def command(self, message: messages.ControlMessage, fds: tuple[int, ...]) -> Command:
        """Return a message as its engine loop takes it. The loop owns the descriptors then."""
        if isinstance(message, messages.Connect):
            self._fds.difference_update(fds)
            ring = Ring.attach(fds, generation=message.generation)
            self.rings.append(ring)
            return AttachRing(message.producer, message.consumer, ring)
        if isinstance(message, messages.CheckpointMemory):
            self._fds.difference_update(fds)
            self._attached.append(AttachCheckpoint(message.request, *fds))
            return self._attached[-1]
        assert isinstance(message, messages.LoopCommand), message
        return message

    async def _run_engine(self, configure: messages.Configure, loop: EngineLoop) -> None:
        """Do what the engine thread of a worker does (``worker.main``), and end the process."""
        try:
            await self._serve(configure, loop)
        except PlannedKill:
            self.kill()
        if self.alive:
            loop.close()
            await trio.lowlevel.checkpoint()
            self.die(exit_code=0 if loop.stopping else 1)

    async def _serve(self, configure: messages.Configure, loop: EngineLoop) -> None:
        await trio.sleep(self.behavior.load_s)
        await self._wait_while_stopped()
        try:
            if self.behavior.fails is not None:
                self._control.send(messages.LoadFailed(self.behavior.fails))
                self.die(exit_code=1)
                return
            context = StageContext(
                stage=configure.spec.address.stage,
                model=None,
                options=configure.spec.options,
                threads=1,
                device="cpu",
                report=lambda note: None,
            )
            engine: StageEngine = pkgutil.resolve_name(configure.spec.factory)(context)
            add_fault_points(engine, self._fault_point)
            loop.calls.establish(engine, configure.desired)
            self.engine = engine
            self._control.add(messages.Ready(self.behavior.load_s))
            self.ready_at = trio.current_time()
            while self.alive and not loop.stopping:
                more, receiving = loop.turn(engine)
                await self._pause(loop, more=more, receiving=receiving)
            if self.alive:
                engine.close()
        except Exception as error:  # noqa: BLE001 - it ends the worker
            self._note(f"{self} {type(error).__name__}: {error}")
            if not self.alive:
                return
            if self.ready_at is not None:
                self.planned_death = None
                self._control.send(messages.EngineFailed(loop.handling, loop.calls.calling))
            elif loop.calls.establishing is not None:
                self.planned_death = None
                self._control.send(messages.LoadFailed(f"{error}", loop.calls.establishing))

    async def _pause(self, loop: EngineLoop, *, more: bool, receiving: bool) -> None:
        """Wait for the duration of a turn and, if no other turn is due, for a doorbell."""
        await trio.sleep(self.behavior.turn_s)
        if not more and (bells := loop.park(receiving=receiving)):
            for bell in bells:
                self._bells.register(bell, select.EPOLLIN)
            try:
                await trio.lowlevel.wait_readable(self._bells)
                loop.woken_by([bell for bell, _ in self._bells.poll(0)])
            finally:
                for bell in bells:
                    self._bells.unregister(bell)
        await self._wait_while_stopped()

    async def _wait_while_stopped(self) -> None:
        while self.frozen or self.blocked:
            await self._continued.park()

    def note(self, text: str) -> None:
        self._note(f"{self} {text}")

    def own(self, fds: tuple[int, ...]) -> None:
        """Close these descriptors with the process, unless they are sent before."""
        self._fds.update(fds)

    def notify(self, message: messages.ControlMessage, fds: tuple[int, ...] = ()) -> None:
        """Send a message to the parent, or die before or after that."""
        self._fault_point()
        if self.loses_pong and isinstance(message, messages.Pong):
            self._note(f"{self} its {message} is lost")
            self.loses_pong, self.hung_at = False, trio.current_time()
            return
        if self.alive and self.fault is None:
            self._fds.difference_update(fds)
            self._reports.send_nowait((message, fds))
        self._fault_point()
        if type(message) is self.dies_of:
            raise PlannedKill

    def _fault_point(self) -> None:
        if self.planned_death is not None:
            fault_points, how = self.planned_death
            if not fault_points:
                raise how
            self.planned_death = fault_points - 1, how

    def free(self) -> None:
        """Do what the kernel does when a process is gone. The supervisor has closed its edges by then. Idempotent."""
        if self._freed:
            return
        self._freed = True
        if self.loop is not None:
            self.loop.close()
        for ring in self.rings:
            ring.close()
        self._fds.update(fd for attached in self._attached if (fd := attached.take()) is not None)
        self._fds.update(fd for _, fds in available(self.incoming) for fd in fds)
        close_all([*self._fds])
        self._bells.close()
        self._control.free()
