"""Schedules without processes: the whole system, its workers simulated, in one thread, in virtual time, from one seed.

Rules
1. All that happens follows from the seed: the pipeline, its requests, the faults, how long things take, and in which
   order trio runs the tasks that are ready. The same seed gives the same log.
2. Faults and requests are injected between any two steps of any two tasks: wherever there is an ``await``.
3. Time is virtual (trio's mock clock): a deadline of 10 s passes as soon as nobody has anything else to do.
4. After each schedule: every request has one outcome, and the right one (``judge``); nobody died but those that were
   hurt; a hang was seen in time; every stage serves or was given up for a reason; nothing is left of anything.
"""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import trio
import trio.testing
from trio._core import _run as trio_run

from omni_actors.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestError, SlowConsumer
from omni_actors.generation import Generation
from omni_actors.protocol.messages import Address
from omni_actors.stress import judge
from omni_actors.stress.client import read_to_the_end
from omni_actors.stress.judge import ObservedDeath, Rules, TrackedRequest, Violation
from omni_actors.stress.oracle import Answer
from omni_actors.stress.report import Tally, Timing
from omni_actors.stress.simulation.determinism import deterministic, report_unraisable
from omni_actors.stress.simulation.scenarios import LOAD_S, PATIENCE_S, SCENARIOS, SHUTDOWN_S, STEP_S, scenario
from omni_actors.stress.simulation.worker import (
    PlannedEngineError,
    PlannedKill,
    SimulatedSpawner,
    SimulatedWorker,
    WorkerBehavior,
)
from omni_actors.supervisor.process import SpawnFailed
from omni_actors.system import OmniSystem

LOAD = "simulated"
STEPS, LONGEST_S = 100_000, 10 * PATIENCE_S
"""No schedule takes as many steps of tasks, or so long."""
IDLE = 1000
"""Nor does it wait so often while no task takes a step: at nothing."""
TICK_S = 1.0
SEEN_WITHIN = 1.1
"""Of its deadline: a hang is seen by then."""
DYING_S = 0.3
EPSILON_S = 1e-6


@dataclass
class Result:
    seed: int
    violations: list[Violation]
    tally: Tally
    log: list[str]


@dataclass(eq=False)
class _SimulatedRequest(TrackedRequest):
    """A request of a schedule; times are virtual."""

    deadline_s: float | None = None
    pace_s: float = 0.0
    full: bool = False
    """As many were in flight as may be when it came."""
    behind: Set[str] = frozenset()
    """The stages that do not keep up with their mail."""
    invalid: bool = False
    """It asked an engine to refuse it."""


def simulate(seed: int) -> Result:
    """Carry one schedule out."""
    simulation = Simulation(seed)
    with deterministic(simulation.draw), report_unraisable(simulation.on_unexpected_error):
        before = set(os.listdir("/proc/self/fd"))
        try:
            trio.run(simulation.live, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[simulation])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            simulation.on_unexpected_error("the system", error)
        simulation.check_left(set(os.listdir("/proc/self/fd")) - before)
    return Result(seed, simulation.violations, simulation.tally, simulation.log)


class Simulation(trio.abc.Instrument):
    """One schedule. As trio's instrument it counts the steps of tasks, and hurts at those that it has drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.log: list[str] = []
        self.violations: list[Violation] = []
        self.tally = Tally(runs=1)
        self._steps, self._due, self._idle = 0, 0, 0
        self._workload = scenario(self.draw.randrange(SCENARIOS))
        self._left = self.draw.choice((2, 4, 6, 12))
        self._gap = self.draw.choice((4, 20, 80))
        self._start_fault_rate = self.draw.choice((0.0, 0.05, 0.15))
        self._turn_s = self.draw.choice((0.0, 0.0, 0.001, 0.02))
        self._ends_early = self.draw.random() < 0.1
        self._spawner = SimulatedSpawner(self._behavior, self._note)
        self._explained: set[int] = set()
        """pids of those that may die."""
        self._poisoned: Counter[str] = Counter()
        self._hung: dict[SimulatedWorker, str] = {}
        """How they were brought to hang."""
        self._failed_at_start: set[str] = set()
        self._spawned: Counter[Address] = Counter()
        self._asked: list[_SimulatedRequest] = []
        self._open: dict[_SimulatedRequest, trio.CancelScope] = {}
        self._losses: list[ObservedDeath] = []
        self._heard: Counter[tuple[str, int]] = Counter()
        self._given_up: set[str] = set()
        self._fault = "(none)"
        self._faults_done = trio.Event()
        self._scope = trio.CancelScope()
        self._omni: OmniSystem
        self._nursery: trio.Nursery
        self._acts: list[Callable[[], None]] = [
            *[self._submit] * 8,
            *[self._kill] * 3,
            *[self._kill_inside] * 2,
            *(self._kill_two, self._hang, self._pause, self._break_engine),
            *(self._abort, self._disconnect, self._overload, self._poison, self._refuse, self._submit_slowly),
            self._submit_with_deadline,
        ]
        self._note(f"{self._workload.pipeline}")

    # what happens, and when

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._steps += 1
        self._idle = 0
        if self._steps == self._due:
            try:
                self._act()
            except Exception as error:  # noqa: BLE001 - trio takes an instrument that raises away
                self.on_unexpected_error("an injection", error)
                self._scope.cancel()
        elif self._steps % STEPS == 0:
            self._give_up()

    def before_io_wait(self, timeout: float) -> None:
        self._idle += 1
        if self._idle % IDLE == 0:
            self._give_up()

    def _give_up(self) -> None:
        """Nobody will ever do anything, or somebody for ever: end it, whoever is shielded."""
        self._scope.cancel()
        root = trio.lowlevel.current_root_task()
        tasks = [] if root is None else [root]
        for task in tasks:
            tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
            status: trio_run.CancelStatus | None = task._cancel_status
            while status is not None:
                status._scope.shield = False
                status = status._parent

    def _act(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._note("calm")
            for worker in self._spawner.living.values():
                worker.cancel_planned_death()
            self._start_fault_rate = 0.0
            self._faults_done.set()
            return
        self.draw.choice(self._acts)()
        self._due = self._steps + 1 + int(self.draw.expovariate(1 / self._gap))

    async def live(self) -> None:
        """Open a system, wait until all has been done to it, see that it recovers, and close it."""
        self._scope.deadline = LONGEST_S
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                async with (
                    OmniSystem.open(self._workload.pipeline, wait_ready=False, spawner=self._spawner) as self._omni,
                    trio.open_nursery() as watching,
                ):
                    watching.start_soon(self._watch)
                    self._due = self._steps + 1
                    while not self._faults_done.is_set():  # noqa: ASYNC110 - for the steps, where nobody else takes any
                        await trio.sleep(TICK_S)
                    if not self._ends_early:
                        await self._recover()
                    self._judge_system()
                    watching.cancel_scope.cancel()
                    for asked in self._open:
                        asked.aborted = True  # by the end of the system
                    closing = trio.current_time()
                closed_s = trio.current_time() - closing
                if closed_s > (fair_s := (SHUTDOWN_S + DYING_S) * len(self._workload.stages) + DYING_S):
                    self._violated("hung", f"closing took {closed_s:g} s; {fair_s:g} s are fair")
                with trio.move_on_after(PATIENCE_S):
                    while self._open:  # noqa: ASYNC110 - the time is virtual
                        await trio.sleep(TICK_S)
                self._nursery.cancel_scope.cancel()
        if self._scope.cancelled_caught:
            self._violated("hung", f"no end after {self._steps} steps, at {trio.current_time():g} s")
        for asked in self._asked:
            self._judge(asked)

    async def _watch(self) -> None:
        """Note every death, as the system reports it."""
        while True:
            for stage, replicas in self._omni.health().stages.items():
                if all(each.state == "failed" for each in replicas):
                    self._given_up.add(stage)
                for each in replicas:
                    for past in each.history:
                        if past.generation > self._heard[stage, each.replica]:
                            self._heard[stage, each.replica] = past.generation
                            how = f"{past.signal or past.exit_code}, {past.reason}"
                            self._losses.append(ObservedDeath(stage, each.replica, past.pid, how, trio.current_time()))
                            self._note(f"{stage}.{each.replica}#{past.pid} is lost: {how}; now {each.state}")
            await self._omni.wait_changed()

    async def _recover(self) -> None:
        with trio.move_on_after(PATIENCE_S) as patience:
            await self._until_quiet()
            for stage in self._workload.stages:
                self._ask("probe", self._workload.probe(stage).name)
            await self._until_quiet()
            await trio.sleep(1.0)  # what was posted last is heard
        if patience.cancelled_caught:
            for worker in self._spawner.living.values():
                if worker.hung:
                    self._violated("hung", f"{worker}, which hangs since {worker.hung_at:.3f}, is not killed")
            for asked in self._open:
                self._violated("hung", f"{asked.name} ({asked.template.name}) has no outcome")

    async def _until_quiet(self) -> None:
        while self._open or not self._settled():  # noqa: ASYNC110 - the time is virtual
            await trio.sleep(TICK_S)

    def _settled(self) -> bool:
        stages = self._omni.health().stages.values()
        return all(each.state in ("ready", "failed") for stage in stages for each in stage) and not any(
            worker.hung or worker.loses_pong or worker.frozen or not worker.alive
            for worker in self._spawner.living.values()
        )

    # what is asked

    def _ask(self, what: str, name: str, **more: Any) -> None:
        template = self._workload.templates[name]
        hooks = more.pop("hooks", None)
        asked = _SimulatedRequest(
            f"r{len(self._asked)}",
            template,
            Answer(self._workload.oracle[name]),
            self.draw.choice(("replay", "replay", "fail")) if what != "probe" else "replay",
            trio.current_time(),
            hooks is not None,
            full=self._omni.in_flight >= self._workload.pipeline.limits.max_requests,
            behind={worker.address.stage for worker in self._spawner.living.values() if worker.congested},
            **more,
        )
        self._asked.append(asked)
        self._note(f"{asked.name} is asked: {what}, {name}, {asked.on_failure}, {more}, {hooks}")
        try:
            generation = self._omni.submit(
                template.inputs if hooks is None else template.with_hooks(hooks),
                template.modalities,
                request_id=asked.name,
                on_failure=asked.on_failure,
                deadline_s=asked.deadline_s,
            )
        except RequestError as error:
            self._end(asked, "failed", error)
        else:
            if asked.pace_s or len(self._asked) % 2:
                generation.hold(whole=False)  # as a connection does: its stages may be paused
            self._open[asked] = trio.CancelScope()
            self._nursery.start_soon(self._read, asked, generation)

    async def _read(self, asked: _SimulatedRequest, generation: Generation) -> None:
        with self._open[asked]:
            error = await read_to_the_end(asked, generation, asked.pace_s)
            self._end(asked, "failed" if error else "completed", error)
        if asked.outcome == "open":
            self._end(asked, "dropped", None)

    def _end(self, asked: _SimulatedRequest, outcome: judge.Outcome, error: RequestError | None) -> None:
        asked.outcome, asked.error, asked.ended = outcome, error, trio.current_time()
        self._open.pop(asked, None)
        how = type(error).__name__ if error else outcome
        self.tally.requests[how] += 1
        self._note(f"{asked.name} is over: {how}")

    def _any_template(self) -> str:
        return self.draw.choice(list(self._workload.templates))

    def _submit(self) -> None:
        self._ask("request", self._any_template())

    def _submit_slowly(self) -> None:
        self._inject("slow reader")
        self._ask("slow reader", self._any_template(), pace_s=self.draw.choice((0.01, 0.3, 1.0)))

    def _submit_with_deadline(self) -> None:
        self._inject("deadline")
        self._ask("deadline", self._any_template(), deadline_s=self.draw.choice((0.0, 0.01, 0.1, 1.0)))

    def _overload(self) -> None:
        self._inject("overload")
        for _ in range(self._workload.pipeline.limits.max_requests + 1):
            self._submit()

    def _abort(self) -> None:
        if self._open:
            self._inject("abort")
            asked = self.draw.choice(list(self._open))
            asked.aborted = True
            self._note(f"{asked.name} is aborted")
            self._omni.abort(asked.name)

    def _disconnect(self) -> None:
        if self._open:
            self._inject("disconnect")
            asked = self.draw.choice(list(self._open))
            self._note(f"{asked.name} is dropped")
            self._open[asked].cancel()

    def _poison(self) -> None:
        """A request that makes an engine raise, each time that it comes there."""
        name = self._any_template()
        stage = self.draw.choice(self._workload.templates[name].stages)
        self._inject("request that breaks its engine")
        self._poisoned[stage] += judge.max_deaths_by_one_request(self._workload.pipeline.limits)
        self._ask("poison", name, hooks={"stage": stage, "raise": self.draw.choice(("feed", "step"))})

    def _refuse(self) -> None:
        name = self._any_template()
        stage = self.draw.choice(self._workload.templates[name].stages)
        self._inject("request that its engine refuses")
        self._ask("refused", name, hooks={"stage": stage, "invalid": self.draw.choice(("feed", "step"))}, invalid=True)

    # what is hurt

    def _inject(self, fault: str) -> None:
        self._fault = fault
        self.tally.row(fault, LOAD).faults += 1

    def _victims(self, count: int) -> list[SimulatedWorker]:
        living = [worker for worker in self._spawner.living.values() if worker.alive]
        return self.draw.sample(living, min(count, len(living)))

    def _kill(self) -> None:
        for worker in self._victims(1):
            self._inject("killed" if worker.ready_at is not None else "killed while loading")
            self._explained.add(worker.pid)
            worker.kill()

    def _kill_two(self) -> None:
        for worker in self._victims(2):
            self._inject("killed, several at once")
            self._explained.add(worker.pid)
            worker.kill()

    def _kill_inside(self) -> None:
        for worker in self._victims(1):
            self._inject("killed inside a turn")
            self._explained.add(worker.pid)
            worker.die_inside_turn(self.draw.randrange(8), PlannedKill())

    def _break_engine(self) -> None:
        for worker in self._victims(1):
            self._inject("exception in the engine")
            self._explained.add(worker.pid)
            worker.die_inside_turn(self.draw.randrange(8), PlannedEngineError("it was asked to"))

    def _hang(self) -> None:
        how = self.draw.choice(("stopped for good", "endless step", "heartbeat lost"))
        for worker in self._victims(1):
            self._inject(how)
            self._explained.add(worker.pid)
            self._note(f"{worker}: {how}")
            self._hung.setdefault(worker, how)
            if how == "heartbeat lost":
                worker.loses_pong = worker.hung_at is None
                continue
            if worker.hung_at is None:
                worker.hung_at = trio.current_time()
            if how == "stopped for good":
                worker.stop_process()
            else:
                worker.block_engine()

    def _pause(self) -> None:
        """Nobody is to be killed for it."""
        for worker in self._victims(1):
            if not worker.frozen and worker.rested_at < trio.current_time() - STEP_S:
                self._inject("stopped, and continued")
                self._note(f"{worker} is stopped")
                worker.stop_process()
                self._nursery.start_soon(self._thaw, worker, self.draw.uniform(0, STEP_S / 2))

    async def _thaw(self, worker: SimulatedWorker, after_s: float) -> None:
        await trio.sleep(after_s)
        worker.rested_at = trio.current_time()
        if worker.hung_at is None:
            self._note(f"{worker} is continued")
            worker.continue_process()

    def _behavior(self, address: Address, pid: int) -> WorkerBehavior:
        """Of a worker that is being spawned; some are hurt from birth."""
        draw, first = self.draw, not self._spawned[address]
        self._spawned[address] += 1
        fate = draw.random() / self._start_fault_rate if self._start_fault_rate else 1.0
        load_s, fails = draw.choice((0.0, 0.05, 0.3)), None
        if fate < 1:
            fault = ("slow start", "no process", "failed start", "no memory for rings")[int(fate * 4)]
            self._inject(fault)
            self._explained.add(0 if fault == "no process" else pid)
            if first and fault != "slow start":
                self._failed_at_start.add(address.stage)
            if fault == "no process":
                self._note(f"no process for {address}")
                raise SpawnFailed(f"no process for {address}")
            load_s = LOAD_S * 1.5 if fault == "slow start" else load_s
            fails = "it was asked to" if fault == "failed start" else None
            return WorkerBehavior(load_s, self._turn_s, draw.uniform(0, DYING_S), fails, fault == "no memory for rings")
        return WorkerBehavior(load_s, self._turn_s, draw.choice((0.0, DYING_S / 2)))

    # what is right

    def _judge(self, asked: _SimulatedRequest) -> None:
        pipeline = self._workload.pipeline
        late_s = asked.ended - asked.submitted - (asked.deadline_s if asked.deadline_s is not None else 1e9)
        fair = False
        match asked.error:
            case DeadlineExceeded():
                fair = late_s >= -EPSILON_S
            case Overloaded(stage=None):
                fair = asked.full
            case Overloaded(stage=behind):
                fair = behind in asked.behind
            case SlowConsumer():
                fair = asked.pace_s > 0
            case InvalidRequest():
                fair = asked.invalid
        found: Violation | None
        if fair:
            differs = asked.answer.damage_so_far()
            found = Violation(differs[0], f"{asked.name}: {differs[1]}") if differs else None
        else:
            retains = pipeline.limits.retain_bytes >= 1_000_000
            rules = Rules(pipeline.limits.replays if retains else 0, self._workload.replayed)
            found = judge.check_request(asked, self._losses, self._given_up, rules)
        if found is None and not asked.pace_s and late_s > EPSILON_S:
            found = Violation("hung", f"{asked.name} ended {late_s:g} s after its deadline")
        if found is None and asked.full and asked.outcome != "failed" and not self._made_room(asked):
            found = Violation("disturbed", f"{asked.name} was admitted past limits.max_requests")
        if found is not None:
            self._violated(found.kind, found.what)

    def _made_room(self, asked: _SimulatedRequest) -> bool:
        """Whether a slow reader's request may have been ended for this one."""
        return any(
            isinstance(other.error, SlowConsumer) and other.submitted <= asked.submitted <= other.ended
            for other in self._asked
        )

    def _judge_system(self) -> None:
        """While it is open. What it cannot have done yet is not asked of one that is left in the middle."""
        unexplained, _ = judge.check_deaths(self._losses, self._explained, self._poisoned)
        for found in unexplained:
            self._violated(found.kind, found.what)
        pipeline = self._workload.pipeline
        excused = self._failed_at_start | {
            name for name, each in pipeline.stages.items() if each.restart.type == "temporary"
        }
        for found in judge.check_restarts(self._losses, self._given_up - excused, pipeline):
            self._violated(found.kind, found.what)
        self._judge_hangs()
        if self._ends_early:
            return
        if self._omni.in_flight:
            self._violated("leaked", f"{self._omni.in_flight} requests are still in flight")
        for stage, replicas in self._omni.health().stages.items():
            for each in replicas:
                if each.state not in ("ready", "failed"):
                    self._violated("hung", f"{stage}.{each.replica} is {each.state}: {each.note}")
        for worker in self._spawner.living.values():
            if worker.loop is not None and (held := worker.loop.requests):
                self._violated("leaked", f"{worker} still has something of requests {sorted(held)}")

    def _judge_hangs(self) -> None:
        for worker, fault in self._hung.items():
            if worker.hung_at is not None and worker.died_at is not None:
                took_s = worker.died_at - worker.hung_at
                if worker.ready_at is not None:
                    late = took_s > SEEN_WITHIN * STEP_S
                    self.tally.row(fault, LOAD).timings.append(Timing(detected_s=took_s))
                else:
                    late = worker.died_at - worker.born > SEEN_WITHIN * LOAD_S
                if late:
                    self._violated("hung", f"{worker} hung for {took_s:g} s before it was killed")

    def check_left(self, descriptors: set[str]) -> None:
        """Once it is closed. descriptors: those that were not here before."""
        if descriptors:
            self._violated("leaked", f"{len(descriptors)} descriptors are left")
        if self._spawner.living:
            self._violated("leaked", f"workers are left: {', '.join(map(str, self._spawner.living.values()))}")
        if mapped := sum(not ring.closed for ring in self._spawner.all_rings()):
            self._violated("leaked", f"{mapped} rings are still mapped")

    def on_unexpected_error(self, what: str, error: BaseException) -> None:
        """An exception that nobody is there to take."""
        self.log += traceback.format_exception(error)
        self._violated("disturbed", f"{what} broke: {error!r}")

    def _violated(self, kind: judge.Kind, what: str) -> None:
        self.violations.append(Violation(kind, what))
        self.tally.row(self._fault, LOAD).violations[kind] += 1
        self._note(f"VIOLATED: {kind}: {what}")

    def _note(self, what: str) -> None:
        now = trio.current_time() if trio.lowlevel.in_trio_run() else 0.0
        self.log.append(f"{self._steps:6} {now:9.3f}  {what}")
