"""A change of a stage's replicas while others drain: on simulated workers in virtual time."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.protocol.messages import Address
from omni_actors.stress.simulation.worker import WorkerBehavior
from omni_actors.system import Scaled
from omni_actors.system.scale_rule import plan_change
from tests.support.scaled_system import LOAD_S, Scaling, numbers, opened


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_a_change_gives_the_number_and_adds_none_while_others_drain(workers: int, staying: int, draining: int) -> None:
    stay, drain = [("stays", n) for n in range(staying)], [("drains", n) for n in range(draining)]
    change = plan_change(workers, stay, drain)
    assert staying + len(change.returning) + change.new - len(change.leaving) == workers
    assert list(change.returning) == drain[: len(change.returning)]
    assert list(change.leaving) == stay[: len(change.leaving)]
    assert not change.new or len(change.returning) == draining
    assert not change.leaving or not (change.new or change.returning)


async def shrink(scaling: Scaling, replicas: int, found: list[Scaled]) -> None:
    found.append(await scaling.omni.scale("second", replicas))


async def test_a_scale_up_takes_draining_replicas_back_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=3) as scaling, trio.open_nursery() as nursery:
        found: list[Scaled] = []
        running = [scaling.ask(100) for _ in range(6)]
        await trio.sleep(1)
        nursery.start_soon(shrink, scaling, 1, found)
        await trio.sleep(1)
        assert sorted(scaling.states.values()) == ["draining", "draining", "ready"]
        up = await scaling.omni.scale("second", 3)
        assert (up.before, up.after, up.seconds) == (1, 3, 0.0)
        assert scaling.states == {0: "ready", 1: "ready", 2: "ready"}
        await trio.sleep(0.01)
        assert [(each.before, each.after) for each in found] == [(3, 3)], "the other change has ended"
        later = [scaling.ask() for _ in range(3)]
        await trio.sleep(0.01)
        assert scaling.loads() == {0: 3, 1: 3, 2: 3}
        for each in (*running, *later):
            assert await numbers(each) == list(range(100 if each in running else 3))
            assert not each.stream.request.replays
        assert {each.generation for each in scaling.omni.health().stages["second"]} == {1}


@pytest.mark.parametrize(("wanted", "loaded"), [(2, []), (4, [3]), (5, [3, 4])])
async def test_only_what_draining_replicas_do_not_give_is_loaded(
    wanted: int, loaded: list[int], autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(replicas=3) as scaling, trio.open_nursery() as nursery:
        running = [scaling.ask(100) for _ in range(5)]
        await trio.sleep(1)
        nursery.start_soon(scaling.omni.scale, "second", 1)
        await trio.sleep(0.1)
        up = await scaling.omni.scale("second", wanted)
        assert up.seconds == pytest.approx(LOAD_S if loaded else 0.0)
        states = scaling.states
        assert set(states) == {0, 1, 2, *loaded}
        assert sorted(states.values()) == ["draining"] * (wanted == 2) + ["ready"] * wanted
        for each in running:
            assert await numbers(each) == list(range(100))
        await trio.sleep(1)
        assert list(scaling.states.values()) == ["ready"] * wanted


async def test_of_several_that_drain_the_busiest_returns_first(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=3, routing="round_robin") as scaling, trio.open_nursery() as nursery:
        running = [scaling.ask(pieces) for pieces in (30, 100, 100, 2, 100, 100)]
        await trio.sleep(1)
        assert scaling.loads() == {0: 1, 1: 2, 2: 2}
        nursery.start_soon(scaling.omni.scale, "second", 1)
        await trio.sleep(0.1)
        assert [number for number, state in scaling.states.items() if state == "draining"] == [0, 2]
        await scaling.omni.scale("second", 2)
        assert scaling.states == {0: "draining", 1: "ready", 2: "ready"}
        for each in running:
            await numbers(each)


async def test_a_draining_replica_that_has_died_is_replaced_by_a_new_one(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"GPU-{uuid.uuid4()}" for _ in range(2)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    async with opened(replicas=2, device="cuda:0") as scaling, trio.open_nursery() as nursery:
        running = [scaling.ask(100) for _ in range(2)]
        await trio.sleep(1)
        nursery.start_soon(scaling.omni.scale, "second", 1)
        await trio.sleep(0.1)
        scaling.spawner.living[Address("second", 1)].kill()
        await trio.sleep(0.001)
        up = await scaling.omni.scale("second", 2)
        assert up.seconds == pytest.approx(LOAD_S, abs=0.1)
        assert [each.devices for each in scaling.omni.health().stages["second"]] == [(names[0],), (names[1],)]
        assert scaling.omni.health().stages["second"][1].generation == 2
        for each in running:
            assert await numbers(each) == list(range(100))


@pytest.mark.parametrize("drain_s", [0.0, None])
async def test_changes_in_quick_succession_end_with_the_last_number(
    drain_s: float | None, autojump_clock: trio.testing.MockClock
) -> None:
    """With no time to drain, workers are being stopped when more are wanted, and these are waited for."""
    async with opened(replicas=3) as scaling:
        running = [scaling.ask(60) for _ in range(6)]
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            for replicas in (1, 3, 1, 2, 0, 3, 1):
                nursery.start_soon(partial(scaling.omni.scale, "second", replicas, drain_s=drain_s))
                for _ in range(3):
                    await trio.lowlevel.checkpoint()
        assert list(scaling.states.values()) == ["ready"]
        for each in running:
            assert await numbers(each) == list(range(60))
            assert not each.stream.request.deaths.charged


async def test_a_cancelled_drain_removes_no_replica_that_was_taken_back(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=2) as scaling:
        running = [scaling.ask(100) for _ in range(2)]
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scaling.omni.scale, "second", 1)
            await trio.sleep(0.5)
            await scaling.omni.scale("second", 2)
            nursery.cancel_scope.cancel()
        assert scaling.states == {0: "ready", 1: "ready"}
        for each in running:
            assert await numbers(each) == list(range(100))
            assert not each.stream.request.replays


async def test_a_request_takes_the_last_replica_back_that_drains(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(scale_from_zero=True) as scaling, trio.open_nursery() as nursery:
        running = scaling.ask(100)
        await trio.sleep(1)
        nursery.start_soon(scaling.omni.scale, "second", 0)
        await trio.sleep(0.1)
        assert scaling.states == {0: "draining"}
        began = trio.current_time()
        assert await numbers(scaling.ask()) == [0, 1, 2]
        assert trio.current_time() - began < LOAD_S / 2
        assert scaling.states == {0: "ready"}
        assert await numbers(running) == list(range(100))


async def test_a_replica_that_was_taken_back_can_load_no_failed_neighbour(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Two return and one cannot load: the stage has the two."""
    async with opened(replicas=2) as scaling, trio.open_nursery() as nursery:
        running = [scaling.ask(50) for _ in range(2)]
        await trio.sleep(1)
        nursery.start_soon(scaling.omni.scale, "second", 0)
        await trio.sleep(0.1)
        scaling.behavior = WorkerBehavior(fails="no memory")
        with pytest.raises(Exception, match="no memory"):
            await scaling.omni.scale("second", 3)
        assert scaling.states == {0: "ready", 1: "ready"}
        assert (await scaling.omni.scale("second", 1)).before == 2
        for each in running:
            assert await numbers(each) == list(range(50))


async def test_a_stage_sleeps_when_its_drains_have_ended(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=2) as scaling, trio.open_nursery() as nursery:
        running = [scaling.ask(30) for _ in range(2)]
        await trio.sleep(1)
        nursery.start_soon(scaling.omni.scale, "second", 1)
        await trio.sleep(0.1)
        await scaling.omni.sleep(2, stages=["second"], mode="wait")
        assert list(scaling.states.values()) == ["asleep"]
        for each in running:
            assert await numbers(each) == list(range(30))


async def test_health_and_the_live_state_agree_on_a_draining_replica_whose_worker_dies(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened(replicas=2) as scaling, trio.open_nursery() as nursery:
        running = [scaling.ask(100) for _ in range(2)]
        await trio.sleep(1)
        nursery.start_soon(shrink, scaling, 1, [])
        await trio.sleep(1)
        worker = scaling.spawner.living[Address("second", 1)]
        worker.behavior = replace(worker.behavior, dying_s=5.0)
        worker.kill()
        await trio.sleep(1)
        live = scaling.omni.live_state().stages["second"].replicas
        assert scaling.states == {0: "ready", 1: "draining"}
        assert {int(number): each.state for number, each in live.items()} == scaling.states
        for each in running:
            assert await numbers(each) == list(range(100))
