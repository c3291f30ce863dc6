"""One run: a schedule on a system of its own.

At the end the load stops. Within ``patience_s`` every request must have its outcome, every stage must serve or be given
up, the workers must have the descriptors that they started with, and the system must hold no request. Then the system
is closed. No process, descriptor, thread, segment or temporary file may be left. A violation is counted at the last
fault before it.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from omni_actors import config as configuration
from omni_actors.stress import judge, leaks
from omni_actors.stress.driver import Driver
from omni_actors.stress.faults import KillHelper, RefusingSpawner
from omni_actors.stress.judge import Violation
from omni_actors.stress.oracle import Oracle
from omni_actors.stress.report import Tally
from omni_actors.stress.schedule import Load, Schedule
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

FREED_S = 5.0
CLOSED_S = 5.0
"""Seconds for closing, beyond the stages' own timeouts."""
OURS = re.compile(r"anon_inode:\[eventfd\]|/memfd:ringbuf|socket|pipe")
"""Descriptors that the runtime opens in a worker. An engine may open others."""


@dataclass
class Result:
    tally: Tally
    violations: list[Violation]


def run_schedule(workload: Workload, schedule: Schedule, mark: str) -> Result:
    """Run a schedule. mark: see ``run_with_faults``."""

    async def carry_out(_: OmniSystem, driver: Driver) -> None:
        for operation in schedule.operations:
            await driver.do(operation)

    return run_with_faults(workload, schedule.load, schedule.intensity, mark, carry_out)


def run_with_faults(
    workload: Workload,
    load: Load,
    intensity: int | None,
    mark: str,
    work: Callable[[OmniSystem, Driver], Awaitable[None]],
) -> Result:
    """Call ``work`` with an open system, and make the checks of this module.

    intensity: see ``Schedule``. mark: the value of ``leaks.MARKER`` in the environment.
    """

    async def live() -> tuple[Driver, float]:
        async with _open(workload, load, intensity) as (omni, driver):
            initial_descriptors = {stage: counts for stage, _, counts in worker_descriptors(omni)}
            await work(omni, driver)
            await _finish(omni, driver, workload, initial_descriptors)
            closing = time.monotonic()
        return driver, time.monotonic() - closing

    with temporary_directory() as directory:
        before = leaks.snapshot(mark, directory)
        driver, closed_s = trio.run(live)
        now = time.monotonic()
        found = [Violation("leaked", each) for each in leaks.left(before, leaks.snapshot(mark, directory))]
        allowed_s = CLOSED_S + sum(stage.shutdown_timeout_s for stage in workload.pipeline.stages.values())
        if closed_s > allowed_s:
            found.append(Violation("hung", f"closing took {closed_s:.1f} s; {allowed_s:g} s are fair"))
    seen = [*driver.violations, *driver.client.violations, *((now, violation) for violation in found)]
    for at, violation in seen:
        fault = next((fault for when, fault in reversed(driver.faults) if when <= at), "(none)")
        driver.tally.row(fault, load).violations[violation.kind] += 1
    driver.tally.runs = 1
    return Result(driver.tally, [violation for _, violation in seen])


def ask_oracle(workload: Workload) -> None:
    """Fill ``workload.oracle``: run each request once, alone, without faults."""

    async def ask() -> None:
        async with OmniSystem.open(workload.pipeline) as omni:
            for template in workload.templates.values():
                answer = workload.oracle[template.name] = Oracle()
                async for output in omni.submit(template.inputs, template.modalities, **template.params):
                    answer.add(output)

    trio.run(ask)


@asynccontextmanager
async def _open(workload: Workload, load: Load, intensity: int | None) -> AsyncIterator[tuple[OmniSystem, Driver]]:
    """Open a system of the workload's pipeline, with its load running."""
    overrides = (
        {} if intensity is None else {f"stages.{stage}.restart.intensity": intensity for stage in workload.stages}
    )
    spawner = RefusingSpawner()
    pipeline = configuration.load(workload.pipeline, overrides)
    with KillHelper() as kill_helper:
        async with OmniSystem.open(pipeline, spawner=spawner) as omni, trio.open_nursery() as nursery:
            yield (
                omni,
                Driver(
                    omni=omni, workload=workload, load=load, spawner=spawner, kill_helper=kill_helper, nursery=nursery
                ),
            )
            nursery.cancel_scope.cancel()


async def _finish(
    omni: OmniSystem, driver: Driver, workload: Workload, initial_descriptors: dict[str, Counter[str]]
) -> None:
    """Stop the load, and make the checks that need an open system. initial_descriptors: by stage."""
    client, watch = driver.client, driver.watch
    client.stop()
    found: list[Violation] = []
    with trio.move_on_after(workload.patience_s) as patience:
        await driver.until_quiet()
        while client.open:
            await client.ended.park()
        for stage in workload.stages:
            await client.until_ended(client.submit(workload.probe(stage), "replay"))
    if patience.cancelled_caught:
        for stage, replicas in omni.health().stages.items():
            loading = [each for each in replicas if each.state not in ("ready", "failed")]
            found += [Violation("hung", f"{stage}.{each.replica} is {each.state}: {each.note}") for each in loading]
        for asked in client.open:
            found.append(Violation("hung", f"{asked.name} ({asked.template.name}) has no outcome"))
            client.drop(asked)
    with trio.move_on_after(FREED_S):
        while omni.in_flight or _grown(omni, initial_descriptors):  # noqa: ASYNC110 - no event reports it
            await trio.sleep(0.01)
    if omni.in_flight:
        found.append(Violation("leaked", f"{omni.in_flight} requests are still in flight"))
    found += [Violation("leaked", fact) for fact in _grown(omni, initial_descriptors)]
    client.judge_ended()
    asked_for = driver.asked_for + Counter(stage for ends in driver.refused for stage in set(ends))
    unexplained, _ = judge.check_deaths(watch.deaths, driver.killed, asked_for)
    found += unexplained
    found += judge.check_restarts(watch.deaths, watch.given_up, omni.pipeline)
    driver.violations += [(time.monotonic(), violation) for violation in found]


def worker_descriptors(omni: OmniSystem) -> list[tuple[str, int, Counter[str]]]:
    """For each ready worker: its stage, its pid, and its runtime descriptors and mapped rings, counted by kind."""
    found = []
    for stage, replicas in omni.health().stages.items():
        for each in replicas:
            if each.state == "ready" and each.pid is not None:
                with suppress(OSError):  # it died since
                    kinds = [OURS.match(target) for _, target in leaks.descriptors(each.pid)]
                    counts = Counter(kind[0] for kind in kinds if kind)
                    counts["mapped rings"] = len(leaks.ring_mappings(each.pid))
                    found.append((stage, each.pid, counts))
    return found


def _grown(omni: OmniSystem, initial_descriptors: dict[str, Counter[str]]) -> list[str]:
    return [
        f"{stage}, pid {pid}: {dict(counts)}, at the start {dict(initial_descriptors[stage])}"
        for stage, pid, counts in worker_descriptors(omni)
        if counts - initial_descriptors[stage]  # fewer are right: a neighbour may be given up
    ]


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory for the temporary files of this process and its children."""
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="omni-actors-stress-") as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = before[1]
            if before[0] is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before[0]
