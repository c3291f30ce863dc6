"""Keeps every stage's workers running.

Rules
1. One task per incarnation owns a worker, from its spawn to its last trace. What follows its death, by the rule in
   ``restart``, is that task's too: it stops those who go down with it, and starts them all again after the delay.
   So whoever is down is brought back by exactly one task; one who is down already is left to that one.
2. Workers are started in the order of the pipeline, none waits for another to be ready (models load in parallel), and
   stopped in reverse, stage by stage: each gets its stage's ``shutdown_timeout_s``, then SIGKILL.
3. A first start that fails with the engine's own exception, or for want of memory or descriptors, is given up at once:
   who opens the system hears the reason.
4. A worker that is not ready in time, or whose engine loop takes no turn in time, is killed (see ``_watch``).
5. What happens is told to one listener, in order, by plain calls: it never waits on a worker.
6. A replica that was given up for its intensity is tried again later (``restart``, rule 4). It stays FAILED until the
   new worker is ready.
7. The system's own tasks are shielded from KeyboardInterrupt: it is for the user's task, whose end ends them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import trio

from omni_actors.errors import Death, StageFailed, WorkerExit
from omni_actors.protocol.messages import (
    Address,
    Configure,
    ControlMessage,
    EngineFailed,
    Finished,
    InputComplete,
    LoadFailed,
    Loading,
    Ping,
    Pong,
    Ready,
    Refused,
    RequestNotice,
    Started,
    Stop,
    Unreplayable,
)
from omni_actors.supervisor.edges import Edges, receive_frames
from omni_actors.supervisor.process import Spawner, SpawnFailed, Worker
from omni_actors.supervisor.replica import Blueprint, Incarnation, Replica, ReplicaState
from omni_actors.supervisor.restart import RestartPolicy, downstream_stages
from ringbuf import Consumer, RingClosed, RingError

__all__ = ["Blueprint", "Listener", "Replica", "ReplicaState", "RestartPolicy", "Supervisor"]

NOT_STARTED = 127
"""Exit code of a worker that never was, as a shell gives it; its pid is 0."""
PARTS = 20
"""A ping every twentieth of ``step_timeout_s``, so that a hang is seen within 1.05 times that."""


class Listener(Protocol):
    """Who is told. Calls are synchronous and must not block."""

    def newest_request(self) -> int:
        """The highest request number given out so far: the fence of a new incarnation."""
        ...

    def on_worker_ready(self, address: Address) -> None: ...
    def on_worker_died(self, address: Address, exit: WorkerExit, failed_request: int | None) -> bool:
        """A worker died: find the requests that may have caused it. ``on_worker_lost`` follows.

        failed_request: the request for which the engine's call raised, if the worker could tell. Returns whether the
        death counts against the stage's restart intensity.
        """
        ...

    def on_worker_lost(self, address: Address, generation: int, exit: WorkerExit) -> None:
        """It is dead, all that it said was heard; its edges are still to be closed."""
        ...

    def on_stage_failed(self, failure: StageFailed) -> None: ...
    def on_message(self, address: Address, message: RequestNotice) -> None: ...
    def on_output(self, address: Address, data: memoryview) -> None:
        """A chunk on the worker's output edge: a view, valid during the call."""
        ...


class Supervisor:
    """Runs all replicas of a pipeline until cancelled; leaving ``run`` has stopped and reaped every one.

    blueprints: in topological order of their stages.
    """

    def __init__(
        self, blueprints: Sequence[Blueprint], edges: Edges, spawner: Spawner, listener: Listener, mailbox_capacity: int
    ) -> None:
        self.replicas = {blueprint.address: Replica(blueprint) for blueprint in blueprints}
        self._inputs = {blueprint.address.stage: blueprint.inputs for blueprint in blueprints}
        self._edges, self._spawner, self._listener, self._mailbox_capacity = edges, spawner, listener, mailbox_capacity
        self._nursery: trio.Nursery | None = None
        self.changes = trio.lowlevel.ParkingLot()
        """Woken whenever a replica's state or note changes."""

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            try:
                await self._start(self.replicas.values())
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await self._stop(self.replicas.values())

    async def _start(self, replicas: Iterable[Replica]) -> None:
        """In order of the pipeline: each is being spawned when the next one's turn comes."""
        assert self._nursery is not None, "it runs"
        for each in replicas:
            # A life that begins when ``_stop`` has passed is never ended.
            await trio.lowlevel.checkpoint_if_cancelled()
            each.life = Incarnation()
            each.generation += 1
            self._nursery.start_soon(self._live, each)
            await each.life.begun.wait()

    async def _stop(self, replicas: Iterable[Replica]) -> None:
        """In reverse order of the pipeline, the replicas of a stage at once."""
        by_stage = [list(group) for _, group in itertools.groupby(replicas, lambda each: each.address.stage)]
        for group in reversed(by_stage):
            for each in group:
                each.life.scope.cancel()
            for each in group:
                await each.life.ended.wait()

    # one incarnation

    @trio.lowlevel.enable_ki_protection
    async def _live(self, replica: Replica) -> None:
        """One incarnation, and what follows from its end."""
        life = replica.life
        try:
            with life.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, replica)
                    life.begun.set()  # no checkpoint lies between this and the spawn
                    await self._spawn(replica)
                    nursery.cancel_scope.cancel()
            if life.reason is not None and not life.dead:
                self._lost(replica, WorkerExit(0, None, NOT_STARTED))  # it was still being spawned
        finally:
            life.ended.set()
        if life.dead and replica.state is ReplicaState.FAILED:
            await self._try_again(replica)
        elif life.dead and not life.went_with_another:
            await self._recover(replica)

    async def _recover(self, replica: Replica) -> None:
        """Bring it back, and those that went down with it."""
        others = replica.life.takes_down
        await self._stop(others)
        await trio.sleep(replica.life.delay_s)
        down = [replica, *others]
        await self._start(
            each for each in self.replicas.values() if each in down and each.state is not ReplicaState.FAILED
        )

    async def _try_again(self, replica: Replica) -> None:
        """Start one worker for a replica that was given up, when its time has come."""
        if replica.retry_at is not None:
            await trio.sleep_until(replica.retry_at)
            replica.note = "starting again after it was given up"
            await self._start([replica])

    def _others(self, replica: Replica) -> list[Replica]:
        """Who goes down with it. One that is down already comes back after it anyway."""
        living = [each for each in self.replicas.values() if not each.life.leaving]
        strategy = replica.blueprint.restart.strategy
        if strategy == "one_for_all":
            return living
        below = downstream_stages(replica.address.stage, self._inputs) if strategy == "rest_for_one" else set()
        return [each for each in living if each.address.stage in below]

    async def _spawn(self, replica: Replica) -> None:
        """A worker, from spawn to reaping. Cancelled: stops it, by SIGKILL after ``shutdown_timeout_s``."""
        life = replica.life
        try:
            async with self._spawner.spawn(replica.address, self._mailbox_capacity) as worker:
                life.worker = worker
                try:
                    await self._serve(replica, worker)
                finally:
                    if life.dead:
                        with trio.CancelScope(shield=True):
                            await worker.wait_dead()  # what follows needs it gone: its memory, its devices, its ends
                    else:
                        exit = await self._end(replica, worker)
                        if life.reason is not None:
                            self._lost(replica, exit)
                    life.worker = None
                    self._edges.disconnect_worker(
                        replica.address
                    )  # only now: nobody else holds the ends that it closes
        except SpawnFailed as error:
            life.load_error = str(error)
            self._lost(replica, WorkerExit(0, None, NOT_STARTED, (str(error),)))

    async def _end(self, replica: Replica, worker: Worker) -> WorkerExit:
        replica.life.leaving = True
        replica.post(Stop(replica.blueprint.shutdown_timeout_s))
        with trio.move_on_after(replica.blueprint.shutdown_timeout_s, shield=True):
            await worker.wait_dead()
        worker.kill()
        with trio.CancelScope(shield=True):
            exit = await worker.wait_dead()
        return exit  # noqa: RET504 - a scope may end its block, as far as the type checker knows

    async def _serve(self, replica: Replica, worker: Worker) -> None:
        """Configure a worker, connect it, hear it, until it dies."""
        blueprint = replica.blueprint
        worker.mailbox.post(
            Configure(
                blueprint.address,
                replica.generation,
                blueprint.factory,
                blueprint.model,
                blueprint.options,
                blueprint.threads,
                blueprint.nice,
                blueprint.device,
                blueprint.spins,
                self._listener.newest_request(),
            )
        )
        try:
            output = self._edges.connect_worker(replica.address, replica.post, replica.kill)
        except OSError as error:
            replica.life.load_error = f"no memory for its rings: {error}"
            worker.kill()
            self._lost(replica, await worker.wait_dead())
            return
        # Whom only stages feed has nothing to do before they have something for it.
        worker.mailbox.delay_delivery = replica.address not in self._edges.inputs
        async with trio.open_nursery() as nursery:
            hearing = trio.CancelScope()
            nursery.start_soon(self._end_hearing, worker, hearing)
            if output is not None:
                nursery.start_soon(self._read_output, replica, output)
            with hearing:
                async for message, _ in worker.mailbox.incoming:
                    self._take(replica, message)
                if worker.mailbox.fault is not None:
                    replica.kill(worker.mailbox.fault)
            exit = await worker.wait_ending()
            replica.state, replica.life.leaving = ReplicaState.RESTARTING, True
            for message in worker.mailbox.unread():  # what it said before it died
                self._take(replica, message)
            if output is not None:
                self._read_rest(replica, output)
            self._lost(replica, exit)
            nursery.cancel_scope.cancel()

    @trio.lowlevel.enable_ki_protection
    async def _end_hearing(self, worker: Worker, hearing: trio.CancelScope) -> None:
        await worker.wait_ending()
        hearing.cancel()

    def _take(self, replica: Replica, message: ControlMessage) -> None:
        life = replica.life
        match message:
            case Loading(note):
                replica.note = note
                self.changes.unpark_all()
            case Ready(load_s) if not life.leaving:
                life.ready.set()
                life.ready_at = trio.current_time()
                replica.state, replica.load_s, replica.note = ReplicaState.READY, load_s, "ready"
                replica.failure = replica.retry_at = None
                self._listener.on_worker_ready(replica.address)
                self.changes.unpark_all()
            case LoadFailed(error):
                life.load_error = error
            case EngineFailed(request):
                life.failed_request = request
            case Pong(number, gauges) if number == life.ping:
                life.gauges, life.last_pong_at = gauges, trio.current_time()
                life.pong.set()
            case Started() | InputComplete() | Finished() | Refused() | Unreplayable():
                self._listener.on_message(replica.address, message)

    @trio.lowlevel.enable_ki_protection
    async def _read_output(self, replica: Replica, consumer: Consumer) -> None:
        try:
            async for frame in receive_frames(consumer):
                with frame:
                    if replica.life.dead:
                        return  # what it said was read to the end; who dies a little later than its main thread may add
                    self._listener.on_output(replica.address, frame.data)
        except RingError as error:
            replica.kill(f"{type(error).__name__}: {error}")

    def _read_rest(self, replica: Replica, consumer: Consumer) -> None:
        """What lies in the ring of a dead worker: it may have said that it had finished."""
        try:
            while (frame := consumer.try_recv()) is not None:
                with frame:
                    self._listener.on_output(replica.address, frame.data)
        except RingClosed:
            pass  # it had closed it, and that was all
        except RingError as error:
            replica.kill(f"{type(error).__name__}: {error}")

    @trio.lowlevel.enable_ki_protection
    async def _watch(self, replica: Replica) -> None:
        """Kill a worker that is not ready in ``load_timeout_s``, or takes no turn of its loop in ``step_timeout_s``.

        One ping is under way at a time, and a loop that sleeps answers at once: a hang is seen when the ping that
        follows it has waited ``step_timeout_s``.
        """
        blueprint, life = replica.blueprint, replica.life
        if not await _set_within(blueprint.load_timeout_s, life.ready):
            replica.kill(f"not loaded within {blueprint.load_timeout_s:g} s (load_timeout_s)")
            return
        while True:
            life.ping += 1
            life.pong = trio.Event()
            replica.post(Ping(life.ping))
            if not await _set_within(blueprint.step_timeout_s, life.pong):
                replica.kill(f"no progress for {blueprint.step_timeout_s:g} s (step_timeout_s)")
                return
            await trio.sleep(blueprint.step_timeout_s / PARTS)

    # its end

    def _lost(self, replica: Replica, exit: WorkerExit) -> None:
        """Its death, once: what follows is decided, and told."""
        life, now = replica.life, trio.current_time()
        exit = replace(exit, reason=life.reason)
        replica.history.append(Death(replica.generation, time.time(), exit))
        life.leaving = life.dead = True
        counts = life.went_with_another or self._listener.on_worker_died(replica.address, exit, life.failed_request)
        why = self._why_given_up(replica, exit, now, counts=counts)
        if why is None and not life.went_with_another:
            life.delay_s = replica.blueprint.restart.delay_s(replica.recent.count(now, served=life.ready.is_set()))
            if counts:
                replica.recent.add(now)
            life.takes_down = self._others(replica)
            for each in life.takes_down:  # before the death is told: nothing is to be sent to them any more
                each.state, each.life.leaving, each.life.went_with_another = ReplicaState.RESTARTING, True, True
                each.life.reason = (
                    f"restarted with stage {replica.address.stage!r} ({replica.blueprint.restart.strategy})"
                )
        replica.state, replica.note = ReplicaState.RESTARTING if why is None else ReplicaState.FAILED, str(exit)
        if why is not None:
            self._plan_retry(replica, exit, now)
        self.changes.unpark_all()
        self._listener.on_worker_lost(replica.address, replica.generation, exit)
        if why is not None:
            replica.failure = StageFailed(replica.address.stage, replica.address.replica, why, replica.history)
            self._listener.on_stage_failed(replica.failure)

    def _why_given_up(self, replica: Replica, exit: WorkerExit, now: float, *, counts: bool) -> str | None:
        policy, life = replica.blueprint.restart, replica.life
        if life.went_with_another:
            return f"{exit}; it is temporary" if policy.type == "temporary" else None
        if _cannot_load(replica):
            return life.load_error
        if never := policy.why_never(exit):
            return never
        recent = replica.recent.count(now, served=life.ready.is_set())
        if recent < policy.intensity or not counts:
            return None
        limit = f"intensity {policy.intensity} within {policy.period_s:g} s"
        return f"{life.load_error or exit}; {recent} restarts were tried ({limit})"

    def _plan_retry(self, replica: Replica, exit: WorkerExit, now: float) -> None:
        """Set when a replica that was given up is tried again."""
        policy, life = replica.blueprint.restart, replica.life
        replica.retry_at = None
        if life.ready.is_set() and now - life.ready_at > policy.period_s:
            replica.failed_tries = 0
        if life.went_with_another or _cannot_load(replica) or policy.why_never(exit):
            return
        delay_s = policy.retry_delay_s(replica.failed_tries)
        replica.retry_at = None if delay_s is None else now + delay_s
        replica.failed_tries += 1


def _cannot_load(replica: Replica) -> bool:
    """Whether its very first worker failed to load: the one that opens the system is told so."""
    return replica.life.load_error is not None and replica.generation == 1


async def _set_within(patience_s: float, event: trio.Event) -> bool:
    """Whether ``event`` comes within so many seconds of this process's own attention.

    Where this process itself stood still (a caller that computes, SIGSTOP), that counts as one part of ``PARTS`` at
    the most: what the worker said meanwhile is still unread.
    """
    for _ in range(PARTS):
        with trio.move_on_after(patience_s / PARTS):
            await event.wait()
            return True
    return False
