"""Calls to real workers, and their desired state: values, refusals, timeouts, deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from omni_actors import Pipeline, Reply, Unsupported
from omni_actors.config import Stage
from omni_actors.errors import CallTimedOut, InvalidRequest, TooManyCalls, WorkerLost
from omni_actors.supervisor.calls import MAX_CALLS
from omni_actors.system import OmniSystem
from tests.support.controllable_engine import FACTORY

WATCHDOG_S = 60.0
FAST = {"backoff_s": 0.01}
PIPELINE = Pipeline(
    name="controlled",
    stages={
        "plain": Stage(engine="echo", accepts=("script",)),
        "able": Stage(engine=FACTORY, inputs=("plain",), emits="text", standby=1),
    },
)


@asynccontextmanager
async def opened() -> AsyncIterator[OmniSystem]:
    overrides: dict[str, Any] = {f"stages.able.restart.{name}": value for name, value in FAST.items()}
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(PIPELINE, overrides=overrides) as omni:
            yield omni


def pid_of(omni: OmniSystem, stage: str, replica: int = 0) -> int:
    pid = omni.health().stages[stage][replica].pid
    assert pid is not None
    return pid


async def wait_generation(omni: OmniSystem, replica: int, generation: int) -> None:
    while True:
        state = omni.health().stages["able"][replica]
        if (state.generation, state.state) == (generation, "ready"):
            return
        await omni.wait_changed()


def notes(replies: dict[str, list[Reply]]) -> list[dict[str, str]]:
    return [reply.result()["notes"] for reply in replies["able"]]


async def test_every_replica_replies_with_a_value_or_an_error() -> None:
    async with opened() as omni:
        replies = await omni.call("notes")
        assert [reply.value["pid"] for reply in replies["able"]] == [pid_of(omni, "able", each) for each in (0, 1)]
        (plain,) = replies["plain"]
        assert isinstance(plain.error, Unsupported)
        assert (plain.error.stage, plain.error.capability) == ("plain", "notes")
        assert "EchoEngine" in plain.error.why
        replies = await omni.call("note", {"name": "a", "text": ""}, stages=["able"])
        assert [type(reply.error) for reply in replies["able"]] == [InvalidRequest] * 2
        for wrong in ({"stages": ["nowhere"]}, {"arguments": {"x": object()}}, {"arguments": {"x": "y" * 70_000}}):
            with pytest.raises(InvalidRequest):
                await omni.call("note", **wrong)  # type: ignore[arg-type]


async def test_a_frozen_worker_times_out_alone_and_accepts_a_bounded_number_of_calls() -> None:
    async with opened() as omni:
        os.kill(frozen := pid_of(omni, "able"), signal.SIGSTOP)
        replies = await omni.call("notes", timeout_s=0.3)
        first, second = replies["able"]
        assert isinstance(first.error, CallTimedOut)
        assert second.result()["notes"] == {}
        for _ in range(MAX_CALLS - 1):
            await omni.call("notes", stages=["able"], timeout_s=0.0)
        first, second = (await omni.call("notes", stages=["able"], timeout_s=5.0))["able"]
        assert isinstance(first.error, TooManyCalls)
        assert second.result()["notes"] == {}
        os.kill(frozen, signal.SIGCONT)
        while isinstance((await omni.call("notes"))["able"][0].error, TooManyCalls):
            pass
        assert notes(await omni.call("notes")) == [{}, {}]


@pytest.mark.parametrize("how", ["killed", "crashed"])
async def test_the_death_of_a_worker_is_its_reply(how: str) -> None:
    async with opened() as omni:
        if how == "killed":
            os.kill(pid := pid_of(omni, "able"), signal.SIGSTOP)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_kill, pid)  # runs when the call was posted
                first = (await omni.call("notes"))["able"][0]
        else:
            first = (await omni.call("crash", stages=["able"]))["able"][0]
        assert isinstance(first.error, WorkerLost)
        assert first.error.exit is not None
        assert (first.error.exit.signal, first.error.exit.exit_code) in (("SIGKILL", None), (None, 1))
        await wait_generation(omni, 0, 2)
        assert (await omni.call("notes"))["able"][0].error is None


async def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def test_every_worker_has_the_desired_state_from_its_first_request_on() -> None:
    async with opened() as omni:
        replies = await omni.set_desired("note", {"name": "a", "text": "1"}, key="a", stages=["able"])
        assert [reply.value for reply in replies["able"]] == ["1", "1"]
        await omni.set_desired("note", {"name": "b", "text": "2"}, key="b", stages=["able"])
        await omni.set_desired("note", {"name": "a", "text": "3"}, key="a", stages=["able"])
        for replica in (0, 1):
            os.kill(pid_of(omni, "able", replica), signal.SIGKILL)
        for replica in (0, 1):
            await wait_generation(omni, replica, 2)
        assert notes(await omni.call("notes")) == [{"a": "3", "b": "2"}] * 2
        omni.drop_desired("note", key="a", stages=["able"])
        os.kill(pid_of(omni, "able"), signal.SIGKILL)
        await wait_generation(omni, 0, 3)
        assert notes(await omni.call("notes")) == [{"b": "2"}, {"a": "3", "b": "2"}]


async def test_a_refused_change_leaves_the_desired_state_as_it_was() -> None:
    async with opened() as omni:
        await omni.set_desired("note", {"name": "a", "text": "1"}, key="a", stages=["able"])
        replies = await omni.set_desired("note", {"name": "a", "text": ""}, key="a")
        assert isinstance(replies["plain"][0].error, Unsupported)
        assert {type(reply.error) for reply in replies["able"]} == {InvalidRequest}
        os.kill(pid_of(omni, "able"), signal.SIGKILL)
        os.kill(pid_of(omni, "plain"), signal.SIGKILL)
        await wait_generation(omni, 0, 2)
        assert notes(await omni.call("notes")) == [{"a": "1"}] * 2
