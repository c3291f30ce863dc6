"""Stages that sleep and wake, and the end of a system, with real workers."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
import trio.testing

from omni_actors.config import Pipeline, Stage
from omni_actors.errors import (
    Aborted,
    CallTimedOut,
    InvalidRequest,
    StageAsleep,
    StageFailed,
    SystemClosed,
    Unsupported,
    WorkerLost,
)
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.replica import Replica
from omni_actors.supervisor.supervisor import Supervisor
from omni_actors.sync import Omni
from omni_actors.system import OmniSystem
from tests.support.controllable_engine import FACTORY, SLEEPING_BYTES, SLEEPING_FACTORY
from tests.support.frozen import freeze

WATCHDOG_S = 60.0
PIPELINE = Pipeline(
    name="asleep",
    stages={
        "first": Stage(engine=FACTORY, accepts=("script",), emits="text"),
        "second": Stage(engine=SLEEPING_FACTORY, inputs=("first",), emits="audio"),
    },
)


@asynccontextmanager
async def opened() -> AsyncIterator[OmniSystem]:
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(PIPELINE, overrides={"stages.second.restart.backoff_s": 0.01}) as omni:
            yield omni


def ask(omni: OmniSystem, *modalities: str) -> Generation:
    return omni.submit({"script": [Input({"text": "x"})]}, modalities or ("text", "audio"))


async def answered(omni: OmniSystem, *modalities: str) -> set[str]:
    return {output.modality async for output in ask(omni, *modalities)}


async def test_level_2_ends_the_workers_until_they_are_woken_with_their_desired_state() -> None:
    async with opened() as omni:
        await omni.set_desired("note", {"name": "a", "text": "1"}, stages=["second"])
        worker = psutil.Process(omni.health().stages["second"][0].pid)
        (reply,) = (await omni.sleep(2, stages=["second"]))["second"]
        assert reply.result()["before"]["rss_bytes"] > SLEEPING_BYTES
        assert reply.result()["after"] == {"rss_bytes": 0, "device_bytes": 0}
        assert not worker.is_running()
        assert await omni.is_sleeping()
        assert omni.health().stages["second"][0].state == "asleep"
        await omni.wait_ready()
        with pytest.raises(StageAsleep, match="second"):
            ask(omni)
        assert await answered(omni, "text") == {"text"}, "the other stage serves"
        with pytest.raises(InvalidRequest, match="tags"):
            await omni.wake_up(["weights"])
        for tags in (5, [1]):
            with pytest.raises(InvalidRequest, match="tags: expected names"):
                await omni.wake_up(tags)  # type: ignore[arg-type]
        await omni.wake_up()
        assert not await omni.is_sleeping()
        assert await answered(omni) == {"text", "audio"}
        assert (await omni.call("notes", stages=["second"]))["second"][0].result()["notes"] == {"a": "1"}


async def test_level_2_of_a_stage_that_has_no_worker_succeeds() -> None:
    nothing = {"rss_bytes": 0, "device_bytes": 0}
    async with opened() as omni:
        await omni.sleep(2, stages=["second"])
        replies = await omni.sleep(2)
        assert replies["second"][0].result() == {"before": nothing, "after": nothing}
        assert replies["first"][0].result()["before"]["rss_bytes"] > 0
        await omni.wake_up()
        assert await answered(omni) == {"text", "audio"}


@pytest.mark.parametrize("text", ["", "/none"], ids=["refused", "raised"])
async def test_what_a_waking_engine_does_not_take_is_taken_out_of_its_desired_state(text: str) -> None:
    async with opened() as omni:
        await omni.set_desired("note", {"name": "a", "text": "1"}, stages=["second"])
        await omni.sleep(2, stages=["second"])
        (reply,) = (await omni.set_desired("note", {"name": "a", "text": text}, stages=["second"]))["second"]
        assert isinstance(reply.error, WorkerLost), "no worker has checked it"
        await omni.wake_up()
        assert await answered(omni) == {"text", "audio"}
        assert (await omni.call("notes", stages=["second"]))["second"][0].result()["notes"] == {"a": "1"}
        reason = omni._supervisor.replicas[Address("second", 0)].history[-1].exit.reason
        assert reason is not None
        assert reason.startswith("note is taken out of its desired state: ")


async def test_what_an_engine_has_taken_stays_in_the_desired_state_if_a_later_one_does_not_take_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "note"
    file.write_text("1")
    async with opened() as omni:
        note = {"name": "a", "text": str(file)}
        await omni.set_desired("note", note, stages=["second"])
        await omni.sleep(2, stages=["second"])
        file.unlink()
        with pytest.raises(StageFailed, match="No such file"):
            await omni.wake_up()
        assert omni._supervisor.desired.get("second", "note") == note


@pytest.mark.slow
async def test_level_1_lasts_through_the_death_of_the_worker() -> None:
    async with opened() as omni:
        await omni.pause_generation("keep")
        running = ask(omni)
        (reply,) = (await omni.sleep(1, stages=["second"]))["second"]
        with pytest.raises(Aborted, match="sleep"):
            await running.collect()
        await omni.resume_generation()
        memory = reply.result()
        assert memory["before"]["rss_bytes"] - memory["after"]["rss_bytes"] > SLEEPING_BYTES // 2
        os.kill(omni.health().stages["second"][0].pid or 0, signal.SIGKILL)
        while not (omni.health().ready and omni.health().stages["second"][0].generation == 2):
            await omni.wait_changed()
        with pytest.raises(StageAsleep):
            ask(omni)
        status = (await omni.call("worker_status", stages=["second"]))["second"][0].result()
        assert status["rss_bytes"] < memory["before"]["rss_bytes"] - SLEEPING_BYTES // 2
        assert (await omni.wake_up())["second"][0].result() is True
        assert await answered(omni) == {"text", "audio"}


async def test_a_stage_is_woken_again_if_its_worker_did_not_answer_in_time() -> None:
    async with opened() as omni:
        await omni.sleep(1, stages=["second"])
        pid = omni.health().stages["second"][0].pid or 0
        freeze(pid)
        (reply,) = (await omni.wake_up(timeout_s=0.2))["second"]
        assert isinstance(reply.error, CallTimedOut)
        os.kill(pid, signal.SIGCONT)
        assert (await omni.wake_up(["weights"]))["second"][0].result() is True, "the workers had not ended"
        assert await answered(omni) == {"text", "audio"}


async def test_a_stage_wakes_whose_worker_is_being_restarted() -> None:
    delays = {"stages.second.restart.backoff_s": 1.0, "stages.second.restart.backoff_max_s": 1.0}
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(PIPELINE, overrides=delays) as omni:
            await omni.sleep(1, stages=["second"])
            os.kill(omni.health().stages["second"][0].pid or 0, signal.SIGKILL)
            while omni.health().stages["second"][0].state != "restarting":
                await omni.wait_changed()
            [reply] = (await omni.wake_up())["second"]
            assert isinstance(reply.error, WorkerLost)
            assert not await omni.is_sleeping()
            assert await answered(omni) == {"text", "audio"}


async def test_a_stage_that_falls_deeper_asleep_wakes_as_one_that_has_ended() -> None:
    async with opened() as omni:
        await omni.sleep(1, stages=["second"])
        await omni.sleep(2, stages=["second"])
        assert await omni.wake_up() == {}
        assert await answered(omni) == {"text", "audio"}


async def test_a_stage_that_cannot_sleep_changes_nothing() -> None:
    async with opened() as omni:
        running = ask(omni)
        replies = await omni.sleep(1)
        (reply,) = replies["first"]
        assert isinstance(reply.error, Unsupported)
        assert (reply.error.stage, reply.error.capability, reply.error.why) == (
            *("first", "sleep"),
            "there is nothing to offload",
        )
        assert not await omni.is_sleeping()
        assert {output.modality async for output in running} == {"text", "audio"}
        for wrong in ({"level": 3}, {"mode": "keep"}):
            with pytest.raises(InvalidRequest):
                await omni.sleep(**wrong)  # type: ignore[arg-type]


async def test_a_sleep_waits_for_the_requests_of_its_stages_only() -> None:
    async with opened() as omni:
        waited_for, other = ask(omni), ask(omni, "text")
        await omni.pause_generation("keep")
        async with trio.open_nursery() as nursery:
            slept: dict[str, Any] = {}

            async def sleep() -> None:
                slept.update(await omni.sleep(2, stages=["second"], mode="wait"))

            nursery.start_soon(sleep)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(StageAsleep):
                ask(omni)
            assert not slept
            await omni.resume_generation()
        assert slept["second"][0].error is None
        assert {output.modality async for output in waited_for} == {"text", "audio"}
        assert await other.text() == "x"


async def test_a_stage_that_is_woken_before_its_requests_ended_stays_awake() -> None:
    async with opened() as omni:
        waited_for = ask(omni)
        await omni.pause_generation("keep")
        async with trio.open_nursery() as nursery:
            slept: dict[str, Any] = {}

            async def sleep() -> None:
                slept.update(await omni.sleep(2, stages=["second"], mode="wait"))

            nursery.start_soon(sleep)
            await trio.testing.wait_all_tasks_blocked()
            await omni.wake_up()
            await omni.resume_generation()
        memory = slept["second"][0].result()
        assert memory["before"] == memory["after"]
        assert {output.modality async for output in waited_for} == {"text", "audio"}
        assert omni.health().stages["second"][0].state == "ready"
        assert await answered(omni) == {"text", "audio"}


async def test_a_stage_whose_engine_cannot_sleep_is_woken_before_its_worker_ends() -> None:
    """While a sleep waits for its requests, and after one that was cancelled."""
    async with opened() as omni, trio.open_nursery() as nursery:
        await omni.pause_generation("keep")
        waited_for = ask(omni, "text")
        nursery.start_soon(functools.partial(omni.sleep, 2, stages=["first"], mode="wait"))
        await trio.testing.wait_all_tasks_blocked()
        assert await omni.is_sleeping()
        assert await omni.wake_up() == {}
        await omni.resume_generation()
        assert {output.modality async for output in waited_for} == {"text"}
        assert await answered(omni, "text") == {"text"}
        await omni.pause_generation("keep")
        running = ask(omni, "text")
        with trio.move_on_after(0):
            await omni.sleep(2, stages=["first"], mode="wait")
        assert await omni.is_sleeping()
        assert await omni.wake_up() == {}
        await omni.resume_generation()
        assert {output.modality async for output in running} == {"text"}
        assert await answered(omni, "text") == {"text"}


async def test_a_stage_that_is_woken_while_its_worker_ends_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as omni, trio.open_nursery() as nursery:
        stop, stopping, woken = Supervisor._stop, trio.Event(), trio.Event()

        async def stop_slowly(self: Supervisor, replicas: Iterable[Replica]) -> None:
            stopping.set()
            with trio.CancelScope(shield=True):
                await woken.wait()
            await stop(self, replicas)

        monkeypatch.setattr(Supervisor, "_stop", stop_slowly)

        async def sleep() -> None:
            await omni.sleep(2, stages=["second"])

        nursery.start_soon(sleep)
        await stopping.wait()
        monkeypatch.undo()
        nursery.start_soon(omni.wake_up)
        await trio.testing.wait_all_tasks_blocked()
        woken.set()
        while omni.health().stages["second"][0].generation < 2:
            await omni.wait_changed()
        await omni.wait_ready()
        assert await answered(omni) == {"text", "audio"}


async def test_a_shutdown_refuses_new_requests_at_once_and_drains() -> None:
    async with opened() as omni:
        pids = [replica.pid for replicas in omni.health().stages.values() for replica in replicas]
        await omni.pause_generation("wait")
        drained = ask(omni)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(omni.shutdown, WATCHDOG_S)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(SystemClosed, match="shutting down"):
                ask(omni)
            await omni.resume_generation()
        assert omni.is_stopped
        assert not omni.is_running
        assert not any(psutil.pid_exists(pid or 0) for pid in pids)
        with pytest.raises(SystemClosed):
            ask(omni)
        assert {output.modality async for output in drained} == {"text", "audio"}
        await omni.shutdown()


async def test_a_shutdown_aborts_what_does_not_end_in_time() -> None:
    async with opened() as omni:
        await omni.pause_generation("wait")
        waiting = ask(omni)
        await omni.shutdown()
        with pytest.raises(Aborted, match="shutting down"):
            await waiting.collect()


def test_a_blocking_face_shuts_down_too() -> None:
    with Omni.open(PIPELINE) as omni:
        assert not omni.is_stopped
        assert omni.get_supported_tasks() == ("speech",)
        omni.shutdown()
        assert omni.is_stopped
        assert not omni.is_running
    assert omni.is_stopped
