"""Keeps every stage's workers running.

Rules
1. One task per replica owns its worker: what belongs to an incarnation lives in a nursery that ends with it.
2. Restarts are counted as in Erlang/OTP: more than ``intensity`` of them within ``period_s`` and the stage is given up.
   A failed start counts. A first start that fails with the engine's own exception is given up at once: it would again.
3. What happens is told to one listener, in order, by plain calls: it never waits on a worker.
4. The system's own tasks are shielded from KeyboardInterrupt: it is for the user's task, whose end ends them.
"""

from __future__ import annotations

import collections
import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import trio

from omni_actors.actor.edges import Edges, receive_frames
from omni_actors.actor.mailbox import Mailbox, MailboxFull
from omni_actors.actor.process import Spawner, SpawnFailed, Worker
from omni_actors.errors import StageFailed, WorkerExit
from omni_actors.messages import Address, Configure, Finished, LoadFailed, Loading, Message, Ready, Refused, Stop
from ringbuf import Consumer, RingError

LAST_WORDS_S = 0.5
NOT_STARTED = 127
"""Exit code of a worker that never was, as a shell gives it; its pid is 0."""


class State(enum.Enum):
    """loading: first start. ready: serving. restarting: down, coming back. failed: given up."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True)
class RestartPolicy:
    """More than ``intensity`` restarts within ``period_s`` give the stage up; delays double from ``backoff_s``."""

    intensity: int
    period_s: float
    backoff_s: float
    backoff_max_s: float

    def delay_s(self, recent: int) -> float:
        """Before the restart that follows ``recent`` others: exponential, with jitter so that replicas spread."""
        bounded = min(self.backoff_max_s, self.backoff_s * 2.0 ** min(recent, 64))
        return bounded * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Blueprint:
    """Everything needed to start one replica of a stage."""

    address: Address
    factory: str
    model: str | None
    options: dict[str, Any]
    threads: int
    device: str
    spins: bool
    restart: RestartPolicy
    shutdown_s: float


@dataclass
class Replica:
    """A replica over all its incarnations, as the supervisor knows it."""

    blueprint: Blueprint
    state: State = State.LOADING
    generation: int = 0
    note: str = "starting"
    load_s: float | None = None
    worker: Worker | None = None
    dead: bool = False
    """Whether the worker of this incarnation has ended; what it said before may still come in."""
    load_error: str | None = None
    fault: str | None = None
    """What the worker put on its output edge that made no sense; it is killed for it."""
    failure: StageFailed | None = None
    exits: collections.deque[WorkerExit] = field(default_factory=lambda: collections.deque(maxlen=16))

    @property
    def address(self) -> Address:
        return self.blueprint.address

    @property
    def restarts(self) -> int:
        return max(0, self.generation - 1)

    def post(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Tell the worker. One that has stopped reading is killed: it comes back, its requests fail with the cause."""
        if self.worker is not None:
            try:
                self.worker.mailbox.post(message, fds)
            except MailboxFull:
                self.worker.kill()


class Listener(Protocol):
    """Who is told. Calls are synchronous and must not block."""

    def newest_request(self) -> int:
        """The highest request number given out so far: the fence of a new incarnation."""
        ...

    def worker_ready(self, address: Address) -> None: ...
    def worker_lost(self, address: Address, generation: int, exit: WorkerExit) -> None: ...
    def stage_failed(self, failure: StageFailed) -> None: ...
    def heard(self, address: Address, message: Finished | Refused) -> None: ...
    def received(self, address: Address, data: memoryview) -> None:
        """A chunk on the worker's output edge: a view, valid during the call."""
        ...


class Supervisor:
    """Runs all replicas of a pipeline until cancelled; leaving ``run`` has stopped and reaped every one."""

    def __init__(
        self, blueprints: Sequence[Blueprint], edges: Edges, spawner: Spawner, listener: Listener, mailbox_capacity: int
    ) -> None:
        self.replicas = {blueprint.address: Replica(blueprint) for blueprint in blueprints}
        self._edges, self._spawner, self._listener, self._mailbox_capacity = edges, spawner, listener, mailbox_capacity
        self.changes = trio.lowlevel.ParkingLot()
        """Woken whenever a replica's state or note changes."""

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for replica in self.replicas.values():
                nursery.start_soon(self._keep_running, replica)

    @trio.lowlevel.enable_ki_protection
    async def _keep_running(self, replica: Replica) -> None:
        policy = replica.blueprint.restart
        restarts: collections.deque[float] = collections.deque()
        while True:
            replica.generation += 1
            exit = await self._live_once(replica)
            if replica.fault is not None:
                exit = replace(exit, stderr_tail=(*exit.stderr_tail, replica.fault))
            replica.exits.append(exit)
            now = trio.current_time()
            while restarts and restarts[0] < now - policy.period_s:
                restarts.popleft()
            reason = _give_up_reason(replica, len(restarts))
            replica.state = State.RESTARTING if reason is None else State.FAILED
            replica.note = str(exit)
            self.changes.unpark_all()
            self._listener.worker_lost(replica.address, replica.generation, exit)
            if reason is not None:
                stage, number = replica.address.stage, replica.address.replica
                replica.failure = StageFailed(stage, number, reason, replica.exits)
                self.changes.unpark_all()
                self._listener.stage_failed(replica.failure)
                return
            await trio.sleep(policy.delay_s(len(restarts)))
            restarts.append(now)

    async def _live_once(self, replica: Replica) -> WorkerExit:
        """One incarnation, from spawn to death. Cancelled: stops the worker, by SIGKILL after ``shutdown_s``."""
        replica.load_error, replica.fault, replica.dead = None, None, False
        try:
            async with self._spawner.spawn(replica.address, self._mailbox_capacity) as worker:
                return await self._live_in(replica, worker)
        except SpawnFailed as error:
            replica.state, replica.load_error = State.RESTARTING, str(error)
            return WorkerExit(0, None, NOT_STARTED, (str(error),))

    async def _live_in(self, replica: Replica, worker: Worker) -> WorkerExit:
        blueprint = replica.blueprint
        replica.worker = worker
        try:
            worker.mailbox.post(
                Configure(
                    blueprint.address,
                    replica.generation,
                    blueprint.factory,
                    blueprint.model,
                    blueprint.options,
                    blueprint.threads,
                    blueprint.device,
                    blueprint.spins,
                    self._listener.newest_request(),
                )
            )
            try:
                output = self._edges.join(replica.address, replica.post)
            except OSError as error:
                replica.load_error = f"no memory in /dev/shm for its rings: {error}"
                worker.kill()
                return await worker.wait_dead()
            return await self._attend(replica, worker, output)
        finally:
            replica.post(Stop(blueprint.shutdown_s))
            with trio.move_on_after(blueprint.shutdown_s, shield=True):
                await worker.wait_dead()
            worker.kill()
            with trio.CancelScope(shield=True):
                await worker.wait_dead()
            replica.worker = None
            self._edges.leave(replica.address)  # only now: nobody else holds the ends that it closes

    async def _attend(self, replica: Replica, worker: Worker, output: Consumer | None) -> WorkerExit:
        async with trio.open_nursery() as nursery:
            all_heard = trio.Event()
            nursery.start_soon(self._hear, replica, worker.mailbox, all_heard)
            if output is not None:
                nursery.start_soon(self._read_output, replica, output)
            exit = await worker.wait_dead()
            replica.dead, replica.state = True, State.RESTARTING  # nothing more is dispatched to it
            with trio.move_on_after(LAST_WORDS_S):  # what it said before it died
                await all_heard.wait()
            nursery.cancel_scope.cancel()
        return exit

    @trio.lowlevel.enable_ki_protection
    async def _hear(self, replica: Replica, mailbox: Mailbox, all_heard: trio.Event) -> None:
        async for message, _ in mailbox.incoming:
            match message:
                case Loading(note):
                    replica.note = note
                case Ready(load_s) if not replica.dead:
                    replica.state, replica.load_s, replica.note = State.READY, load_s, "ready"
                    self._listener.worker_ready(replica.address)
                case LoadFailed(error):
                    replica.load_error = error
                case Finished() | Refused():
                    self._listener.heard(replica.address, message)
            self.changes.unpark_all()
        all_heard.set()

    @trio.lowlevel.enable_ki_protection
    async def _read_output(self, replica: Replica, consumer: Consumer) -> None:
        try:
            async for frame in receive_frames(consumer):
                with frame:
                    self._listener.received(replica.address, frame.data)
        except RingError as error:
            replica.fault = f"{type(error).__name__}: {error}"
            if replica.worker is not None:
                replica.worker.kill()


def _give_up_reason(replica: Replica, recent_restarts: int) -> str | None:
    if replica.load_error is not None and replica.generation == 1:
        return replica.load_error
    policy = replica.blueprint.restart
    if recent_restarts < policy.intensity:
        return None
    return (
        f"{replica.load_error or replica.exits[-1]}; "
        f"{recent_restarts} restarts within {policy.period_s:g} s were tried (intensity {policy.intensity})"
    )
