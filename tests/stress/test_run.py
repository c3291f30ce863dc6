"""The harness finds planted bugs. They are planted in engines and doubles, never by a switch in the code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import psutil
import pytest
import trio

from omni_actors import config as configuration
from omni_actors.protocol.messages import Address
from omni_actors.stress import leaks, soak
from omni_actors.stress.driver import Driver
from omni_actors.stress.faults import KillHelper, RefusingSpawner, Victim
from omni_actors.stress.run import run_schedule, run_with_faults
from omni_actors.stress.schedule import (
    Crash,
    Full,
    Kill,
    Pause,
    Schedule,
    Settle,
    Sleep,
    Starve,
    Storm,
    Submit,
    SwitchAdapter,
    UpdateWeights,
    Wait,
)
from omni_actors.stress.workload import Workload, workload_of
from omni_actors.system import OmniSystem
from ringbuf import Ring
from tests.stress.patience import PATIENT

WATCHDOG_S = 60.0
ONE_KILL = Schedule("idle", None, (Submit("audio, long"), Wait(30), Kill(("second",)), Settle()))
NO_FAULT = Schedule("idle", None, (Submit("audio, short"), Settle()))


def test_a_sound_system_passes_and_each_fault_is_counted_and_timed(baseline: Workload, mark: str) -> None:
    operations = (
        *(Submit("text and audio, long", "fail"), Wait(10), Kill(("first", "second")), Settle()),
        *(Submit("audio, long"), Crash("second", "raise"), Settle()),
        *(Full("second", 1), Settle(), Pause("first", 20), Starve("second"), Settle()),
    )
    result = run_schedule(baseline, Schedule("one", None, operations), mark)
    assert result.found == []
    rows = result.rows
    assert {fault: row.faults for (fault, _), row in rows.items()} == {
        "SIGKILL, several at once": 2,
        "exception in step": 1,
        "no memory for rings": 1,
        "SIGSTOP, then SIGCONT": 1,
        "out of memory": 1,
    }
    assert all(row.resumed == 0 for row in rows.values()), "echo engines are not resumable"
    assert any(row.repeated for row in rows.values())
    for fault in ("SIGKILL, several at once", "exception in step", "no memory for rings"):
        for timing in rows[fault, "one"].timings:
            assert timing.detected_s is not None
            assert timing.ready_s is not None
            assert timing.recovered_s is not None
            assert 0 < timing.detected_s < timing.ready_s
            assert timing.detected_s < timing.recovered_s


def test_a_standby_that_takes_over_is_counted_and_one_that_dies_is_not(baseline: Workload, mark: str) -> None:
    """Every third fault hits a standby."""
    pipeline = configuration.load(baseline.pipeline, {"stages.second.standby": 1})
    kill = (Kill(("second",)), Settle())
    result = run_schedule(replace(baseline, pipeline=pipeline), Schedule("idle", None, 3 * kill), mark)
    assert result.found == []
    assert {fault: (row.faults, row.promotions) for (fault, _), row in result.rows.items()} == {"SIGKILL": (3, 2)}


def test_a_worker_has_more_time_to_load_behind_another_one() -> None:
    stages = workload_of("echo", {"stages.second.standby": 1}).pipeline.stages
    assert (stages["first"].load_timeout_s, stages["second"].load_timeout_s) == (3.0, 12.0)


@pytest.mark.slow
def test_a_resumable_stage_goes_on_in_its_standby(baseline: Workload, mark: str) -> None:
    """Its weights are not updated, those of the other stage are. The request takes 9 s, and is hit after 4 s."""
    overrides: dict[str, Any] = {
        **PATIENT,
        "stages.first.options.step_s": 0.15,
        "stages.second.engine": "omni_actors.stress.simulation.deciding:DecidingEngine",
        "stages.second.options": {"steps": 2},
        "stages.second.resumable": True,
        "stages.second.standby": 1,
    }
    workload = workload_of(baseline.pipeline, overrides)
    workload.oracle = baseline.oracle
    operations = (UpdateWeights(), Settle(), Submit("audio, long"), Wait(4000), Kill(("second",)), Settle())
    result = run_schedule(workload, Schedule("idle", None, operations), mark)
    assert result.found == []
    row = result.rows["SIGKILL", "idle"]
    assert (row.resumed, row.repeated, row.promotions) == (1, 0, 1)


@pytest.mark.slow
def test_a_request_that_crashes_again_may_wait_longer_than_the_patience(baseline: Workload, mark: str) -> None:
    """While others use its stage, the orchestrator lets it wait for 30 s. That is no hang."""
    operations = (Wait(300), Crash("first", "raise", "replay"), Settle(), Wait(10_500))
    result = run_schedule(replace(baseline, patience_s=10.0), Schedule("one", None, operations), mark)
    assert result.found == []
    (timing,) = result.rows["exception in step, replayed", "one"].timings
    assert timing.detected_s is not None
    assert timing.recovered_s is not None


@pytest.mark.slow
def test_a_request_keeps_the_version_of_its_adapter_through_a_kill_and_a_switch(baseline: Workload, mark: str) -> None:
    slow = configuration.load(baseline.pipeline, {"stages.first.options": {"step_s": 0.07}})  # they take 4 s
    operations = (
        *(Submit("audio, adapter"), Submit("text, adapter"), Wait(20), SwitchAdapter(1), Kill(("first", "second"))),
        *(Settle(), Submit("audio, adapter"), Wait(20), Kill(("second",)), SwitchAdapter(0), Settle()),
    )
    result = run_schedule(replace(baseline, pipeline=slow), Schedule("idle", None, operations), mark)
    assert result.found == []
    assert sum(row.repeated for row in result.rows.values()) >= 2


def test_an_answer_of_another_version_is_found(baseline: Workload, mark: str) -> None:
    names = [name for name in baseline.oracle if name.startswith("text, adapter, ")]
    swapped = dict(zip(names, [baseline.oracle[name] for name in reversed(names)], strict=True))
    wrong = replace(baseline, oracle={**baseline.oracle, **swapped})
    result = run_schedule(wrong, Schedule("idle", None, (Submit("text, adapter"), Settle())), mark)
    assert {violation.kind for violation in result.found} == {"corrupted"}


@pytest.mark.parametrize(
    ("engine", "schedule", "kinds", "words"),
    [
        ("Stutters", ONE_KILL, {"lost", "duplicated"}, "3840 bytes, 2880 expected"),
        pytest.param("Mute", ONE_KILL, {"hung"}, "has no outcome", marks=pytest.mark.slow),
        ("Faint", NO_FAULT, {"disturbed"}, "the harness did not kill it"),
        ("Daemon", ONE_KILL, {"leaked"}, "sleep 300"),
    ],
)
@pytest.mark.slow
def test_a_planted_bug_is_found(
    engine: str, schedule: Schedule, kinds: set[str], words: str, planted: Callable[[str], Workload], mark: str
) -> None:
    """``lost`` where the system itself saw that the second run differs, and ended the request for it."""
    result = run_schedule(planted(engine), schedule, mark)
    left = [psutil.Process(pid) for pid in leaks.marked_processes(mark)]
    for process in left:
        process.kill()
    psutil.wait_procs(left)
    assert {violation.kind for violation in result.found} >= kinds - {"lost"}
    assert {violation.kind for violation in result.found} <= kinds
    assert any(words in violation.what for violation in result.found), result.found
    assert sum(row.violations.total() for row in result.rows.values()) == len(result.found)


async def test_the_kill_helper_carries_out_orders_in_turn_and_keeps_their_times() -> None:
    began = time.monotonic()
    with ExitStack() as open_ones:
        sleepers = [open_ones.enter_context(subprocess.Popen(["sleep", "300"])) for _ in range(3)]  # noqa: ASYNC220
        one, *others = [open_ones.enter_context(Victim(sleeper.pid)) for sleeper in sleepers]
        kill_helper = open_ones.enter_context(KillHelper())
        first, second = kill_helper.send(signal.SIGTERM, [one]), kill_helper.send(signal.SIGKILL, others)
        with trio.fail_after(WATCHDOG_S):
            times: dict[int, float] = {}

            async def read_time(order: int) -> None:
                times[order] = await kill_helper.done_at(order)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read_time, second)
                nursery.start_soon(read_time, first)
        assert [sleeper.wait() for sleeper in sleepers] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGKILL]
    assert began < times[first] < times[second] < time.monotonic()


def test_a_descriptor_that_stays_open_here_is_found(
    baseline: Workload, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    create_ring = RefusingSpawner.create_ring

    def leaking(self: RefusingSpawner, producer: Address, consumer: Address, capacity: int, generation: int) -> Ring:
        ring = create_ring(self, producer, consumer, capacity, generation)
        kept.append(os.dup(ring.fds[0]))
        return ring

    monkeypatch.setattr(RefusingSpawner, "create_ring", leaking)
    result = run_schedule(baseline, Schedule("idle", None, ()), mark)
    for fd in kept:
        os.close(fd)
    assert [violation.kind for violation in result.found] == ["leaked"] * len(kept)
    assert all("memfd:ringbuf" in violation.what for violation in result.found)
    assert result.row("(none)", "idle").violations["leaked"] == len(kept)


def test_ended_requests_and_deaths_are_judged_and_forgotten(baseline: Workload, mark: str) -> None:
    """So that a soak's memory is its system's."""
    kept: list[object] = []

    async def work(omni: OmniSystem, driver: Driver) -> None:
        await driver.do(Kill(("first",)))
        await driver.until_settled()
        (foreign,) = omni.health().stages["second"]
        assert foreign.pid is not None
        os.kill(foreign.pid, signal.SIGKILL)
        await driver.watch.until(lambda: len(driver.watch.deaths) == 2)
        await driver.until_settled()
        driver.judge_ended()
        kept.extend([*driver.watch.deaths, *driver.watch.serving, *driver.killed])

    result = run_with_faults(baseline, "idle", None, mark, work)
    assert kept == []
    (violation,) = result.found
    assert violation.kind == "disturbed"
    assert "second.0: pid" in violation.what


@pytest.mark.slow
def test_a_soak_reads_memory_and_throughput(baseline: Workload, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak of two faults, however long these take."""
    for name, seconds in {"EVERY_S": 0.1, "BETWEEN_FAULTS_S": 0.1, "WARM_UP_S": 0.1, "FAULT_FREE_S": 1.0}.items():
        monkeypatch.setattr(soak, name, seconds)
    faults = soak.faults
    monkeypatch.setattr(soak, "faults", lambda *of: islice(faults(*of), 2))
    soaked = soak.soak(baseline, 600.0, mark, lambda facts: None)
    assert soaked.tally.found == []
    assert soaked.tally.faults == 2
    assert soaked.spared == "first"
    figures = soaked.as_json()
    for name in ("parent", "first.0"):
        times, sizes = zip(*figures["rss"][name]["samples"], strict=True)
        assert list(times) == sorted(times)
        assert all(1e7 < size < 1e11 for size in sizes)  # bytes; the tests before may have loaded models here
    assert figures["throughput"]["fault_free_per_s"] > 0
    assert figures["throughput"]["between_faults_s"] >= 0.1
    assert "| parent |" in soaked.as_markdown()


@pytest.mark.slow
def test_a_stage_that_is_put_to_sleep_once_it_was_given_up_counts_as_given_up(baseline: Workload, mark: str) -> None:
    """When its refusals are judged, it is not given up any more."""
    operations = (Storm("first", 5), Sleep("first", 30))
    result = run_schedule(baseline, Schedule("one", 2, operations), mark)
    assert result.found == []
    assert result.requests["StageUnavailable"] > 0
