"""Aborts, deadlines and dropped streams of requests, with real workers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import trio
import trio.testing

from omni_actors.config import Pipeline
from omni_actors.errors import Aborted, DeadlineExceeded
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.system import OmniSystem
from tests.orchestrator.census import ONE, WATCHDOG_S, ask, in_flight, is_free_everywhere, lose_bottom
from tests.support.echo_systems import read, until
from tests.support.shared_system import SharedSystem, with_shared_system


def aborted(omni: OmniSystem) -> float:
    return omni.metrics.registry.get_sample_value("omni_requests_total", {"outcome": "Aborted"}) or 0.0


@with_shared_system
async def test_abort_of_a_queued_request(omni: OmniSystem) -> None:
    await lose_bottom(omni)
    queued = ask(omni)
    assert omni.metrics.registry.get_sample_value("omni_requests_queued") == 1
    queued.abort()
    with pytest.raises(Aborted):
        await read(queued)
    await until(lambda: omni.health().ready)
    assert await is_free_everywhere(omni)


@with_shared_system
async def test_abort_of_a_running_request(omni: OmniSystem) -> None:
    for where in ("top", "bottom"):
        held = ask(omni, hold=where)
        held.abort()
        held.abort()
        with pytest.raises(Aborted):
            await read(held)
        assert await is_free_everywhere(omni)


@with_shared_system
async def test_abort_of_a_streaming_request(omni: OmniSystem) -> None:
    before = aborted(omni)
    held = ask(omni, modalities=("text", "audio"), hold="bottom")
    with trio.fail_after(WATCHDOG_S):
        assert (await anext(aiter(held))).stage == "top"
    held.abort()
    with pytest.raises(Aborted):
        await read(held)
    assert await is_free_everywhere(omni)
    assert aborted(omni) == before + 1


@with_shared_system
async def test_abort_after_the_end_changes_nothing(omni: OmniSystem) -> None:
    before = aborted(omni)
    generation = ask(omni)
    assert len(await read(generation)) == 1
    generation.abort()
    assert await read(generation) == []
    assert aborted(omni) == before


async def test_abort_of_a_request_whose_stage_hangs_is_immediate() -> None:
    overrides = {"stages.second.shutdown_timeout_s": 0.1}
    async with OmniSystem.open("echo", **overrides) as omni:
        hanging = ask(omni, echo={"stage": "second", "hang": True})
        hanging.abort()
        assert in_flight(omni) == 0
        with pytest.raises(Aborted):
            await read(hanging)
        assert [output.delta for output in await read(ask(omni, modalities=("text",)))] == ["x"]


@with_shared_system
async def test_a_deadline_ends_the_request_everywhere(omni: OmniSystem) -> None:
    for deadline_s in (0.05, 0.0):
        late = omni.submit({"script": [Input({"hold": "bottom"})]}, ["audio"], deadline_s=deadline_s)
        with pytest.raises(DeadlineExceeded) as caught:
            await read(late)
        assert caught.value.deadline_s == deadline_s
    assert await is_free_everywhere(omni)


async def test_the_deadline_of_the_pipeline_applies_to_a_request_without_one(alone: Pipeline) -> None:
    async with OmniSystem.open(alone, **{"limits.deadline_s": 0.05}) as omni:
        with pytest.raises(DeadlineExceeded):
            await read(ask(omni, modalities=("text",), hold="top"))


@with_shared_system
async def test_a_dropped_stream_aborts_its_request(omni: OmniSystem) -> None:
    held = ask(omni, hold="bottom")
    assert in_flight(omni) == 1
    del held
    await until(lambda: in_flight(omni) == 0)
    async for output in ask(omni, modalities=("text", "audio"), hold="bottom"):
        assert output.stage == "top"
        break
    await until(lambda: in_flight(omni) == 0)
    assert await is_free_everywhere(omni)


def test_a_cancelled_reader_loses_nothing(echo: SharedSystem) -> None:
    async def work(omni: OmniSystem) -> None:
        generation = omni.submit({"script": [Input({"n": n}) for n in range(50)]}, ["text"])
        got: list[Output] = []
        dice = random.Random(0)
        with trio.fail_after(WATCHDOG_S):
            while not (got and got[-1].finished):
                with trio.move_on_after(dice.choice([0, 0.0005, 0.002])):
                    got.append(await anext(generation))
        assert [output.data["n"] for output in got] == list(range(50))

    echo.run(work)


async def test_aborted_requests_do_not_accumulate_before_a_stage_that_hangs() -> None:
    """Their input waits for room in a ring; the abort ends the task that sends it."""
    overrides = {"stages.only.ring_bytes": 4096, "stages.only.shutdown_timeout_s": 0.1, "limits.max_requests": 4}
    async with OmniSystem.open(ONE, **overrides) as omni:
        hanging = ask(omni, echo={"hang": True})
        tasks: list[int] = []
        for _ in range(4):
            aborted = omni.submit({"script": [Input({}, {"pixels": np.zeros(100_000, np.uint8)})]}, ["audio"])
            await trio.testing.wait_all_tasks_blocked()  # its input waits for room
            aborted.abort()
            await until(lambda: in_flight(omni) == 1)
            tasks.append(trio.lowlevel.current_statistics().tasks_living)
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks[0])
        hanging.abort()
