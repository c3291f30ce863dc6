"""Starts simulated workers, through the interface by which the supervisor starts processes."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from omni_actors.protocol.messages import Address
from omni_actors.stress.simulation.worker import Note, OnStart, SimulatedWorker, WorkerBehavior
from omni_actors.supervisor.process import Worker
from ringbuf import Ring


class SimulatedSpawner:
    """Starts workers as tasks of this process.

    behavior: gives the behavior of the next worker at an address; raises SpawnFailed if none is to start.
    """

    def __init__(self, behavior: Callable[[Address, int], WorkerBehavior], note: Note) -> None:
        self._behavior, self._note = behavior, note
        self._pids = itertools.count(1)
        self._refused: Address | None = None
        self.workers: list[SimulatedWorker] = []
        """All workers so far."""
        self.living: dict[Address, SimulatedWorker] = {}
        self._rings: list[Ring] = []
        self.on_start: OnStart = lambda address, message: None
        """As in its workers."""

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> None:
        """There is one machine, and it has a place for every worker."""

    @asynccontextmanager
    async def spawn(self, address: Address, mailbox_capacity: int, **inherited: Any) -> AsyncIterator[Worker]:
        pid = next(self._pids)
        behavior = self._behavior(address, pid)
        worker = SimulatedWorker(
            address=address, pid=pid, behavior=behavior, mailbox_capacity=mailbox_capacity, note=self._note
        )
        worker.on_start = self.on_start
        self._note(f"{worker} is spawned: {behavior}")
        self._refused = address if behavior.refused else None
        self.living[address] = worker
        self.workers.append(worker)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.run)
                try:
                    yield worker
                finally:
                    worker.kill()
                    with trio.CancelScope(shield=True):
                        await worker.wait_dead()
        finally:
            del self.living[address]
            worker.free()

    @property
    def congested(self) -> set[str]:
        """The stages with a congested worker."""
        return {address.stage for address, worker in self.living.items() if worker.congested}

    def release(self, address: Address) -> None:
        """Do nothing: there is one machine."""

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> Ring:
        if self._refused in (producer, consumer):
            self._refused = None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        ring = Ring.create(capacity, generation=generation)
        self._rings.append(ring)
        return ring

    def all_rings(self) -> Iterator[Ring]:
        """Every mapping of a ring, the parent's and the workers'."""
        yield from self._rings
        for worker in self.workers:
            yield from worker.rings
