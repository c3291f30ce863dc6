"""A supervisor with simulated workers behind the Spawner interface, and time by trio's mock clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio
import trio.testing

from omni_actors.config import Restart, Stage
from omni_actors.errors import StageFailed, WorkerExit
from omni_actors.protocol.messages import (
    Address,
    Bounds,
    Configure,
    ControlMessage,
    Finished,
    Ping,
    Pong,
    Ready,
    StageStats,
    Stop,
    WorkerSpec,
)
from omni_actors.protocol.packets import Envelope
from omni_actors.supervisor.edges import Edges
from omni_actors.supervisor.process import SpawnFailed, Worker
from omni_actors.supervisor.replica import ReplicaState
from omni_actors.supervisor.supervisor import Supervisor
from ringbuf import Ring

DIAMOND = {"ear": (), "mind": ("ear",), "eye": (), "voice": ("mind",), "face": ("mind", "eye")}
"""Stages and their inputs, in topological order."""
POLICY = Restart(intensity=3, period_s=60.0, backoff_s=1.0, backoff_max_s=8.0)
FINISHED = Finished(7, StageStats(stage="mind", started=0.0, finished=0.0, step_s=0.0, chunks=0, sent_bytes={}))


class SimulatedWorker(Worker):
    """Loads for ``load_s``, answers pings after ``turn_s``, and stops at ``Stop``; while ``wedged`` it does nothing."""

    def __init__(self, address: Address, pid: int, log: Callable[[str, Address], None], nursery: trio.Nursery) -> None:
        super().__init__(pid, self)
        self.address, self._log, self._nursery = address, log, nursery
        self._messages, self.incoming = trio.open_memory_channel[Envelope](math.inf)
        self.fault = None
        self.load_s, self.turn_s, self.wedged = 0.0, 0.0, False
        self.behind: bool | None = None
        """Whether it was told to load behind another worker of its stage."""

    @property
    def alive(self) -> bool:
        return self._exit is None

    def post(self, message: ControlMessage, fds: Sequence[int] = (), *, wakes: bool = True) -> None:
        match message:
            case Configure():
                self.behind = message.behind
                self._nursery.start_soon(self._later, self.load_s, Ready(self.load_s))
            case Ping(number):
                self._nursery.start_soon(self._later, self.turn_s, Pong(number))
            case Stop() if not self.wedged:
                self._log("stop", self.address)
                self.die(exit_code=0)

    async def _later(self, delay_s: float, message: ControlMessage) -> None:
        await trio.sleep(delay_s)
        if self.alive and not self.wedged:
            self.send(message)

    def send(self, message: ControlMessage) -> None:
        self._messages.send_nowait((message, ()))

    def kill(self) -> None:
        if self.alive:
            self._log("kill", self.address)
            self.die(signal="SIGKILL")

    def die(self, signal: str | None = None, exit_code: int | None = None) -> None:
        self._exit = WorkerExit(self.pid, signal, exit_code)
        self._messages.close()
        self._ending.set()
        self._dead.set()

    def unread(self) -> Iterator[Envelope]:
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                yield self.incoming.receive_nowait()


class SimulatedSystem:
    """A supervisor with simulated workers. It is spawner and listener, and logs every event with its time."""

    def __init__(self, inputs: Mapping[str, tuple[str, ...]], replicas: int = 1, **stages: Any) -> None:
        """stages: configuration of stages by name, where it differs from the default."""
        self.log: list[tuple[float, str, str]] = []
        self.living: dict[Address, SimulatedWorker] = {}
        self.exits: list[WorkerExit] = []
        self.failures: list[StageFailed] = []
        self.failed_requests: list[int | None] = []
        self.counts = True
        """Whether deaths count against the restart intensity."""
        self.held_by_next = 0
        """How many requests the next worker to die holds."""
        self.ended_with_stage = 0
        """What ``on_stage_failed`` returns."""
        self.unspawnable: set[str] = set()
        self.released = list[Address]()
        self.unplaceable: dict[Address, str] = {}
        """Why workers cannot be placed, until ``places`` is unparked."""
        self.places = trio.lowlevel.ParkingLot()
        self.prepare: Callable[[SimulatedWorker], None] = lambda worker: None
        """Called with every new worker."""
        self._pids = itertools.count(1)
        self.supervisor = Supervisor(
            [
                WorkerSpec(address=Address(name, replica), factory="", bounds=Bounds(0, 0))
                for name in inputs
                for replica in range(replicas)
            ],
            {
                name: Stage(**({"engine": "echo", "inputs": sources, "restart": POLICY} | stages.get(name, {})))
                for name, sources in inputs.items()
            },
            edges=Edges([], self),
            spawner=self,
            listener=self,
            mailbox_capacity=lambda replicas: 8,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SimulatedSystem]:
        """Run the supervisor for the block, which begins when all replicas are ready."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.supervisor.run)
            await self.settle()
            yield self
            nursery.cancel_scope.cancel()

    async def settle(self) -> None:
        """Wait until all replicas serve or are given up."""
        while any(r.state not in (ReplicaState.READY, ReplicaState.FAILED) for r in self.supervisor.replicas.values()):
            await self.supervisor.changes.park()

    def worker(self, stage: str, replica: int = 0) -> SimulatedWorker:
        return self.living[Address(stage, replica)]

    def logged(self, *kinds: str) -> list[str]:
        """Return the addresses of all events of these kinds, in order."""
        return [name for _, kind, name in self.log if kind in kinds]

    def generations(self) -> dict[str, int]:
        return {str(address): replica.generation for address, replica in self.supervisor.replicas.items()}

    def _note(self, kind: str, address: Address) -> None:
        self.log.append((trio.current_time(), kind, str(address)))

    # the Spawner

    @asynccontextmanager
    async def spawn(self, address: Address, mailbox_capacity: int, **inherited: Any) -> AsyncIterator[Worker]:
        self._note("spawn", address)
        assert address not in self.living, f"two workers of {address}"
        if address.stage in self.unspawnable:
            raise SpawnFailed(f"no process for {address}")
        async with trio.open_nursery() as nursery:
            worker = self.living[address] = SimulatedWorker(address, next(self._pids), self._note, nursery)
            self.prepare(worker)
            try:
                yield worker
            finally:
                assert not worker.alive, "its block is left while it is alive"
                del self.living[address]
                nursery.cancel_scope.cancel()

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> None:
        while (reason := self.unplaceable.get(address)) is not None:
            on_waiting(reason)
            await self.places.park()

    def release(self, address: Address) -> None:
        self.released.append(address)

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> Ring:
        raise AssertionError("there are no edges")

    # the Listener

    def newest_request(self) -> int:
        return 0

    def was_standby(self, address: Address) -> bool:
        return False

    def on_worker_ready(self, address: Address) -> None:
        self._note("ready", address)

    def on_worker_died(self, address: Address, exit: WorkerExit, failed_request: int | None) -> bool:
        self.failed_requests.append(failed_request)
        return self.counts

    def on_worker_lost(self, address: Address, generation: int, exit: WorkerExit, at: float) -> int:
        self._note("lost", address)
        self.exits.append(exit)
        held, self.held_by_next = self.held_by_next, 0
        return held

    def on_stage_failed(self, failure: StageFailed) -> int:
        self.failures.append(failure)
        return self.ended_with_stage

    def on_message(self, address: Address, message: ControlMessage) -> None:
        self._note("message", address)

    def on_checkpoint_memory(self, address: Address, request: int, memory_fd: int) -> None:
        self._note("checkpoint memory", address)

    def on_output(self, address: Address, data: memoryview) -> None:
        raise AssertionError("there are no edges")
