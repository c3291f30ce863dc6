"""Scaling a stage while it serves: on simulated workers in virtual time, and once with processes."""

from __future__ import annotations

import itertools
import logging
import math
import os
import signal
import uuid
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing

from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.config.devices import DeviceLayoutError
from omni_actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    StageAsleep,
    StageFailed,
    StageUnavailable,
    SystemClosed,
    TemporarilyRefused,
)
from omni_actors.log_events import AutoscaleFailed, ReplicaGivenUp, WorkerDied, log
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import Address
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import WorkerBehavior
from omni_actors.system import OmniSystem, Scaled, workers
from tests.support.echo_systems import one_stage, read
from tests.support.scaled_system import LOAD_S, Scaling, numbers, opened

RING_BYTES = 64 * 1024


async def test_replicas_come_and_go_while_requests_run(autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as scaling:
        omni = scaling.omni
        before = [scaling.ask(40) for _ in range(6)]  # longer than the new replicas load
        assert await omni.scale("second", 3) == Scaled(stage="second", before=1, after=3, seconds=pytest.approx(LOAD_S))
        assert scaling.states == {0: "ready", 1: "ready", 2: "ready"}
        metrics = omni.metrics.exposition().decode()
        for figure in ("wanted", "ready"):
            assert f'omni_stage_replicas_{figure}{{stage="second"}} 3.0' in metrics
        after = [scaling.ask(20) for _ in range(6)]
        await trio.sleep(0.1)
        assert scaling.loads() == {0: 6, 1: 3, 2: 3}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(omni.scale, "second", 1)
            await trio.sleep(0.1)
            assert sorted(scaling.states.values()) == ["draining", "draining", "ready"]
            late = scaling.ask(2)
            assert await numbers(late) == [0, 1]
            for each in (*before, *after):
                assert await numbers(each) == list(range(40 if each in before else 20))
                assert each.stream.request.replays == 0
        assert list(scaling.states.values()) == ["ready"]
        assert len([pair for pair in omni._edges.statistics() if pair[1].stage == "second"]) == 1


async def test_the_replicas_with_the_fewest_requests_leave(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=3, routing="round_robin") as scaling:
        running = [scaling.ask(pieces) for pieces in (1, 50, 2)]
        await trio.sleep(1)
        assert scaling.loads() == {0: 0, 1: 1, 2: 0}
        await scaling.omni.scale("second", 1)
        assert scaling.states == {1: "ready"}
        for each in running:
            await numbers(each)


async def test_requests_that_are_left_after_the_drain_resume_elsewhere(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=2) as scaling:
        running = [scaling.ask(100) for _ in range(4)]
        await trio.sleep(1)
        scaled = await scaling.omni.scale("second", 1, drain_s=0.5)
        assert 0.5 <= scaled.seconds < 3
        assert scaling.states == {0: "ready"}
        for each in running:
            assert await numbers(each) == list(range(100))
        assert sorted(each.stream.request.replays for each in running) == [0, 0, 1, 1]
        assert all(not each.stream.request.deaths.charged for each in running)


async def test_requests_of_a_killed_replica_resume_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Another replica serves them long before the killed one has loaded again."""
    async with opened(replicas=2) as scaling:
        running = [scaling.ask(50) for _ in range(4)]
        await trio.sleep(1)
        assert scaling.loads() == {0: 2, 1: 2}
        scaling.spawner.living[Address("second", 1)].kill()
        await trio.sleep(0.01)
        assert (scaling.loads(), scaling.states[1]) == ({0: 4, 1: 0}, "restarting")
        for each in running:
            assert await numbers(each) == list(range(50))


async def test_requests_of_a_session_prefer_one_replica(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=2, routing="round_robin") as scaling:
        for session, expected in (("a", {0: 3, 1: 0}), (None, {0: 1, 1: 2})):
            running = [scaling.ask(session=session) for _ in range(3)]
            await trio.sleep(0.01)
            assert scaling.loads() == expected
            for each in running:
                await numbers(each)


async def test_a_paused_stage_is_scaled(autojump_clock: trio.testing.MockClock) -> None:
    """A new replica makes no step either, and requests of a removed one go on elsewhere after the pause."""
    async with opened() as scaling:
        omni = scaling.omni
        running = [scaling.ask(50) for _ in range(2)]
        await trio.sleep(1)
        await omni.pause_generation("keep")
        await omni.scale("second", 2)
        assert scaling.states == {0: "ready", 1: "ready"}
        await omni.scale("second", 1, drain_s=1.0)
        assert list(scaling.states.values()) == ["ready"]
        waiting = scaling.ask()
        await trio.sleep(10)
        assert (omni.in_flight, await omni.is_paused()) == (3, True)
        await omni.resume_generation()
        assert await numbers(waiting) == [0, 1, 2]
        for each in running:
            assert await numbers(each) == list(range(50))


async def test_a_replica_that_is_added_has_devices_of_its_own(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"GPU-{uuid.uuid4()}" for _ in range(3)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    async with opened(device="cuda:1") as scaling:

        def devices() -> list[tuple[str, ...]]:
            return [each.devices for each in scaling.omni.health().stages["second"]]

        await scaling.omni.scale("second", 2)
        assert devices() == [(names[1],), (names[2],)]
        with pytest.raises(InvalidRequest, match="only 3 devices are visible") as caught:
            await scaling.omni.scale("second", 3)
        assert (caught.value.param, caught.value.code) == ("replicas", "no_devices")
        assert len(devices()) == 2
        assert (await scaling.omni.scale("second", 1)).before == 2


async def test_a_number_that_is_free_again_goes_on_with_its_generations(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=2) as scaling:
        await scaling.omni.scale("second", 1)
        await scaling.omni.scale("second", 2)
        one = scaling.omni.health().stages["second"][1]
        assert (one.replica, one.generation, one.restarts) == (1, 2, 0)


async def test_requests_wait_for_a_stage_without_replicas(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=0) as scaling:
        assert not scaling.omni.health().ready
        waiting = scaling.ask()
        with pytest.raises(DeadlineExceeded):
            await numbers(scaling.ask(deadline_s=1.0))
        await scaling.omni.scale("second", 1)
        assert await numbers(waiting) == [0, 1, 2]
        await scaling.omni.scale("second", 0)
        assert scaling.states == {}


async def test_a_request_scales_from_zero_where_the_pipeline_allows_it(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, log.name)
    async with opened(replicas=0, scale_from_zero=True) as scaling:
        assert scaling.omni.health().ready
        assert await numbers(scaling.ask()) == [0, 1, 2]
        assert scaling.states == {0: "ready"}
        await scaling.omni.scale("second", 0)
        scaling.behavior = WorkerBehavior(fails="no memory")
        with pytest.raises(StageUnavailable, match="no memory"):
            await numbers(scaling.ask())
        while scaling.states:
            await scaling.omni.wait_changed()
        await trio.testing.wait_all_tasks_blocked()
        logged = [type(record.event) for record in caplog.records if record.name == log.name]
        assert logged == [WorkerDied, ReplicaGivenUp, AutoscaleFailed]
        scaling.behavior = WorkerBehavior()
        assert await numbers(scaling.ask()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "of_scale"),
    [(DeviceLayoutError((0,), 1, 1, "gone"), InvalidRequest), (OSError(24, "gone"), TemporarilyRefused)],
)
async def test_a_stage_for_which_no_replica_can_be_prepared_refuses_its_requests(
    error: Exception, of_scale: type[Exception], autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    async with opened(replicas=0, scale_from_zero=True) as scaling:
        with monkeypatch.context() as patched:
            patched.setattr("omni_actors.system.scaling.machine.layout", fail)
            for _ in range(2):
                with pytest.raises(TemporarilyRefused, match="gone") as caught:
                    await numbers(scaling.ask())
                assert caught.value.code == "cannot_start"
            with pytest.raises(of_scale, match="gone"):
                await scaling.omni.scale("second", 2)
        assert await numbers(scaling.ask()) == [0, 1, 2]


async def test_a_replica_that_cannot_load_is_removed_again(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(restart=Restart()) as scaling:
        scaling.behavior = WorkerBehavior(fails="no memory")
        with pytest.raises(StageFailed, match="no memory"):
            await scaling.omni.scale("second", 3)
        assert scaling.states == {0: "ready"}
        scaling.behavior = WorkerBehavior()
        assert (await scaling.omni.scale("second", 2)).before == 1


async def test_a_worker_that_loads_serves_if_the_other_one_of_a_replica_and_a_standby_cannot(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened(restart=Restart(), replicas=0, standby=1) as scaling:
        scaling.of_replica[1] = WorkerBehavior(fails="no memory")
        with pytest.raises(StageFailed, match="no memory"):
            await scaling.omni.scale("second", 1)
        assert scaling.states == {0: "ready"}
        assert await numbers(scaling.ask()) == [0, 1, 2]
        scaling.of_replica.clear()
        assert (await scaling.omni.scale("second", 1)).before == 1
        assert scaling.states == {0: "ready", 1: "ready"}


async def test_a_change_replaces_replicas_that_were_given_up_for_good(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=2, restart=Restart(type="temporary")) as scaling:
        for number in (0, 1):
            scaling.spawner.living[Address("second", number)].kill()
        await trio.sleep(0.1)
        assert scaling.states == {0: "failed", 1: "failed"}
        with pytest.raises(StageUnavailable):
            scaling.ask()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scaling.omni.scale, "second", 2)
            await trio.sleep(LOAD_S / 2)
            assert scaling.states == {0: "loading", 1: "loading"}
            waiting = scaling.ask()
        assert scaling.states == {0: "ready", 1: "ready"}
        assert await numbers(waiting) == [0, 1, 2]
        scaling.spawner.living[Address("second", 0)].kill()
        await trio.sleep(0.1)
        assert (await scaling.omni.scale("second", 1)).before == 2
        assert scaling.states == {1: "ready"}


async def test_sleep_during_a_change_leaves_a_given_up_stage_as_it_was(autojump_clock: trio.testing.MockClock) -> None:
    """At each point of the change: either it came first, or it has changed nothing. The stage is tried when woken."""
    for turns in range(12):
        async with opened(restart=Restart(type="temporary")) as scaling, trio.open_nursery() as nursery:
            scaling.spawner.living[Address("second", 0)].kill()
            await trio.sleep(0.1)
            nursery.start_soon(scale_unless_asleep, scaling)
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            await scaling.omni.sleep(2, stages=["second"])
            await scaling.omni.wake_up()
            assert scaling.states == {0: "ready"}
            assert await numbers(scaling.ask()) == [0, 1, 2]


async def test_a_cancelled_change_never_leaves_a_stage_without_replicas(autojump_clock: trio.testing.MockClock) -> None:
    """One replica is given up, and the request of a draining one is ending."""
    for early, turns in itertools.product(range(3), range(0, 12, 2)):
        async with opened(replicas=2, restart=Restart(type="temporary")) as scaling, trio.open_nursery() as nursery:
            running = [scaling.ask(30) for _ in range(2)]
            await trio.sleep(1)
            nursery.start_soon(scaling.omni.scale, "second", 1)
            await trio.sleep(0.1)
            assert scaling.states == {0: "ready", 1: "draining"}
            scaling.spawner.living[Address("second", 0)].kill()
            with pytest.raises(StageUnavailable):
                await numbers(running[0])
            async for output in running[1]:
                if output.data["n"] == 28:
                    break
            await trio.sleep(0.1)
            for _ in range(early):
                await trio.lowlevel.checkpoint()
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel_after, turns, scope)
                await scaling.omni.scale("second", 1)
            await trio.sleep(2 * LOAD_S)
            assert scaling.states, f"cancelled {turns} turns after its begin"
            if list(scaling.states.values()) == ["ready"]:
                assert await numbers(scaling.ask()) == [0, 1, 2]
            else:
                with pytest.raises(StageUnavailable):
                    scaling.ask()


async def scale_unless_asleep(scaling: Scaling) -> None:
    with suppress(StageAsleep):
        await scaling.omni.scale("second", 1)


async def cancel_after(turns: int, scope: trio.CancelScope) -> None:
    for _ in range(turns):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_fewer_replicas_after_all_were_given_up(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=3, restart=Restart(type="temporary")) as scaling:
        for number in range(3):
            scaling.spawner.living[Address("second", number)].kill()
        await trio.sleep(0.1)
        scaling.behavior = WorkerBehavior(fails="no memory")
        with pytest.raises(StageFailed, match="no memory"):
            await scaling.omni.scale("second", 1)
        assert scaling.states == {0: "failed"}
        scaling.behavior = WorkerBehavior()
        assert (await scaling.omni.scale("second", 1)).before == 1
        assert scaling.states == {0: "ready"}


@pytest.mark.parametrize("replicas", [1, 3])
async def test_a_stage_that_was_given_up_stays_so_if_no_replacement_can_load(
    replicas: int, autojump_clock: trio.testing.MockClock
) -> None:
    """A request for it would otherwise wait for a replica that never comes."""
    async with opened(restart=Restart(type="temporary")) as scaling:
        scaling.spawner.living[Address("second", 0)].kill()
        await trio.sleep(0.1)
        scaling.behavior = WorkerBehavior(fails="no memory")
        with pytest.raises(StageFailed, match="no memory"):
            await scaling.omni.scale("second", replicas)
        assert scaling.states == {0: "failed"}
        with pytest.raises(StageUnavailable):
            scaling.ask()
        scaling.behavior = WorkerBehavior()
        await scaling.omni.scale("second", replicas)
        assert await numbers(scaling.ask()) == [0, 1, 2]


async def test_a_cancelled_change_whose_replica_cannot_load_leaves_nothing_in_the_way(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened(restart=Restart()) as scaling:
        scaling.behavior = WorkerBehavior(load_s=LOAD_S, fails="no memory")
        with trio.move_on_after(LOAD_S / 2):
            await scaling.omni.scale("second", 2)
        await trio.sleep(LOAD_S)
        assert scaling.states == {0: "ready", 1: "failed"}
        scaling.behavior = WorkerBehavior()
        await scaling.omni.scale("second", 2)
        assert scaling.states == {0: "ready", 1: "ready"}


async def test_a_later_change_waits_for_the_one_that_runs(autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as scaling:
        results = list[Scaled]()

        async def scale(replicas: int) -> None:
            results.append(await scaling.omni.scale("second", replicas))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(scale, 3)
            await trio.sleep(LOAD_S / 2)
            nursery.start_soon(scale, 2)
        assert [(each.before, each.after) for each in results] == [(1, 3), (3, 2)]


async def test_deaths_during_a_change(autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as scaling:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scaling.omni.scale, "second", 2)
            await trio.sleep(LOAD_S / 2)
            scaling.spawner.living[Address("second", 1)].kill()
        assert scaling.states == {0: "ready", 1: "ready"}
        running = [scaling.ask(50) for _ in range(2)]
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scaling.omni.scale, "second", 1)
            await trio.sleep(0.1)
            (leaving,) = [number for number, state in scaling.states.items() if state == "draining"]
            scaling.spawner.living[Address("second", leaving)].kill()
            for each in running:
                assert await numbers(each) == list(range(50))
        await trio.sleep(10)
        assert list(scaling.states.values()) == ["ready"], "the dead one is not restarted"


async def test_no_request_waits_for_a_replica_that_drains(autojump_clock: trio.testing.MockClock) -> None:
    """The other one is given up meanwhile: the stage has failed, although the draining one finishes its requests."""
    async with opened(replicas=2, restart=Restart(type="temporary")) as scaling:
        running = [scaling.ask(50) for _ in range(2)]
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scaling.omni.scale, "second", 1)
            await trio.sleep(0.1)
            assert scaling.states == {0: "ready", 1: "draining"}
            scaling.spawner.living[Address("second", 0)].kill()
            await trio.sleep(0.1)
            assert scaling.states == {0: "failed", 1: "draining"}
            with pytest.raises(StageUnavailable):
                scaling.ask()
            with pytest.raises(StageUnavailable):
                await numbers(running[0])
            assert await numbers(running[1]) == list(range(50))
        assert scaling.states == {0: "failed"}
        with pytest.raises(StageUnavailable):
            scaling.ask()


async def test_a_cancelled_change_does_not_drain_any_longer(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=2) as scaling:
        running = [scaling.ask(100) for _ in range(2)]
        await trio.sleep(1)
        with trio.move_on_after(0.5):
            await scaling.omni.scale("second", 1)
        assert list(scaling.states.values()) == ["ready"]
        for each in running:
            assert await numbers(each) == list(range(100))


async def test_closing_and_sleeping_during_a_change(autojump_clock: trio.testing.MockClock) -> None:
    for delay_s in (0.0, 0.5, LOAD_S):
        async with opened() as scaling, trio.open_nursery() as nursery:
            nursery.start_soon(_scale_until_closed, scaling.omni)
            await trio.sleep(delay_s)
            await scaling.omni.shutdown()
    async with opened() as scaling:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scaling.omni.scale, "second", 2)
            await trio.sleep(0.5)
            await scaling.omni.sleep(2, stages=["second"])
        assert scaling.states == {0: "asleep", 1: "asleep"}
        with pytest.raises(StageAsleep):
            await scaling.omni.scale("second", 1)
        await scaling.omni.wake_up()
        assert await numbers(scaling.ask()) == [0, 1, 2]


async def _scale_until_closed(omni: OmniSystem) -> None:
    for replicas in itertools.cycle((2, 1)):
        try:
            await omni.scale("second", replicas)
        except SystemClosed:
            return


@pytest.mark.parametrize("replicas", [-1, 65, 1.5, True, "two"])
async def test_a_wrong_number_changes_nothing(replicas: Any, autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as scaling:
        with pytest.raises(InvalidRequest, match="replicas"):
            await scaling.omni.scale("second", replicas)
        with pytest.raises(InvalidRequest, match="no stage"):
            await scaling.omni.scale("third", 1)


@pytest.mark.parametrize("drain_s", [-1, math.nan, math.inf, pytest.param(10**400, id="huge"), True, "5"])
async def test_a_wrong_drain_time_changes_nothing(drain_s: Any, autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as scaling:
        with pytest.raises(InvalidRequest, match="drain_s") as refused:
            await scaling.omni.scale("second", 2, drain_s=drain_s)
        assert refused.value.param == "drain_s"
        assert scaling.states == {0: "ready"}


@pytest.mark.perf
async def test_scaling_and_a_death_under_load_lose_nothing() -> None:
    """1 → 3 → 1 under load, with the death of a replica between: no request takes longer than before plus one load."""
    pipeline = one_stage(options={"step_s": 0.002}, drain_s=10.0)
    async with OmniSystem.open(pipeline) as omni:
        durations = list[float]()
        loading = trio.Event()

        async def client(number: int) -> None:
            while not loading.is_set():
                began = trio.current_time()
                pieces = [Input({"n": n, "client": number}) for n in range(20)]
                outputs = await read(omni.submit({"script": pieces}, ["audio"]))
                assert [output.data["n"] for output in outputs] == list(range(20))
                assert all(output.data["client"] == number for output in outputs)
                durations.append(trio.current_time() - began)

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(client, number)
            await trio.sleep(2.0)
            slowest = max(durations)
            up = await omni.scale("only", 3)
            await trio.sleep(1.0)
            health = omni.health().stages["only"]
            assert [each.state for each in health] == ["ready"] * 3
            os.kill(health[1].pid or 0, signal.SIGKILL)
            await trio.sleep(1.0)
            down = await omni.scale("only", 1)
            await trio.sleep(1.0)
            loading.set()
        assert (up.after, down.after) == (3, 1)
        assert len(omni.health().stages["only"]) == 1
        assert max(durations) <= slowest + up.seconds, (slowest, up.seconds, max(durations), len(durations))
        assert omni.in_flight == 0


async def test_processes_come_and_go() -> None:
    async with OmniSystem.open(one_stage()) as omni:
        assert (await omni.scale("only", 2)).after == 2
        first, second = omni.health().stages["only"]
        assert {first.state, second.state} == {"ready"}
        assert first.pid != second.pid
        outputs = [await read(omni.submit({"script": [Input({"n": 1})]}, ["audio"])) for _ in range(4)]
        assert all(len(each) == 1 for each in outputs)
        await omni.scale("only", 1)
        assert len(omni.health().stages["only"]) == 1


async def test_a_worker_with_more_neighbours_than_its_requests_have_messages_starts_again(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new worker gets a message about each of its rings in one turn of the event loop."""
    for others in ("CALL_MESSAGES", "OTHER_MESSAGES"):  # so that few neighbours suffice
        monkeypatch.setattr(workers, others, 0)
    spawner, second = SimulatedSpawner(lambda address, pid: WorkerBehavior(), lambda note: None), Address("second", 0)
    stages = {
        "first": Stage(engine="echo", accepts=("script",), ring_bytes=RING_BYTES),
        "second": Stage(engine="echo", inputs=("first",), ring_bytes=RING_BYTES),
        "third": Stage(engine="echo", inputs=("second",), emits="text", ring_bytes=RING_BYTES),
    }
    pipeline = Pipeline(name="neighbours", stages=stages, limits=Limits(max_requests=1))
    with trio.fail_after(1000.0):
        async with OmniSystem.open(pipeline, spawner=spawner) as omni:
            for stage in ("first", "third"):
                await omni.scale(stage, 16)
                await trio.sleep(1)  # the worker between them reads about its new rings
            spawner.living[second].kill()
            await trio.sleep(100)
            replica = omni._supervisor.replicas[second]
            assert [death.exit.reason for death in replica.history] == [None]
            assert (replica.state.value, replica.generation) == ("ready", 2)
