"""The agent: the process of a node that starts, watches and kills the workers there, for a parent on another node.

    parent ── control connection ──► agent ── control sockets ──► workers
                                     pump  ◄── links ──► pumps of other nodes

Rules
1. The agent starts workers with ``LocalSpawner``, as a parent does on its own node. Workers do not know of nodes.
2. Whatever ends the agent ends its workers: they ask the kernel for it (PDEATHSIG).
3. The kernel kills the agent when its lease ends (``kill_timer``). So the workers of a node that cannot reach the
   parent end in time, also when the agent hangs or is stopped.
4. The agent ends when its control connection does. Before the parent has accepted it, it tries again (``joining``). It
   decides nothing: restarts are the parent's.
5. Checkpoints in memory do not leave the node: their descriptors stay here, by number, until the parent needs them no
   more (``remote_checkpoints``). A worker that is started on another node goes on from the journal, or starts over.
6. NIXL is started before the agent joins: its start takes seconds, and from the acceptance on the lease runs.
7. Devices of workers are places among those that the agent sees: on Ray, the ones that Ray has given it.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib.metadata import version
from typing import Annotated, Final

import msgspec
import trio

from omni_actors.cluster import control
from omni_actors.cluster.agent_rings import AgentRings
from omni_actors.cluster.backlog import BacklogReports
from omni_actors.cluster.channel import Tls
from omni_actors.cluster.connection import ROOM, Connection, ConnectionLost
from omni_actors.cluster.joining import JOIN_S, AgentFailed, join
from omni_actors.cluster.lease import RENEWALS, HeldLease
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.tls import Credentials
from omni_actors.cluster.transfers import NixlUnavailable, Transfers, Transport
from omni_actors.config.devices import VISIBLE, NoSuchDevice, at_places
from omni_actors.platform.kill_timer import KillTimer, now
from omni_actors.protocol import messages
from omni_actors.protocol.mailbox import Mailbox, MailboxFull
from omni_actors.protocol.packets import close_all
from omni_actors.supervisor.process import LocalSpawner, SpawnFailed, Worker
from ringbuf import RingStatistics

REPORT_S: Final = 0.5
"""How often the counters of rings are reported while they change."""
LOG_BYTES: Final = ROOM // 2
"""When so much waits to be sent, the workers' log lines are dropped, and counted, until half as much waits. It is less
than ``ROOM``, so that a worker that logs much keeps no other worker's messages waiting."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is started with.

    Attributes:
        number: Its number, by which the parent recognises it.
        parent: Host and port at which the parent accepts control connections.
        host: The node's own IP address, at which the agent accepts links. None: that of its control connection.
        import_path: Where the parent looks for modules, so that workers find the engines that it finds.
        secret: What both sides prove to know.
        lease_s: The length of its lease, in seconds.
        tls: What it uses TLS with, to the parent and on its links; None: it uses none.
        transport: What carries the large records of its links.
    """

    number: int
    parent: tuple[str, int]
    secret: bytes
    lease_s: Annotated[float, msgspec.Meta(gt=0)]
    host: str | None = None
    tls: Credentials | None = None
    transport: Transport = "tcp"
    import_path: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"AgentSettings(number={self.number}, parent={self.parent}, …)"  # a log must not show the secret


async def run_agent(settings: AgentSettings) -> None:
    """Run an agent until its control connection ends. Called in the main thread.

    Cancelling it kills its workers. Raises AgentFailed, OSError (no descriptors).
    """
    sys.path += [each for each in settings.import_path if each not in sys.path]  # workers get what is in it
    with ExitStack() as stack:
        transfers, fault = None, None
        if settings.transport == "nixl":
            try:
                transfers = stack.enter_context(closing(Transfers()))
            except NixlUnavailable as error:
                fault = str(error)
        timer = stack.enter_context(closing(KillTimer()))
        timer.kill_at(now() + JOIN_S + settings.lease_s)
        tls = None if settings.tls is None else settings.tls.contexts()
        connection, own_host = await join(
            settings.parent, settings.secret, settings.number, local_host=settings.host, tls=tls
        )
        try:
            host = settings.host or own_host
            await _Agent(settings, connection, timer).run(host, tls, transfers, fault)
        finally:
            await connection.close()


class _Agent:
    def __init__(self, settings: AgentSettings, connection: Connection[control.ToAgent], timer: KillTimer) -> None:
        self._settings, self._connection, self._timer = settings, connection, timer
        self._lease = HeldLease(settings.lease_s)
        self._spawner = LocalSpawner()
        self._workers: dict[int, Worker] = {}
        self._backlogs: dict[int, BacklogReports] = {}
        """The reports of each worker's backlog, by the worker's number."""
        self._checkpoints: dict[int, int] = {}
        """The descriptor of each memory of checkpoints, by number."""
        self._numbers = itertools.count(1)
        self._rings: AgentRings
        self._ended = trio.CancelScope()

    async def run(self, host: str, tls: Tls | None, transfers: Transfers | None, fault: str | None) -> None:
        """Serve the parent until the connection ends. fault: why this agent cannot be used."""
        token = trio.lowlevel.current_trio_token()

        def on_lost(generation: int, why: str) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._connection.post, control.LinkLost(generation, why))

        pump = Pump(self._settings.secret, host, on_lost, tls, transfers=transfers)
        self._rings = AgentRings(pump)
        log = _Log(self._connection)
        try:
            self._connection.post(
                control.Hello(version=version(control.PACKAGE), pid=os.getpid(), links=pump.address, fault=fault)
            )
            with self._ended:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._renew)
                    nursery.start_soon(self._report, log)
                    await self._serve_orders(nursery)
        finally:
            log.close()
            close_all(list(self._checkpoints.values()))
            self._rings.close_all()
            pump.stop()

    async def _write(self) -> None:
        with suppress(ConnectionLost):
            await self._connection.write()
        self._ended.cancel()

    async def _renew(self) -> None:
        """Ask for renewals until cancelled. The kernel enforces the end of the lease."""
        while True:
            self._connection.post(control.Renew(now(), time.monotonic()))
            await trio.sleep(self._lease.lease_s / RENEWALS)

    async def _report(self, log: _Log) -> None:
        """Report the counters of the rings when they have changed, and lines that were dropped, until cancelled."""
        reported: dict[int, RingStatistics] = {}
        while True:
            if (counters := self._rings.statistics()) != reported:
                self._connection.post(control.Statistics(counters))
                reported = counters
            log.tell_dropped()
            await trio.sleep(REPORT_S)

    async def _serve_orders(self, nursery: trio.Nursery) -> None:
        """Do what the parent says until the connection ends."""
        try:
            while True:
                await self._handle(await self._connection.receive(), nursery)
        except ConnectionLost:
            pass  # the parent has ended, has given this agent up, or cannot be reached
        except control.ControlCorrupted as error:
            print(f"the agent ends: {error}", file=sys.stderr, flush=True)
        self._ended.cancel()

    async def _handle(self, order: control.ToAgent, nursery: trio.Nursery) -> None:
        match order:
            case control.Granted(asked_at):
                if self._lease.granted(asked_at):
                    self._timer.kill_at(self._lease.ends_at)
            case control.Spawn():
                await nursery.start(self._run_worker, order)  # before its first message is handled
            case control.Kill(number):
                if (worker := self._workers.get(number)) is not None:
                    worker.kill()
            case control.ToWorker(number):
                if (worker := self._workers.get(number)) is not None:
                    self._deliver(worker, order)
            case control.DropCheckpoint(memory):
                if (fd := self._checkpoints.pop(memory, None)) is not None:
                    os.close(fd)
            case control.MakeRing():
                self._rings.make(order)
            case control.CloseRing():
                self._rings.close(order)

    def _deliver(self, worker: Worker, order: control.ToWorker) -> None:
        """Pass a packet on to a worker, with descriptors of the rings and checkpoints that it names."""
        try:
            for message in messages.unpack(order.packet):
                fds: Sequence[int] = ()
                if isinstance(message, messages.Connect):
                    fds = self._rings.fds(message.generation)
                elif order.memory in self._checkpoints:
                    fds = (self._checkpoints[order.memory],)
                worker.mailbox.post(message, fds, wakes=order.wakes)
                self._backlogs[order.worker].on_delivered()
        except MailboxFull as error:
            self._connection.post(control.Unusable(order.worker, str(error)))
        except OSError as error:
            self._connection.post(control.Unusable(order.worker, f"its rings cannot be made: {error}"))

    def _backlog_of(self, order: control.Spawn, worker: Worker) -> BacklogReports:
        """Report from now on what a worker's mailbox takes."""
        mailbox, post = worker.mailbox, self._connection.post
        assert isinstance(mailbox, Mailbox)
        backlog = BacklogReports(
            order.mailbox_capacity,
            waiting=lambda: mailbox.waiting,
            report=lambda count: post(control.Taken(order.worker, count)),
        )
        mailbox.on_taken = backlog.on_taken
        return backlog

    async def _run_worker(self, order: control.Spawn, task_status: trio.TaskStatus[None]) -> None:
        """Run a worker until nothing of it is left, and report what becomes of it."""
        number, post = order.worker, self._connection.post
        try:
            environment = _with_own_devices(order.environment)
            async with self._spawner.spawn(order.address, order.mailbox_capacity, environment=environment) as worker:
                self._workers[number] = worker
                self._backlogs[number] = self._backlog_of(order, worker)
                post(control.Spawned(number, worker.pid))
                task_status.started()
                await self._forward(number, worker)
                exit = await worker.wait_ending()
                for message, fds in worker.mailbox.unread():
                    self._forward_one(number, message, fds)
                post(control.Ending(number, exit))
                await worker.wait_dead()
        except (SpawnFailed, NoSuchDevice) as error:
            post(control.NotSpawned(number, str(error)))
            task_status.started()
        else:
            post(control.Dead(number))
        finally:
            self._workers.pop(number, None)
            self._backlogs.pop(number, None)

    async def _forward(self, number: int, worker: Worker) -> None:
        """Send to the parent what a worker sends, until the worker ends or sends what cannot be read."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.cancel_at_end, nursery.cancel_scope)
            async for message, fds in worker.mailbox.incoming:
                self._forward_one(number, message, fds)
                await self._connection.wait_room()
            if worker.mailbox.fault is not None:
                self._connection.post(control.Unusable(number, worker.mailbox.fault))

    def _forward_one(self, number: int, message: messages.ControlMessage, fds: tuple[int, ...]) -> None:
        if isinstance(message, messages.CheckpointMemory) and len(fds) == 1:  # rule 5
            memory = next(self._numbers)
            self._checkpoints[memory] = fds[0]
            self._connection.post(control.CheckpointKept(number, message.request, memory))
        else:
            close_all(fds)
            self._connection.post(control.FromWorker(number, messages.pack([messages.encode(message)])))


def _with_own_devices(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return a worker's variables with devices of this process: the parent names places among them (rule 7).

    Raises NoSuchDevice.
    """
    if (places := environment.get(VISIBLE)) is None:
        return environment
    return {**environment, VISIBLE: ",".join(at_places(places.split(","), os.environ.get(VISIBLE)))}


class _Log(logging.Handler):
    """Sends what the workers write to stderr to the parent, which logs it."""

    def __init__(self, connection: Connection[control.ToAgent]) -> None:
        super().__init__()
        self._connection, self._logger = connection, logging.getLogger("omni_actors.worker")
        self._dropped: Counter[str] = Counter()
        """How many lines, by logger, since the parent was told last."""
        self._before = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.tell_dropped()
        if self._dropped or self._connection.waiting_bytes >= LOG_BYTES:
            self._dropped[record.name] += 1
        else:
            self._connection.post(control.LogLine(record.name, record.getMessage()))

    def tell_dropped(self) -> None:
        """Tell the parent how many lines of each worker were dropped, once there is room again."""
        if self._dropped and self._connection.waiting_bytes <= LOG_BYTES // 2:
            for logger, count in self._dropped.items():
                self._connection.post(control.LogLine(logger, f"[lines dropped here, too many at once: {count}]"))
            self._dropped.clear()

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before[0])
        self._logger.propagate = self._before[1]
        super().close()


def run_in_main_thread(settings: AgentSettings) -> None:
    """Run an agent until its control connection ends. Raises AgentFailed, RuntimeError (not the main thread).

    The kernel ends workers with the *thread* that has started them, so it must be the one that lasts.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("an agent runs in the main thread of its process")
    trio.run(partial(run_agent, settings))


def main() -> None:
    """Run an agent as a process of its own. Its settings are a line of JSON on stdin, so that no list shows them."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=AgentSettings)
    for stop_signal in (signal.SIGINT, signal.SIGTERM):  # which a terminal sends to all processes; the parent ends it
        signal.signal(stop_signal, lambda *_: None)
    try:
        run_in_main_thread(settings)
    except AgentFailed as error:
        sys.exit(f"the agent failed: {error}")


if __name__ == "__main__":
    main()
