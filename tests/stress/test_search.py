"""Schedules: drawn from a seed, shrunk, written as text, and carried out again from it. No process is started here."""

from __future__ import annotations

import msgspec
import pytest

from omni_actors.stress import schedule as schedules
from omni_actors.stress.judge import Violation
from omni_actors.stress.report import Tally
from omni_actors.stress.schedule import Freeze, Kill, NodeFault, Operation, Schedule, Settle, Submit
from omni_actors.stress.search import Search
from omni_actors.stress.workload import workload_of

RUNS = 40


def drawn(seed: int) -> list[Schedule]:
    """What a search would run."""
    run: list[Schedule] = []

    def note(schedule: Schedule) -> Tally:
        run.append(schedule)
        return Tally()

    Search(workload_of("echo", {}), note, lambda: len(run) >= RUNS, 10.0).go(seed, 20)
    return run


def test_a_seed_draws_the_same_schedules_and_they_contain_every_operation() -> None:
    first, second = drawn(1), drawn(2)
    assert len(first) == RUNS
    assert first == drawn(1)
    assert first != second
    every = first + second + drawn(3)
    of_one_machine = set(Operation.__args__) - set(NodeFault.__args__)
    assert {type(operation) for schedule in every for operation in schedule.operations} == of_one_machine
    assert {schedule.load for schedule in every} == {"idle", "one", "full"}
    assert {schedule.intensity for schedule in every} == {None, 2}
    for schedule in first:
        assert schedules.decode(schedules.encode(schedule)) == schedule


def _holds_both(schedule: Schedule) -> bool:
    """A bug that takes a request of sound, and the first stage frozen at some time after."""
    submitted = False
    for operation in schedule.operations:
        submitted |= isinstance(operation, Submit) and "audio" in operation.request
        if submitted and operation == Freeze("first"):
            return True
    return False


def test_a_failing_schedule_is_shrunk_to_the_operations_that_fail() -> None:
    def run(schedule: Schedule) -> Tally:
        tally = Tally(runs=1)
        tally.row("SIGSTOP", schedule.load).faults += 1
        tally.found += [Violation("lost", "something")] if _holds_both(schedule) else []
        return tally

    search = Search(workload_of("echo", {}), run, lambda: search.tally.runs > 3000, shrink_s=60.0)
    search.go(3, 20)
    assert search.failing is not None
    assert _holds_both(search.failing)
    assert [type(operation).__name__ for operation in search.failing.operations] == ["Submit", "Freeze"]
    assert (search.failing.load, search.failing.intensity) == ("idle", None)
    assert [violation.what for violation in search.violations] == ["something"]


def test_a_schedule_that_fails_only_once_is_reported() -> None:
    runs: list[Schedule] = []

    def run(schedule: Schedule) -> Tally:
        runs.append(schedule)
        return Tally(found=[Violation("hung", "once")] if len(runs) == 5 else [])

    search = Search(workload_of("echo", {}), run, lambda: len(runs) > 50, 60.0)
    search.go(1, 20)
    assert search.failing == runs[4]


def test_an_invalid_schedule_text_is_refused() -> None:
    text = schedules.encode(Schedule("full", 2, (Kill(("first", "second")), Settle())))
    assert text == '["full",2,[["kill",["first","second"]],["settle"]]]'
    for wrong in ("", "[]", '["busy",null,[]]', '["idle",null,[["explode","first"]]]', '["idle",null,[["wait",-1]]]'):
        with pytest.raises(msgspec.DecodeError):
            schedules.decode(wrong)
