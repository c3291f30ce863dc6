"""One run: a schedule on a system of its own.

At the end the load stops. Within ``patience_s`` every request must have its outcome, every stage must serve or be given
up, the workers must have the descriptors that they started with, and the system must have no request. Then the system
is closed. No process, descriptor, thread, segment or temporary file may be left. A violation is counted at the last
fault before it.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import trio

from omni_actors import config as configuration
from omni_actors.cluster.spawner import ClusterSpawner
from omni_actors.stress import judge, leaks
from omni_actors.stress.adapters import oracle_name, save_versions, uses_adapter
from omni_actors.stress.controls import Controls
from omni_actors.stress.driver import Driver
from omni_actors.stress.faults import KillHelper, RefusingSpawner
from omni_actors.stress.health_watch import HealthWatch
from omni_actors.stress.judge import Violation
from omni_actors.stress.nodes import LEASE_S, open_nodes
from omni_actors.stress.oracle import Oracle
from omni_actors.stress.report import Tally
from omni_actors.stress.schedule import Load, Schedule
from omni_actors.stress.workload import ADAPTER, Workload
from omni_actors.system import OmniSystem, ReplicaHealth

FREED_S = 5.0
CLOSED_S = 5.0
"""Seconds for closing, beyond the stages' own timeouts."""
OURS = re.compile(r"anon_inode:\[eventfd\]|/memfd:ringbuf|socket|pipe")
"""Descriptors that the runtime opens in a worker. An engine may open others."""


def run_schedule(workload: Workload, schedule: Schedule, mark: str) -> Tally:
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
) -> Tally:
    """Call ``work`` with an open system, and make the checks of this module.

    intensity: see ``Schedule``. mark: the value of ``leaks.MARKER`` in the environment.
    """

    restarts = {} if intensity is None else {f"stages.{each}.restart.intensity": intensity for each in workload.stages}
    pipeline = configuration.load(workload.pipeline, restarts)

    async def live() -> tuple[Driver, float]:
        with KillHelper() as kill_helper:
            async with (
                open_nodes(pipeline, workload.cluster) as nodes,
                OmniSystem.open(pipeline, spawner=(spawner := RefusingSpawner(nodes))) as omni,
                trio.open_nursery() as nursery,
            ):
                if uses_adapter(workload):
                    await omni.add_lora(ADAPTER, versions[0])
                driver = Driver(
                    omni=omni,
                    workload=workload,
                    load=load,
                    spawner=spawner,
                    cluster=nodes if isinstance(nodes, ClusterSpawner) else None,
                    kill_helper=kill_helper,
                    nursery=nursery,
                    adapters=versions,
                    controls=Controls(omni, workload, versions[0] / "adapter_model.safetensors", time.monotonic),
                )
                initial_descriptors = {stage: counts for stage, _, counts in _worker_descriptors(driver.watch.replicas)}
                await work(omni, driver)
                await _finish(omni, driver, workload, initial_descriptors)
                nursery.cancel_scope.cancel()
                closing = time.monotonic()
        return driver, time.monotonic() - closing

    with _temporary_directory() as directory:
        versions = save_versions(directory)
        before = leaks.snapshot(mark, directory)
        driver, closed_s = trio.run(live)
        now = time.monotonic()
        found = [Violation("leaked", each) for each in leaks.left(before, leaks.snapshot(mark, directory))]
        found += _slow_closing(workload, closed_s)
    driver.tally.runs = 1
    for at, violation in [*driver.violations, *driver.client.violations, *((now, violation) for violation in found)]:
        driver.tally.violated(driver.fault_at(at), load, violation)
    return driver.tally


def _slow_closing(workload: Workload, closed_s: float) -> list[Violation]:
    """Return the violation of a system that took too long to close, if it did."""
    allowed_s = CLOSED_S + sum(stage.shutdown_timeout_s for stage in workload.pipeline.stages.values())
    if workload.cluster is not None:
        allowed_s += 2 * LEASE_S  # the workers of a lost node may be waited for
    if closed_s <= allowed_s:
        return []
    return [Violation("hung", f"closing took {closed_s:.1f} s; at most {allowed_s:g} s are allowed")]


def ask_oracle(workload: Workload) -> None:
    """Fill ``workload.oracle``: run each request once, alone, without faults."""

    async def ask() -> None:
        async with OmniSystem.open(workload.pipeline) as omni:
            for version in versions:
                if uses_adapter(workload):
                    await omni.add_lora(ADAPTER, version)
                for template in workload.templates.values():
                    if (name := oracle_name(omni, template)) not in workload.oracle:
                        answer = workload.oracle[name] = Oracle()
                        async for output in omni.submit(template.inputs, template.modalities, **template.params):
                            answer.add(output)

    with tempfile.TemporaryDirectory(prefix="omni-actors-stress-") as directory:
        versions = save_versions(Path(directory))
        trio.run(ask)


async def _finish(
    omni: OmniSystem, driver: Driver, workload: Workload, initial_descriptors: dict[str, Counter[str]]
) -> None:
    """Stop the load, and make the checks that need an open system. initial_descriptors: by stage."""
    client, watch = driver.client, driver.watch
    client.stopping = True
    found: list[Violation] = []
    with driver.patience() as patience:
        await driver.until_settled()
        while client.open:
            await client.ended.park()
        for stage in workload.stages:
            await client.until_ended(client.submit(workload.probe(stage), "replay"))
    if patience.cancelled_caught:
        found += [Violation("hung", fact) for fact in watch.unsettled]
        for request in client.open:
            found.append(Violation("hung", f"{request.name} ({request.template.name}) has no outcome"))
            client.drop(request)
    with trio.move_on_after(FREED_S):
        while omni.in_flight or _grown(watch, initial_descriptors):  # noqa: ASYNC110 - no event reports it
            await trio.sleep(0.01)
    if omni.in_flight:
        found.append(Violation("leaked", f"{omni.in_flight} requests are still in flight"))
    found += [Violation("leaked", fact) for fact in _grown(watch, initial_descriptors)]
    client.judge_ended()
    requested_deaths = driver.requested_deaths + driver.spawner.refused
    unexplained, _ = judge.check_deaths(
        watch.deaths, driver.killed, requested_deaths, explanations=driver.node_faults.explanations
    )
    found += unexplained
    found += judge.check_restarts(watch.deaths, watch.given_up, omni.pipeline)
    driver.violations += [(time.monotonic(), violation) for violation in found]


def _worker_descriptors(replicas: Iterable[tuple[str, ReplicaHealth]]) -> Iterator[tuple[str, int, Counter[str]]]:
    """For each ready worker: its stage, its pid, and its runtime descriptors and mapped rings, counted by kind."""
    for stage, each in replicas:
        if each.state == "ready" and each.pid is not None:
            with suppress(OSError):  # it died since
                kinds = [OURS.match(target) for _, target in leaks.descriptors(each.pid)]
                rings = {"mapped rings": len(leaks.ring_mappings(each.pid))}
                yield stage, each.pid, Counter(kind[0] for kind in kinds if kind) + Counter(rings)


def _grown(watch: HealthWatch, initial_descriptors: dict[str, Counter[str]]) -> list[str]:
    return [
        f"{stage}, pid {pid}: {dict(counts)}, at the start {dict(initial_descriptors[stage])}"
        for stage, pid, counts in _worker_descriptors(watch.replicas)
        if counts - initial_descriptors[stage]  # fewer are right: a neighbour may be given up
    ]


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """A directory for the temporary files of this process and its children."""
    with (
        tempfile.TemporaryDirectory(prefix="omni-actors-stress-") as name,
        mock.patch.dict(os.environ, TMPDIR=name),
        mock.patch.object(tempfile, "tempdir", name),
    ):
        yield Path(name)
