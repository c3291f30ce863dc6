"""Injects faults into the simulated workers of a schedule, and records which deaths they explain."""

from __future__ import annotations

import random
from collections.abc import Callable

import trio

from omni_actors.protocol import messages
from omni_actors.protocol.messages import Address
from omni_actors.stress.report import Timing
from omni_actors.stress.simulation.cluster import SimulatedCluster
from omni_actors.stress.simulation.fault_points import PlannedEngineError, PlannedKill
from omni_actors.stress.simulation.journal import LOAD, Journal
from omni_actors.stress.simulation.scenarios import LOAD_S, STEP_S
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import SimulatedWorker, WorkerBehavior
from omni_actors.supervisor.process import SpawnFailed
from omni_actors.system.sleep import SLEEP_TIMEOUT_S

DETECTED_WITHIN = 1.1
"""A hang is detected within this many times its timeout."""
DYING_S = 0.3
ABOUT_REPLAYS = (
    *(messages.Switch, messages.JournalPart, messages.Switched, messages.Start, messages.Started, messages.Resend),
    *(messages.InputComplete, messages.Finished),
)
START_FAULTS = ("slow start", "no process", "failed start", "no memory for rings")


class FaultInjector:
    """Draws the victims and the kinds of faults. ``nursery`` is set once the system is open."""

    nursery: trio.Nursery

    spawner: SimulatedSpawner | SimulatedCluster
    """Set by ``use``."""

    def __init__(self, draw: random.Random, journal: Journal) -> None:
        self._draw, self._journal = draw, journal
        self.start_fault_rate = draw.choice((0.0, 0.05, 0.15))
        self._turn_s = draw.choice((0.0, 0.0, 0.001, 0.02))
        self.use(SimulatedSpawner(self.behavior, journal.note))
        self.explained: set[int | None] = set()
        """pids of workers that may die."""
        self.failed_at_start: set[str] = set()
        """Stages whose first worker was made to fail."""
        self.delayed: set[int] = set()
        """pids of workers that may not be reached in time, so that a hang of theirs may be noticed late."""
        self._hung: dict[SimulatedWorker, str] = {}
        """Workers that were made to hang, and how."""
        self._spawned = set[Address]()
        self.is_first: Callable[[Address], bool] = lambda address: address not in self._spawned
        """Whether the worker that is being spawned is the first one of its replica."""

    def use(self, spawner: SimulatedSpawner | SimulatedCluster) -> None:
        """Inject faults into the workers of this spawner."""
        self.spawner = spawner

    def blame_nodes(self, pid: int) -> None:
        """Note that a worker may die, or a hang of it be noticed late, because of its node or the network."""
        self.explained.add(pid)
        self.delayed.add(pid)

    def stop(self) -> None:
        """Inject no more, and take back what is planned."""
        self.start_fault_rate = 0.0
        for worker in self.spawner.living.values():
            worker.planned_death = worker.dies_of = None

    def _victims(self, count: int) -> list[SimulatedWorker]:
        living = [worker for worker in self.spawner.living.values() if worker.alive]
        return self._draw.sample(living, min(count, len(living)))

    def _injected(self, fault: str, worker: SimulatedWorker) -> None:
        """Count a fault that explains the worker's death."""
        self._journal.injected(fault)
        self.explained.add(worker.pid)

    def kill(self) -> None:
        for worker in self._victims(1):
            self._injected("killed" if worker.ready_at is not None else "killed while loading", worker)
            worker.kill()

    def kill_two(self) -> None:
        for worker in self._victims(2):
            self._injected("killed, several at once", worker)
            worker.kill()

    def kill_with_message(self) -> None:
        """Kill a worker, and others with the messages that follow about the requests of the first."""
        for worker in self._victims(self._draw.choice((1, 2, 4))):
            self._injected("killed with a message", worker)
            worker.dies_of = self._draw.choice(ABOUT_REPLAYS)
        self.kill()

    def kill_inside_turn(self) -> None:
        self._plan_death("killed inside a turn", PlannedKill())

    def raise_in_engine(self) -> None:
        self._plan_death("exception in the engine", PlannedEngineError("the harness planned it"))

    def _plan_death(self, fault: str, how: BaseException) -> None:
        for worker in self._victims(1):
            self._injected(fault, worker)
            worker.planned_death = self._draw.randrange(8), how

    def hang(self) -> None:
        how = self._draw.choice(("stopped for good", "endless step", "heartbeat lost"))
        for worker in self._victims(1):
            self._injected(how, worker)
            self._journal.note(f"{worker}: {how}")
            self._hung.setdefault(worker, how)
            if how == "heartbeat lost":
                worker.loses_pong = worker.hung_at is None
                continue
            if worker.hung_at is None:
                worker.hung_at = trio.current_time()
            if how == "stopped for good":
                worker.stop_process()
            else:
                worker.blocked = True

    def stop_for_a_while(self) -> None:
        """SIGSTOP and SIGCONT within the timeout of a step: the supervisor must not kill the worker."""
        for worker in self._victims(1):
            if not worker.frozen and worker.rested_at < trio.current_time() - STEP_S:
                self._journal.injected("stopped, and continued")
                self._journal.note(f"{worker} is stopped")
                worker.stop_process()
                self.nursery.start_soon(self._continue_later, worker, self._draw.uniform(0, STEP_S / 2))

    async def _continue_later(self, worker: SimulatedWorker, after_s: float) -> None:
        await trio.sleep(after_s)
        worker.rested_at = trio.current_time()
        if worker.hung_at is None:
            self._journal.note(f"{worker} is continued")
            worker.continue_process()

    def behavior(self, address: Address, pid: int) -> WorkerBehavior:
        """Draw the behavior of a worker that is being spawned. Raises SpawnFailed if no process starts."""
        draw, first = self._draw, self.is_first(address)
        self._spawned.add(address)
        drawn = draw.random() / self.start_fault_rate if self.start_fault_rate else 1.0
        load_s = draw.choice((0.0, 0.05, 0.3))
        if drawn >= 1:
            return WorkerBehavior(load_s, self._turn_s, draw.choice((0.0, DYING_S / 2)))
        fault = START_FAULTS[int(drawn * 4)]
        self._journal.injected(fault)
        self.explained.add(None if fault == "no process" else pid)
        if first and fault != "slow start":
            self.failed_at_start.add(address.stage)
        if fault == "no process":
            self._journal.note(f"no process for {address}")
            raise SpawnFailed(f"the process of worker {address} could not be created")
        return WorkerBehavior(
            load_s=LOAD_S * 1.5 if fault == "slow start" else load_s,
            turn_s=self._turn_s,
            dying_s=draw.uniform(0, DYING_S),
            fails="it was asked to" if fault == "failed start" else None,
            refused=fault == "no memory for rings",
        )

    def check_hangs(self, has_slept: Callable[[str, float], bool]) -> None:
        """Every hang that ended was detected in time.

        has_slept: whether a stage was on its way to sleep after a time. Its workers may take as long as that call.
        """
        for worker, fault in self._hung.items():
            if worker.hung_at is None or worker.died_at is None or worker.pid in self.delayed:
                continue
            took_s = worker.died_at - worker.hung_at
            if worker.ready_at is not None:
                slept = has_slept(worker.address.stage, worker.hung_at)
                late = took_s > DETECTED_WITHIN * (SLEEP_TIMEOUT_S if slept else STEP_S)
                self._journal.tally.row(fault, LOAD).timings.append(Timing(detected_s=took_s))
            else:
                late = worker.died_at - worker.born > DETECTED_WITHIN * LOAD_S
            if late:
                self._journal.violated("hung", f"{worker} hung for {took_s:g} s before it was killed")
