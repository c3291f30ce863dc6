"""Starts, watches, restarts and stops the workers of all stages.

Rules
1. One task per incarnation owns a worker, from its spawn until nothing of it is left. The same task handles what
   follows its death by the rules of ``restart``: it stops the replicas that are restarted with it and, after the delay,
   starts them all. So exactly one task restarts each replica; a replica that is down already is left to its own task.
2. Workers are started in the order of the pipeline. None waits for another to be ready, so models load in parallel,
   except onto one device: a worker is spawned when no other one loads onto its devices (``device_locks``).
   Workers are stopped in reverse order, stage by stage: each gets its stage's ``shutdown_timeout_s``, then SIGKILL.
3. A first start that fails with the engine's own exception, or for lack of memory or descriptors, is given up at once,
   so that the caller of ``OmniSystem.open`` gets the reason.
4. A worker that is not ready in time, or whose engine loop makes no progress in time, is killed (``heartbeat``).
5. Events are reported to one listener, in order, by plain calls. Reporting never waits for a worker.
6. A replica that was given up for its intensity is tried again later (``restart``, rule 4). It stays FAILED until a
   new worker is ready, or its stage is woken.
7. A replica that is to be removed gets no new worker, whatever becomes of its last one.
8. Tasks that live on have the context variables of ``run``, not those of the call that started them: what is logged of
   a replica later has nothing to do with the request that added it.
9. Tasks of the supervisor are shielded from KeyboardInterrupt, which is raised in the user's task; its end stops them.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import trio

from omni_actors.config import Stage
from omni_actors.errors import WorkerExit
from omni_actors.platform.device_locks import DeviceBusy
from omni_actors.protocol import messages
from omni_actors.protocol.mailbox import available
from omni_actors.protocol.packets import close_all
from omni_actors.supervisor import client_output, devices, worker_log
from omni_actors.supervisor.deaths import DeathHandler
from omni_actors.supervisor.desired_state import DesiredState, Part
from omni_actors.supervisor.edges import Edges
from omni_actors.supervisor.heartbeat import watch_progress
from omni_actors.supervisor.incarnation import Incarnation, IncarnationEvent, IncarnationState
from omni_actors.supervisor.listener import Listener, ProtocolViolation
from omni_actors.supervisor.process import PlaceLost, Spawner, SpawnFailed, Worker
from omni_actors.supervisor.replica import Replica, ReplicaState

MESSAGES_A_TURN = 16
"""The most messages of one worker that are handled before other tasks run."""


class Supervisor:
    """Runs all replicas of a pipeline until cancelled. When ``run`` returns, every worker is stopped and reaped.

    specs: the workers to run at first.
    stages: the configuration of each stage, in topological order.
    mailbox_capacity: returns how many control messages may wait for one worker before it is killed, from the number of
        all replicas when it starts.
    """

    def __init__(
        self,
        specs: Sequence[messages.WorkerSpec],
        stages: Mapping[str, Stage],
        *,
        edges: Edges,
        spawner: Spawner,
        listener: Listener,
        mailbox_capacity: Callable[[int], int],
    ) -> None:
        self.stages = stages
        self.replicas = {spec.address: Replica(spec, stages[spec.address.stage]) for spec in specs}
        self._generations: dict[messages.Address, int] = {}
        """The last generations of removed replicas."""
        self._edges, self._spawner, self._listener, self._mailbox_capacity = edges, spawner, listener, mailbox_capacity
        self.desired = DesiredState()
        """What the workers of each stage are to have beside requests."""
        self._nursery: trio.Nursery | None = None
        self._context = contextvars.Context()
        """The context variables with which ``run`` was called (rule 8)."""
        self._all_begun = trio.Event()
        """Set when the first incarnation of every replica has begun, or the end has."""
        self.changes = trio.lowlevel.ParkingLot()
        """Woken whenever a replica's state or note changes."""
        self._deaths = DeathHandler(self.replicas, stages, listener, self.changes)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Start all workers and keep them running until cancelled; then stop them."""
        self._context = contextvars.copy_context()
        async with trio.open_nursery() as self._nursery:
            try:
                await self._start(list(self.replicas.values()))
                self._all_begun.set()
                await trio.sleep_forever()
            finally:
                self._nursery = None
                self._all_begun.set()
                with trio.CancelScope(shield=True):
                    await self._stop(self.replicas.values())

    async def stop_stages(self, stages: Collection[str]) -> None:
        """End the workers of some stages, and start none until ``start_stages``. Not cancelled once it has begun."""
        stopped = [each for each in self.replicas.values() if each.address.stage in stages]
        await self._all_begun.wait()
        for each in stopped:
            each.asleep = True
        with trio.CancelScope(shield=True):
            await self._stop(stopped)
        for each in stopped:
            if each.asleep:
                each.state, each.note, each.retry_at = ReplicaState.ASLEEP, "asleep", None
                self._spawner.release(each.address)
        self.changes.unpark_all()

    async def start_stages(self, stages: Collection[str]) -> None:
        """Start workers for the replicas of some stages that ``stop_stages`` has stopped.

        Not cancelled once it has begun: all are awake from then on, so each needs its worker.
        """
        woken = [each for each in self.replicas.values() if each.address.stage in stages and each.asleep]
        for each in woken:
            each.asleep, each.state, each.note = False, ReplicaState.RESTARTING, "waking up"
            each.outage = each.failure = each.retry_at = None
        with trio.CancelScope(shield=True):
            await self._start(woken)

    def add(self, spec: messages.WorkerSpec) -> Replica:
        """Add a replica, whose first worker is started as soon as other tasks have run, unless the supervisor ends."""
        earlier = self._generations.pop(spec.address, 0)
        stage = self.stages[spec.address.stage]
        replica = self.replicas[spec.address] = Replica(spec, stage, added=True, earlier=earlier, generation=earlier)
        if self._nursery is not None:
            self._start_soon(self._nursery, self._start, [replica])
        return replica

    def drain(self, replica: Replica) -> None:
        """Give a replica that is to be removed no new request and no new worker."""
        replica.leaving = True
        if replica.state is ReplicaState.READY:
            replica.state, replica.note = ReplicaState.DRAINING, "draining"
        self.changes.unpark_all()

    def keep(self, replica: Replica) -> None:
        """Give a replica that drains, and has a ready worker, requests again."""
        replica.leaving, replica.state, replica.note = False, ReplicaState.READY, "ready"
        self.changes.unpark_all()

    async def remove(self, replica: Replica, reason: str | None) -> None:
        """Stop a drained replica, and forget it when its worker is reaped. Not cancelled once it has begun.

        reason: why requests that it holds lose their work here, as by a death; None: it holds none.
        """
        incarnation = replica.incarnation
        if reason is not None and not incarnation.over:
            incarnation.stopped_with_another, incarnation.reason = True, incarnation.reason or reason
            incarnation.stop()
        incarnation.scope.cancel()
        with trio.CancelScope(shield=True):
            await incarnation.ended.wait()
        self.forget(replica)

    def forget(self, replica: Replica) -> None:
        """Forget a replica, of which no worker is left."""
        del self.replicas[replica.address]
        self._generations[replica.address] = replica.generation
        self._spawner.release(replica.address)
        self.changes.unpark_all()

    async def _start(self, replicas: Iterable[Replica]) -> None:
        """Start replicas in the given order: each one's spawn has begun before the next one's.

        Those that were started meanwhile, by a restart or a retry, are left alone.
        """
        for each in replicas:
            # No incarnation may begin after the last ``_stop`` has begun: nothing would stop it.
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._nursery is None or each.leaving or not each.incarnation.ended.is_set():
                continue
            each.incarnation = Incarnation()
            each.generation += 1
            self._start_soon(self._nursery, self._run_incarnation, each)
            await each.incarnation.begun.wait()

    def _start_soon(self, nursery: trio.Nursery, task: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a task of the supervisor in the context of ``run`` (rule 8)."""
        self._context.run(nursery.start_soon, task, *args)

    async def _stop(self, replicas: Iterable[Replica]) -> None:
        """Stop what runs of replicas now, in the reverse order of their stages, all replicas of a stage together."""
        running = [(each.address.stage, each.incarnation) for each in replicas]
        for stage in reversed(list(self.stages)):
            incarnations = [incarnation for name, incarnation in running if name == stage]
            for incarnation in incarnations:
                incarnation.scope.cancel()
            for incarnation in incarnations:
                await incarnation.ended.wait()

    # one incarnation

    @trio.lowlevel.enable_ki_protection
    async def _run_incarnation(self, replica: Replica) -> None:
        """Run one incarnation, and handle what follows its end."""
        incarnation = replica.incarnation
        try:
            with incarnation.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(watch_progress, replica)
                    incarnation.begun.set()  # no checkpoint lies between this and the spawn
                    await self._run_worker(replica)
                    nursery.cancel_scope.cancel()
            if incarnation.reason is not None and not incarnation.over:
                self._deaths.report(replica, WorkerExit(None, None, None))  # killed while it was being spawned
        finally:
            died = incarnation.state is IncarnationState.DEAD
            incarnation.advance(IncarnationEvent.END)
        if died and replica.state is ReplicaState.FAILED:
            self._spawner.release(replica.address)
            await self._try_again(replica)
        elif died and not incarnation.stopped_with_another:
            await self._restart(replica)

    async def _restart(self, replica: Replica) -> None:
        """Restart a dead replica, and those that are restarted with it."""
        ended = replica.incarnation
        others = [self.replicas[each] for each in ended.restarts_with if each in self.replicas]  # or was removed since
        others = [each for each in others if each.incarnation.stopped_with_another]  # the rest were woken since
        down = {each: each.incarnation for each in self.replicas.values() if each is replica or each in others}
        await self._stop(others)
        await trio.sleep(ended.delay_s)
        await self._start(
            each
            for each, incarnation in down.items()
            if each.state is not ReplicaState.FAILED and not each.is_kept_down(incarnation)
        )

    async def _try_again(self, replica: Replica) -> None:
        """Start one worker for a replica that was given up, once its time has come."""
        incarnation = replica.incarnation
        if replica.retry_at is not None:
            await trio.sleep_until(replica.retry_at)
            if replica.is_kept_down(incarnation):
                return
            replica.note = "starting again after it was given up"
            await self._start([replica])

    async def _run_worker(self, replica: Replica) -> None:
        """Run a worker from its spawn until it is reaped. If cancelled, stop it."""
        incarnation = replica.incarnation
        try:
            here = await devices.wait_place(self._spawner, replica, self.changes)
            await devices.lock_devices(replica, here)
            capacity = self._mailbox_capacity(len(self.replicas))
            async with devices.spawn(self._spawner, replica, capacity) as worker:
                incarnation.worker = worker
                replica.devices = replica.spec.devices if worker.devices is None else worker.devices
                worker_log.started(replica)
                try:
                    await self._serve(replica, worker)
                finally:
                    if incarnation.over:
                        with trio.CancelScope(shield=True):
                            await worker.wait_dead()  # the successor needs its memory, devices and ring ends
                    else:
                        exit = await self._end(replica, worker)
                        if incarnation.reason is not None:
                            self._report_end(replica, worker, exit)
                    incarnation.worker = None
                    self._edges.disconnect_worker(replica.address)  # not earlier: the process has its ring ends open
        except (SpawnFailed, DeviceBusy) as error:
            incarnation.start_error = error
            if isinstance(error, PlaceLost):
                incarnation.reason = incarnation.reason or str(error)
            else:
                incarnation.load_error = str(error)
            self._deaths.report(replica, WorkerExit(None, None, None, reason=str(error)))
        finally:
            incarnation.device_locks.release()

    async def _end(self, replica: Replica, worker: Worker) -> WorkerExit:
        """Ask a worker to stop, and kill it after ``shutdown_timeout_s``. Kill one that loads: it reads no messages."""
        replica.incarnation.stop()
        if replica.incarnation.ready.is_set():
            replica.post(messages.Stop())
            with trio.move_on_after(replica.stage.shutdown_timeout_s, shield=True):
                await worker.wait_dead()
        worker.kill()
        with trio.CancelScope(shield=True):
            exit = await worker.wait_dead()
        return exit  # noqa: RET504 - a scope may end its block, as far as the type checker knows

    async def _serve(self, replica: Replica, worker: Worker) -> None:
        """Configure and connect a worker, and deliver its messages and outputs until it dies."""
        fence, parts = self._listener.newest_request(), self.desired.parts(replica.address.stage)
        replica.incarnation.parts, desired = parts, tuple(part.desired for part in parts)
        behind = any(each.state is ReplicaState.READY for each in self._deaths.of_stage(replica))
        worker.mailbox.post(messages.Configure(replica.spec, fence, desired, behind))
        try:
            replica.incarnation.output = output = self._edges.connect_worker(replica.spec, replica.post, replica.kill)
        except OSError as error:
            replica.incarnation.load_error = f"its rings cannot be made: {error}"
            worker.kill()
            self._deaths.report(replica, await worker.wait_dead())
            return
        async with trio.open_nursery() as nursery:
            reading = trio.CancelScope()
            nursery.start_soon(worker.cancel_at_end, reading)
            if output is not None:
                nursery.start_soon(client_output.deliver, replica, output, self._listener)
            with reading:
                async for envelope in worker.mailbox.incoming:
                    self._handle(replica, *envelope)
                    for waiting in itertools.islice(available(worker.mailbox.incoming), MESSAGES_A_TURN - 1):
                        self._handle(replica, *waiting)
                if worker.mailbox.fault is not None:
                    replica.kill(worker.mailbox.fault)
                    self.changes.unpark_all()  # it may be dead much later
            exit = await worker.wait_ending()
            replica.incarnation.stop()
            replica.state = ReplicaState.RESTARTING
            self._report_end(replica, worker, exit)
            nursery.cancel_scope.cancel()

    def _report_end(self, replica: Replica, worker: Worker, exit: WorkerExit) -> None:
        """Take what a worker sent before its end, and report the end as a death."""
        incarnation = replica.incarnation
        reason = incarnation.reason
        for message, fds in worker.mailbox.unread():  # such as checkpoints, from which others resume
            self._handle(replica, message, fds)
            if isinstance(message, messages.LoadFailed):
                reason = reason or incarnation.reason
        if incarnation.output is not None:
            client_output.deliver_rest(replica, incarnation.output, self._listener)
        incarnation.reason = reason  # a torn message or chunk of a dead worker is not why it died
        self._edges.close_input(replica.address)  # what waits for room in it goes to the successor now
        self._deaths.report(replica, exit)

    def _handle(self, replica: Replica, message: messages.ControlMessage, fds: tuple[int, ...]) -> None:
        incarnation = replica.incarnation
        if isinstance(message, messages.RequestNotice) and not fds:  # nearly all messages
            try:
                self._listener.on_message(replica.address, message)
            except ProtocolViolation as violation:
                replica.kill(f"protocol error: {violation}")
            return
        match message:
            case messages.CheckpointMemory(request) if len(fds) == 1:
                self._listener.on_checkpoint_memory(replica.address, request, fds[0])
            case _ if fds:
                close_all(fds)
                replica.kill(f"protocol error: {type(message).__name__} with {len(fds)} descriptors")
            case messages.Loading(note):
                replica.note = note
                self.changes.unpark_all()
            case messages.Ready() if any(part.taken_back for part in incarnation.parts):
                replica.kill("a part of its desired state was taken back while it loaded", took_back=True)
            case messages.Ready(load_s) if incarnation.state is IncarnationState.STARTING:
                incarnation.advance(IncarnationEvent.READY)
                incarnation.ready_at = trio.current_time()
                incarnation.device_locks.release()
                replica.state, replica.load_s, replica.note = ReplicaState.READY, load_s, "ready"
                worker_log.ready(replica)
                replica.failure = replica.retry_at = replica.outage = None
                for part in incarnation.parts:
                    part.established = True
                self._listener.on_worker_ready(replica.address)
                self.changes.unpark_all()
            case messages.LoadFailed(error, part):
                self._load_failed(replica, error, part)
            case messages.EngineFailed(request, capability):
                incarnation.failed_request, incarnation.failed_call = request, capability is not None
            case messages.Pong(number, gauges) if number == incarnation.ping:
                incarnation.gauges, incarnation.last_pong_at = gauges, trio.current_time()
                incarnation.pong.set()
            case messages.CallAnswer():
                incarnation.calls.answer(message)

    def _load_failed(self, replica: Replica, error: str, number: int | None) -> None:
        """Note why an engine has not loaded. number: of the part of its desired state at which it raised."""
        incarnation = replica.incarnation
        part = incarnation.parts[number] if number is not None and 0 <= number < len(incarnation.parts) else None
        if part is None or (part.carried_out and not part.taken_back):
            incarnation.load_error = error
        elif part.taken_back or part.is_to_blame(incarnation, self._loading(part)):
            self.desired.take_back(part)
            incarnation.took_back = True
            incarnation.reason = f"{part.desired.capability} is taken out of its desired state: {error}"
        else:
            incarnation.reason = f"{part.desired.capability} of its desired state: {error}"

    def _loading(self, part: Part) -> set[Incarnation]:
        """Return the incarnations whose workers load with this part of the desired state."""
        incarnations = [each.incarnation for each in self.replicas.values()]
        return {each for each in incarnations if each.state is IncarnationState.STARTING and part in each.parts}
