"""Sleeping stages among other calls, refusals and cancellation, on simulated workers in virtual time."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest
import trio
import trio.testing

from omni_actors.config import Pipeline, Stage
from omni_actors.errors import Aborted, InvalidRequest, StageAsleep, TooManyCalls
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.stages.base import StageContext
from omni_actors.stages.echo.engine import EchoEngine
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import WorkerBehavior
from omni_actors.supervisor.calls import MAX_CALLS
from omni_actors.system import OmniSystem
from omni_actors.system.calls import Replies

WATCHDOG_S = 1000.0
"""Virtual."""


class Sleeper(EchoEngine):
    """An engine that can sleep at level 1, and refuses to if ``refuses`` is set."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.asleep = self.refuses = False
        self._capabilities |= {"sleep": self._sleep, "wake_up": self._wake_up, "note": lambda text: text}

    def _sleep(self, level: int) -> None:
        if self.refuses:
            raise InvalidRequest("not now")
        self.asleep = True

    def _wake_up(self, tags: list[str] | None) -> bool:
        self.asleep = False
        return True


class Sleeping:
    """A running system of two stages, whose engines can sleep. The second stage has two replicas."""

    def __init__(self) -> None:
        self.spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.1), lambda note: None)
        self.omni: OmniSystem

    def ask(self, modality: str = "audio") -> Generation:
        return self.omni.submit({"script": [Input({"n": 1})]}, [modality])

    def engines(self, stage: str) -> list[Sleeper]:
        """Return the engines of the living workers of a stage."""
        found = [worker.engine for address, worker in self.spawner.living.items() if address.stage == stage]
        return [each for each in found if isinstance(each, Sleeper)]

    async def assert_awake(self) -> None:
        """Assert that no stage sleeps, that all engines are awake, and that a request is answered."""
        assert not await self.omni.is_sleeping()
        assert [each.asleep for stage in ("first", "second") for each in self.engines(stage)] == [False] * 3
        assert [output.data["n"] async for output in self.ask()] == [1]


@asynccontextmanager
async def opened() -> AsyncIterator[Sleeping]:
    sleeping, engine = Sleeping(), f"{__name__}:Sleeper"
    stages = {
        "first": Stage(engine=engine, accepts=("script",), emits="text"),
        "second": Stage(engine=engine, inputs=("first",), emits="audio", replicas=2),
    }
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(Pipeline(name="sleeping", stages=stages), spawner=sleeping.spawner) as sleeping.omni:
            yield sleeping


async def test_a_stage_whose_workers_end_while_a_sleep_at_level_1_waits_is_woken_as_one_that_has_ended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened() as sleeping:
        omni, slept = sleeping.omni, dict[int, Replies]()

        async def sleep() -> None:
            slept[1] = await omni.sleep(1, mode="wait")

        await omni.pause_generation("wait")
        running = sleeping.ask("text")  # which the first stage alone computes
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleep)
            await trio.testing.wait_all_tasks_blocked()
            slept[2] = await omni.sleep(2, stages=["second"], mode="wait")
            assert not slept.keys() - {2}, "level 1 still waits for the request"
            running.abort()
        with pytest.raises(Aborted):
            await running.collect()
        assert [each.asleep for each in sleeping.engines("first")] == [True]
        assert [each.state for each in omni.health().stages["second"]] == ["asleep", "asleep"]
        await omni.wake_up()
        await omni.resume_generation()
        await sleeping.assert_awake()


async def test_a_stage_at_level_1_is_woken_after_a_sleep_at_level_2_that_was_cancelled_before_its_workers_ended(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as sleeping:
        supervisor, scope = sleeping.omni._supervisor, trio.CancelScope()
        stop_stages = supervisor.stop_stages

        async def cancelled(stages: Collection[str]) -> None:
            scope.cancel()
            await stop_stages(stages)

        monkeypatch.setattr(supervisor, "stop_stages", cancelled)
        await sleeping.omni.sleep(1, stages=["second"])
        with scope:
            await sleeping.omni.sleep(2, stages=["second"])
        assert scope.cancelled_caught
        assert [each.asleep for each in sleeping.engines("second")] == [True, True]
        await sleeping.omni.wake_up()
        await sleeping.assert_awake()


async def test_a_sleep_that_cannot_be_sent_leaves_the_stages_as_they_were(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> NoReturn:
        raise TooManyCalls("second", 0, "sleep", MAX_CALLS)

    async with opened() as sleeping:
        omni = sleeping.omni
        await omni.sleep(1, stages=["first"])
        with monkeypatch.context() as patch:
            patch.setattr(omni, "_begin_change", full)
            with pytest.raises(TooManyCalls):
                await omni.sleep(1)
        with pytest.raises(StageAsleep, match="first"):
            sleeping.ask()
        await omni.wake_up(stages=["first"])
        await sleeping.assert_awake()


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_with_a_wrong_timeout_changes_nothing(autojump_clock: trio.testing.MockClock, level: int) -> None:
    async with opened() as sleeping:
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await sleeping.omni.sleep(level, timeout_s=math.nan)
        await sleeping.assert_awake()


async def test_a_stage_is_awake_if_one_of_its_replicas_refuses_to_sleep(autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as sleeping:
        omni, (_, refusing) = sleeping.omni, sleeping.engines("second")
        refusing.refuses = True
        slept, refused = (await omni.sleep(1))["second"]
        assert (slept.error, type(refused.error)) == (None, InvalidRequest)
        assert [each.asleep for each in sleeping.engines("first")] == [True]
        assert [each.asleep for each in sleeping.engines("second")] == [False, False]
        await omni.wake_up(stages=["first"])
        await sleeping.assert_awake()
