"""``autoscale`` in a running system: on simulated workers in virtual time, and once with processes."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from omni_actors.config import Autoscale, Pipeline, Restart, Stage, explain, load
from omni_actors.errors import ConfigError, StageUnavailable
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import Address
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import WorkerBehavior
from omni_actors.system import OmniSystem
from omni_actors.system.autoscaling import RETRY_S
from tests.support.echo_systems import OFTEN, WATCHDOG_S, one_stage, read, wait_for

LOAD_S = 2.0
DOWN_AFTER_S = 20.0
DECIDED_S = 0.5
VIRTUAL_S = 1000.0


class Autoscaled:
    """A system whose second stage is scaled by its load, on simulated workers that load for ``LOAD_S``."""

    def __init__(self) -> None:
        self.behavior = WorkerBehavior(load_s=LOAD_S, turn_s=0.1)
        self.spawner = SimulatedSpawner(lambda address, pid: self.behavior, lambda note: None)
        self.omni: OmniSystem

    @property
    def states(self) -> list[str]:
        return [each.state for each in self.omni.health().stages["second"]]

    @property
    def wanted(self) -> float | None:
        return self.omni.metrics.registry.get_sample_value("omni_stage_replicas_wanted", {"stage": "second"})

    def ask(self, pieces: int = 100) -> Generation:
        return self.omni.submit({"script": [Input({"n": n}) for n in range(pieces)]}, ["audio"])


@asynccontextmanager
async def opened(replicas: int = 1, restart: Restart = OFTEN, **terms: Any) -> AsyncIterator[Autoscaled]:
    bounds = Autoscale(**{"max": 3, "concurrency": 2, "down_after_s": DOWN_AFTER_S, **terms})
    stages = {
        "first": Stage(engine="echo", accepts=("script",)),
        "second": Stage(
            engine="echo", inputs=("first",), emits="audio", replicas=replicas, autoscale=bounds, restart=restart
        ),
    }
    system = Autoscaled()
    with trio.fail_after(VIRTUAL_S):
        async with OmniSystem.open(Pipeline(name="scaled", stages=stages), spawner=system.spawner) as system.omni:
            yield system


async def test_a_number_that_was_decided_before_scale_changed_it_is_dropped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened() as system, trio.open_nursery() as nursery:
        async with system.omni._changing["second"]:
            nursery.start_soon(system.omni.scale, "second", 3)
            running = [system.ask() for _ in range(3)]
            await trio.sleep(1.0 + 2 * DECIDED_S + 0.1)  # the rule has decided for 2, which waits behind ``scale``
        await trio.sleep(LOAD_S + 0.1)
        assert system.wanted == 3
        assert system.states == ["ready"] * 3
        await complete(running)


async def complete(generations: list[Generation], pieces: int = 100) -> None:
    for each in generations:
        assert [output.data["n"] async for output in each] == list(range(pieces))


async def test_replicas_follow_the_load(autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as system:
        running = [system.ask() for _ in range(5)]
        await trio.sleep(1.0 + 2 * DECIDED_S + 0.1)  # queue_time_s, and the decision
        assert (system.wanted, system.states) == (3, ["ready", "loading", "loading"])
        await trio.sleep(LOAD_S)
        assert system.states == ["ready"] * 3
        await complete(running)
        await trio.sleep(DOWN_AFTER_S / 2)
        assert system.states == ["ready"] * 3
        await trio.sleep(2 * DOWN_AFTER_S)
        assert (system.wanted, system.states) == (1, ["ready"])


async def test_a_load_that_returns_takes_a_draining_replica_back(autojump_clock: trio.testing.MockClock) -> None:
    """Three long requests, one at each replica, fit two of them."""
    async with opened() as system:
        first = [system.ask() for _ in range(5)]
        while system.states != ["ready"] * 3:
            await system.omni.wait_changed()
        await complete(first)
        long = [system.ask(1500) for _ in range(3)]
        while "draining" not in system.states:
            await system.omni.wait_changed()
        more = [system.ask(300) for _ in range(20)]
        while "draining" in system.states:
            await system.omni.wait_changed()
        assert system.states == ["ready"] * 3, "it was not removed"
        await complete(more, 300)
        await complete(long, 1500)


async def test_a_load_that_fits_changes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as system:
        running = [system.ask() for _ in range(2)]
        await trio.sleep(10.0)
        assert system.states == ["ready"]
        await complete(running)


async def test_the_first_request_starts_a_replica_and_the_last_one_ends_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened(replicas=0, min=0) as system:
        assert (system.wanted, system.states, system.omni.health().ready) == (0, [], True)
        await complete([system.ask(3)], 3)
        assert (system.wanted, system.states) == (1, ["ready"])
        await trio.sleep(3 * DOWN_AFTER_S)
        assert (system.wanted, system.states) == (0, [])
        await complete([system.ask(3)], 3)


async def test_a_pause_is_no_reason_to_scale(autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as system:
        await system.omni.pause_generation("wait")
        waiting = [system.ask(3) for _ in range(5)]
        await trio.sleep(10.0)
        assert system.states == ["ready"]
        await system.omni.resume_generation()
        await complete(waiting, 3)


async def test_a_replica_that_cannot_load_is_tried_again_later(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as system:
        system.behavior = WorkerBehavior(fails="no memory")
        running = [system.ask(500) for _ in range(5)]
        await trio.sleep(10.0)
        assert (system.wanted, system.states) == (1, ["ready"])
        assert [record.message for record in caplog.records if "cannot be scaled to 3" in record.message]
        system.behavior = WorkerBehavior(turn_s=0.1)
        await trio.sleep(35.0)
        assert system.states == ["ready"] * 3
        await complete(running, 500)


async def test_a_replica_that_cannot_be_prepared_is_tried_again_later(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async with opened() as system:
        with monkeypatch.context() as patched:
            patched.setattr("omni_actors.system.scaling.machine.layout", fail)
            running = [system.ask(500) for _ in range(5)]
            await trio.sleep(10.0)
            assert (system.wanted, system.states) == (1, ["ready"])
        await trio.sleep(RETRY_S + LOAD_S)
        assert system.states == ["ready"] * 3
        await complete(running, 500)


async def test_a_replica_that_no_node_has_room_for_is_tried_again_later(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others, for which there is room, stay."""

    async def wait(address: Address, on_waiting: Callable[[str], None]) -> None:
        if address.replica == 2:
            on_waiting("no node can run second.2: a: it is full")
            await trio.sleep_forever()

    async with opened() as system:
        running = [system.ask(1000) for _ in range(5)]
        with monkeypatch.context() as patched:
            patched.setattr(system.spawner, "wait_place", wait)
            await trio.sleep(RETRY_S)
            assert (system.wanted, system.states) == (2, ["ready"] * 2)
            assert [each.message for each in caplog.records if "it is full" in each.message]
        await trio.sleep(RETRY_S + LOAD_S)
        assert system.states == ["ready"] * 3
        await complete(running, 1000)


async def test_a_request_waits_for_a_replica_that_waits_for_room(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that had room are lost, and come back. Meanwhile the stage may be scaled."""
    is_back = trio.Event()

    async def wait(address: Address, on_waiting: Callable[[str], None]) -> None:
        if not is_back.is_set():
            on_waiting("a: it is lost")
            await is_back.wait()

    async with opened(replicas=0, min=0) as system:
        monkeypatch.setattr(system.spawner, "wait_place", wait)
        waiting = system.ask()
        await trio.sleep(DECIDED_S)
        for _ in range(2):
            notes = [each.note for each in system.omni.health().stages["second"]]
            assert (system.wanted, notes) == (1, ["a: it is lost"])
            await system.omni.scale("second", 1)
        is_back.set()
        await complete([waiting])


async def test_replicas_that_were_given_up_for_good_are_no_capacity(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=3, restart=Restart(type="temporary")) as system:
        for number in (1, 2):
            system.spawner.living[Address("second", number)].kill()
        await trio.sleep(0.1)
        assert (system.wanted, system.states) == (3, ["ready", "failed", "failed"])
        running = [system.ask(1000) for _ in range(5)]
        await trio.sleep(RETRY_S + 3 * DECIDED_S + LOAD_S + 0.1)
        assert (system.wanted, system.states) == (3, ["ready"] * 3)
        await complete(running, 1000)


@pytest.mark.parametrize("least", [0, 1])
async def test_a_stage_that_was_given_up_for_good_serves_again(
    least: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(restart=Restart(type="temporary"), min=least) as system:
        system.spawner.living[Address("second", 0)].kill()
        await trio.sleep(RETRY_S / 2)
        assert system.states == ["failed"]
        with pytest.raises(StageUnavailable):
            system.ask()
        system.behavior = WorkerBehavior(fails="no memory")
        await trio.sleep(RETRY_S)
        if least:
            assert system.states == ["failed"], "its replacement cannot load"
            with pytest.raises(StageUnavailable):
                system.ask()
        system.behavior = WorkerBehavior(turn_s=0.1)
        await trio.sleep(2 * RETRY_S)
        assert system.states == ["ready"] * least
        await complete([system.ask(3)], 3)


async def test_a_draining_replica_returns_when_the_last_other_one_is_given_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened(replicas=2, restart=Restart(type="temporary")) as system, trio.open_nursery() as nursery:
        running = [system.ask(1000) for _ in range(2)]
        await trio.sleep(1.0)
        nursery.start_soon(partial(system.omni.scale, "second", 1, drain_s=250.0))
        await trio.sleep(0.1)
        assert system.states == ["ready", "draining"]
        system.spawner.living[Address("second", 0)].kill()
        await trio.sleep(RETRY_S + 2 * DECIDED_S)
        assert system.states == ["ready"]
        with pytest.raises(StageUnavailable):
            await complete(running[:1], 1000)
        await complete(running[1:], 1000)


@pytest.mark.slow
async def test_with_processes_nothing_is_lost() -> None:
    """Load comes, a replica is added; load ends, it is removed."""
    bounds = Autoscale(max=2, queue_time_s=0.2, down_after_s=1.5, concurrency=1)
    async with OmniSystem.open(one_stage(options={"step_s": 0.02}, autoscale=bounds)) as omni:
        enough = trio.Event()

        async def client(number: int) -> None:
            while not enough.is_set():
                pieces = [Input({"n": n, "client": number}) for n in range(20)]
                outputs = await read(omni.submit({"script": pieces}, ["audio"]))
                assert [(each.data["n"], each.data["client"]) for each in outputs] == [(n, number) for n in range(20)]

        def states() -> list[str]:
            return [each.state for each in omni.health().stages["only"]]

        with trio.fail_after(WATCHDOG_S):
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(client, number)
                await wait_for(omni, lambda: states() == ["ready", "ready"])
                enough.set()
            await wait_for(omni, lambda: states() == ["ready"])
        assert omni.metrics.registry.get_sample_value("omni_stage_replicas_wanted", {"stage": "only"}) == 1
        outcomes = omni.metrics.registry.get_sample_value("omni_requests_total", {"outcome": "done"})
        assert outcomes is not None
        assert outcomes >= 3
        assert math.isclose(omni.metrics.registry.get_sample_value("omni_request_replays_total") or 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"autoscale": {"min": 3, "max": 2}}, "autoscale.min: found 3; accepted: at most autoscale.max, which is 2"),
        ({"autoscale": {"max": 2}, "replicas": 3}, "replicas: found 3"),
        ({"autoscale": {"min": 1}}, "'max'"),
        ({"autoscale": {"max": 65}}, "autoscale.max: found 65"),
        ({"autoscale": {"max": 2, "queue_time_s": 0}}, "autoscale.queue_time_s: found 0"),
        ({"autoscale": {"max": 3}, "device": "cuda", "devices": [0, 1]}, "devices: found [0, 1]"),
    ],
)
def test_bounds_that_cannot_work_are_refused(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("echo", {f"stages.first.{name}": value for name, value in changes.items()})
    assert found in str(caught.value)


def test_explain_shows_the_bounds_and_their_defaults() -> None:
    rows = explain("echo", {"stages.first.autoscale": {"max": 4}})
    prefix = "stages.first.autoscale."
    shown = {each.path.removeprefix(prefix): each.value for each in rows if each.path.startswith(prefix)}
    assert shown == {"min": 1, "max": 4, "queue_time_s": 1.0, "down_after_s": 300.0, "concurrency": None}


def test_the_largest_number_of_replicas_counts_for_devices_and_concurrency_comes_from_the_engine() -> None:
    stage = Stage(engine="llm", accepts=("messages",), emits="text", model="x", autoscale=Autoscale(max=4), standby=1)
    assert (stage.workers, stage.most_workers) == (2, 5)
    pipeline = Pipeline(name="one", stages={"llm": stage})
    assert pipeline.concurrency("llm") == pipeline.options("llm")["max_batch"]
