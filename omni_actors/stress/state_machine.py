"""Generates schedules with a Hypothesis state machine whose rules are the operations, and shrinks failing ones.

Rules
1. The machine only writes a schedule down, and runs it in its teardown. So what Hypothesis draws never depends on what
   happened, and the schedule that failed is exactly the one that can be repeated.
2. Shrinking works on the schedule, not on the draws: it removes operations, halves first, then single ones, as long as
   the rest still fails. Processes race, so each smaller schedule gets ``TRIES`` runs to fail in.
3. The budget is checked between runs. A run that has begun is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import HealthCheck, Phase, Verbosity, settings, stateful
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from msgspec import structs

from omni_actors.stress import schedule as schedules
from omni_actors.stress.judge import Violation
from omni_actors.stress.report import Tally
from omni_actors.stress.run import Result
from omni_actors.stress.workload import Workload

LOW_INTENSITY = 2
TRIES = 2


class SearchOver(BaseException):
    """Ends a search. Not an ``Exception``, which Hypothesis would treat as a failing example."""


@dataclass
class Search:
    """Searches for a failing schedule. run: runs a schedule. enough: tells whether the budget is spent."""

    workload: Workload
    run: Callable[[schedules.Schedule], Result]
    enough: Callable[[], bool]
    shrink_s: float
    tally: Tally = field(default_factory=Tally)
    """Counts up to the first failing run, and of that run. Runs while shrinking are not counted."""
    failing: schedules.Schedule | None = None
    """The smallest schedule that failed."""
    violations: list[Violation] = field(default_factory=list)
    """The violations of ``failing``."""

    def go(self, seed: int, operations: int) -> None:
        """Run schedules from ``seed``, of up to ``operations`` operations, until the budget is spent or one fails."""
        machine = with_seed(seed)(state_machine_for(self))
        drawing = settings(
            max_examples=1_000_000,
            stateful_step_count=operations,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            verbosity=Verbosity.quiet,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        with suppress(SearchOver):
            stateful.run_state_machine_as_test(machine, settings=drawing)
        if self.failing is not None:
            self._shrink(self.failing, time.monotonic() + self.shrink_s)

    def carry_out(self, schedule: schedules.Schedule) -> None:
        """Run one schedule. Raises SearchOver."""
        if self.enough():
            raise SearchOver
        result = self.run(schedule)
        self.tally.add(result.tally)
        if result.violations:
            self.failing, self.violations = schedule, result.violations
            raise SearchOver

    def _shrink(self, smallest: schedules.Schedule, until: float) -> None:
        def still_fails(smaller: schedules.Schedule) -> bool:
            for _ in range(TRIES):
                if time.monotonic() < until and (found := self.run(smaller).violations):
                    self.failing, self.violations = smaller, found
                    return True
            return False

        size = len(smallest.operations) // 2
        while size:
            place = 0
            while place < len(smallest.operations):
                kept = smallest.operations[:place] + smallest.operations[place + size :]
                if still_fails(smaller := structs.replace(smallest, operations=kept)):
                    smallest = smaller
                else:
                    place += size
            size //= 2
        for simpler in ({"intensity": None}, {"load": "one"}, {"load": "idle"}):
            smaller = structs.replace(smallest, **simpler)
            if smaller != smallest and still_fails(smaller):
                smallest = smaller


STAGE = st.runner().flatmap(lambda machine: st.sampled_from(machine.workload.stages))
STAGE_WITH_HOOKS = st.runner().flatmap(lambda machine: st.sampled_from(machine.workload.hooks))
REQUEST = st.runner().flatmap(lambda machine: st.sampled_from(sorted(machine.workload.templates)))
TWO_STAGES = st.runner().flatmap(
    lambda machine: st.lists(st.sampled_from(machine.workload.stages), min_size=2, max_size=2, unique=True)
)
DELAY_MS = st.sampled_from((0, 1, 3, 10, 30, 100, 300))
ON_FAILURE = st.sampled_from(("replay", "replay", "fail"))


def state_machine_for(search: Search) -> type[stateful.RuleBasedStateMachine]:
    """The state machine that writes schedules for ``search``."""
    return type("Machine", (ScheduleWriter,), {"search": search, "workload": search.workload})


class ScheduleWriter(stateful.RuleBasedStateMachine):
    """Writes one schedule down. Its rules draw from the workload's stages and requests."""

    search: ClassVar[Search]
    workload: ClassVar[Workload]
    requests: stateful.Bundle[int] = stateful.Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.load: schedules.Load = "idle"
        self.intensity: int | None = None
        self.operations: list[schedules.Operation] = []
        self.submitted = 0

    def _ask(self, operation: schedules.Operation) -> int:
        self.operations.append(operation)
        self.submitted += 1
        return self.submitted - 1

    @stateful.initialize(
        load=st.sampled_from(("idle", "one", "full")), intensity=st.sampled_from((None,) * 7 + (LOW_INTENSITY,))
    )
    def begin(self, load: schedules.Load, intensity: int | None) -> None:
        self.load, self.intensity = load, intensity

    @stateful.rule(target=requests, name=REQUEST, on_failure=ON_FAILURE)
    def submit(self, name: str, on_failure: schedules.OnFailure) -> int:
        return self._ask(schedules.Submit(name, on_failure))

    @stateful.rule(target=requests, name=REQUEST, pace=st.sampled_from((5, 50)))
    def read_slowly(self, name: str, pace: int) -> int:
        return self._ask(schedules.Submit(name, "replay", pace))

    @stateful.rule(request=stateful.consumes(requests), after=DELAY_MS)
    def abort(self, request: int, after: int) -> None:
        self.operations += [schedules.Wait(after), schedules.Abort(request)]

    @stateful.rule(request=stateful.consumes(requests), after=DELAY_MS)
    def disconnect(self, request: int, after: int) -> None:
        self.operations += [schedules.Wait(after), schedules.Disconnect(request)]

    @stateful.rule(ms=DELAY_MS)
    def wait(self, ms: int) -> None:
        self.operations.append(schedules.Wait(ms))

    @stateful.rule()
    def settle(self) -> None:
        self.operations.append(schedules.Settle())

    def _inject(self, after: int, fault: schedules.Operation, alone: bool) -> None:
        """alone: nothing else happens until the fault is over, so that its times count."""
        self.operations += [schedules.Wait(after), fault]
        if alone:
            self.operations.append(schedules.Settle())

    @stateful.rule(stage=STAGE, after=DELAY_MS, alone=st.booleans())
    def kill(self, stage: str, after: int, alone: bool) -> None:
        self._inject(after, schedules.Kill((stage,)), alone)

    @stateful.precondition(lambda self: len(self.workload.stages) > 1)
    @stateful.rule(pair=TWO_STAGES, after=DELAY_MS, alone=st.booleans())
    def kill_two(self, pair: list[str], after: int, alone: bool) -> None:
        self._inject(after, schedules.Kill(tuple(pair)), alone)

    @stateful.rule(stage=STAGE, after=DELAY_MS, alone=st.booleans())
    def kill_loading(self, stage: str, after: int, alone: bool) -> None:
        self._inject(0, schedules.KillLoading(stage, after), alone)

    @stateful.rule(stage=STAGE, times=st.integers(2, 5), alone=st.booleans())
    def storm(self, stage: str, times: int, alone: bool) -> None:
        self._inject(0, schedules.Storm(stage, times), alone)

    @stateful.rule(stage=STAGE, after=DELAY_MS, alone=st.booleans())
    def stop_process(self, stage: str, after: int, alone: bool) -> None:
        self._inject(after, schedules.Freeze(stage), alone)

    @stateful.rule(stage=STAGE, ms=st.sampled_from((50, 200, 500, 2000)))
    def pause(self, stage: str, ms: int) -> None:
        self.operations.append(schedules.Pause(stage, ms))

    @stateful.precondition(lambda self: bool(self.workload.hooks))
    @stateful.rule(stage=STAGE_WITH_HOOKS, how=st.sampled_from(("raise", "exit", "hang")), alone=st.booleans())
    def crash(self, stage: str, how: schedules.How, alone: bool) -> None:
        self._inject(0, schedules.Crash(stage, how), alone)

    @stateful.precondition(lambda self: bool(self.workload.hooks))
    @stateful.rule(stage=STAGE_WITH_HOOKS, alone=st.booleans())
    def crash_again_and_again(self, stage: str, alone: bool) -> None:
        self._inject(0, schedules.Crash(stage, "raise", "replay"), alone)

    @stateful.rule(stage=STAGE, alone=st.booleans())
    def starve(self, stage: str, alone: bool) -> None:
        self._inject(0, schedules.Starve(stage), alone)

    @stateful.rule(stage=STAGE, times=st.integers(1, 2), alone=st.booleans())
    def fill(self, stage: str, times: int, alone: bool) -> None:
        self._inject(0, schedules.Full(stage, times), alone)

    @stateful.rule(loading=st.booleans())
    def orphan(self, loading: bool) -> None:
        self.operations.append(schedules.Orphan(loading))

    def teardown(self) -> None:
        self.search.carry_out(schedules.Schedule(self.load, self.intensity, tuple(self.operations)))
