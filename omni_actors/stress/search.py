"""Draws schedules with Hypothesis, runs them, and shrinks a failing one.

Rules
1. A schedule is drawn before it runs. So what Hypothesis draws never depends on what happened, and the schedule that
   failed is exactly the one that can be repeated.
2. Shrinking works on the schedule, not on the draws: it removes operations, halves first, then single ones, as long as
   the rest still fails. Processes race, so each smaller schedule gets ``TRIES`` runs to fail in.
3. The budget is checked between runs. A run that has begun is finished.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from msgspec import structs

from omni_actors.stress import schedule as schedules
from omni_actors.stress.adapters import VERSIONS, uses_adapter
from omni_actors.stress.judge import Violation
from omni_actors.stress.report import Tally
from omni_actors.stress.workload import Workload

LOW_INTENSITY = 2
TRIES = 2


class SearchOver(BaseException):
    """Ends a search. Not an ``Exception``, which Hypothesis would treat as a failing example."""


@dataclass
class Search:
    """Searches for a failing schedule. run: runs a schedule. enough: whether the budget is spent."""

    workload: Workload
    run: Callable[[schedules.Schedule], Tally]
    enough: Callable[[], bool]
    shrink_s: float
    tally: Tally = field(default_factory=Tally)
    """Counts up to the first failing run, and of that run. Runs while shrinking are not counted."""
    failing: schedules.Schedule | None = None
    """The smallest schedule that failed."""
    violations: list[Violation] = field(default_factory=list)
    """The violations of ``failing``."""

    def go(self, seed: int, operations: int) -> None:
        """Run schedules from ``seed``, of ``operations`` steps, until the budget is spent or one fails."""

        @with_seed(seed)
        @settings(
            max_examples=1_000_000,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            verbosity=Verbosity.quiet,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(schedules_for(self.workload, operations))
        def run_all(schedule: schedules.Schedule) -> None:
            self.carry_out(schedule)

        with suppress(SearchOver):
            run_all()
        if self.failing is not None:
            self._shrink(self.failing, time.monotonic() + self.shrink_s)

    def carry_out(self, schedule: schedules.Schedule) -> None:
        """Run one schedule. Raises SearchOver."""
        if self.enough():
            raise SearchOver
        tally = self.run(schedule)
        self.tally.add(tally)
        if tally.found:
            self.failing, self.violations = schedule, tally.found
            raise SearchOver

    def _shrink(self, smallest: schedules.Schedule, until: float) -> None:
        def still_fails(smaller: schedules.Schedule) -> bool:
            for _ in range(TRIES):
                if time.monotonic() < until and (found := self.run(smaller).found):
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


DELAY_MS = st.sampled_from((0, 1, 3, 10, 30, 100, 300))
ON_FAILURE = st.sampled_from(("replay", "replay", "fail"))

Step: TypeAlias = st.SearchStrategy[tuple[schedules.Operation, ...]]
"""Draws an operation, perhaps with a wait before it, and perhaps with the time to settle after it."""


def schedules_for(workload: Workload, operations: int) -> st.SearchStrategy[schedules.Schedule]:
    """Draw schedules of this many steps. Each schedule takes its steps from some of the kinds only, drawn first."""
    kinds = st.lists(st.sampled_from(_steps(workload, operations)), min_size=1, unique=True)
    steps = kinds.flatmap(lambda some: st.lists(st.one_of(some), min_size=operations, max_size=operations))
    return st.builds(
        schedules.Schedule,
        load=st.sampled_from(("idle", "one", "full")),
        intensity=st.sampled_from((None,) * 7 + (LOW_INTENSITY,)),
        operations=steps.map(lambda drawn: tuple(itertools.chain(*drawn))),
    )


def _steps(workload: Workload, operations: int) -> list[Step]:
    """The kinds of steps that fit the workload."""
    stage = st.sampled_from(workload.stages)
    request = st.sampled_from(sorted(workload.templates))
    submitted = st.integers(0, operations - 1)
    wait = st.builds(schedules.Wait, DELAY_MS)
    alone: list[st.SearchStrategy[schedules.Operation]] = [
        st.builds(schedules.Submit, request, ON_FAILURE),
        st.builds(schedules.Submit, request, pace=st.sampled_from((5, 50))),
        wait,
        st.builds(schedules.Settle),
        st.builds(schedules.Pause, stage, st.sampled_from((50, 200, 500, 2000))),
        st.builds(schedules.Orphan, st.booleans()),
        st.builds(schedules.PauseGeneration, st.sampled_from(("abort", "wait", "keep")), DELAY_MS),
        st.builds(schedules.Sleep, stage, DELAY_MS),
    ]
    after_a_wait: list[st.SearchStrategy[schedules.Operation]] = [
        st.builds(schedules.Abort, submitted),
        st.builds(schedules.Disconnect, submitted),
    ]
    faults: list[st.SearchStrategy[schedules.Operation]] = [
        st.builds(schedules.Kill, st.tuples(stage)),
        st.builds(schedules.KillLoading, stage, DELAY_MS),
        st.builds(schedules.Storm, stage, st.integers(2, 5)),
        st.builds(schedules.Freeze, stage),
        st.builds(schedules.Starve, stage),
        st.builds(schedules.Full, stage, st.integers(1, 2)),
    ]
    if workload.cluster is not None:
        node = st.integers(0, 1)
        kinds = (schedules.KillAgent, schedules.FreezeAgent, schedules.CutControl, schedules.CutLinks)
        faults += [st.builds(kind, node) for kind in kinds]
        alone.append(st.builds(schedules.PauseAgent, node, st.sampled_from((50, 200, 500))))
    if len(workload.stages) > 1:
        pairs = list(itertools.permutations(workload.stages, 2))
        faults.append(st.builds(schedules.Kill, st.sampled_from(pairs)))
    if uses_adapter(workload):
        after_a_wait.append(st.builds(schedules.SwitchAdapter, st.integers(0, VERSIONS - 1)))
    if workload.hooks:
        after_a_wait.append(st.builds(schedules.UpdateWeights))
        with_hooks = st.sampled_from(workload.hooks)
        faults.append(st.builds(schedules.Crash, with_hooks, st.sampled_from(("raise", "exit", "hang"))))
        faults.append(st.builds(schedules.Crash, with_hooks, st.just("raise"), st.just("replay")))
    return [
        *map(st.tuples, alone),
        *(st.tuples(wait, operation) for operation in after_a_wait),
        # If nothing else happens until a fault is over, its times count.
        *(st.tuples(wait, fault) | st.tuples(wait, fault, st.builds(schedules.Settle)) for fault in faults),
    ]
