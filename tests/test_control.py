"""Calls to real workers, and their desired state: values, refusals, timeouts, deaths."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from omni_actors import Pipeline, Reply, Unsupported
from omni_actors.config import Stage
from omni_actors.errors import Aborted, CallTimedOut, InvalidRequest, StageFailed, TooManyCalls, WorkerLost
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.calls import MAX_CALLS
from omni_actors.system import OmniSystem
from omni_actors.system.control import PAUSE_MODES
from tests.support.controllable_engine import FACTORY
from tests.support.frozen import freeze, let_time_out_at

WATCHDOG_S = 60.0
FAST = {"backoff_s": 0.01}
PIPELINE = Pipeline(
    name="controlled",
    stages={
        "plain": Stage(engine="echo", accepts=("script",)),
        "able": Stage(engine=FACTORY, inputs=("plain",), emits="text", deterministic=True),
    },
)


@asynccontextmanager
async def opened(standby: int = 0) -> AsyncIterator[OmniSystem]:
    overrides: dict[str, Any] = {f"stages.able.restart.{name}": value for name, value in FAST.items()}
    overrides |= {"stages.able.standby": standby, "stages.able.restart.intensity": 10}
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


async def test_tokens_come_from_the_first_replica_that_answers() -> None:
    stage = Stage(engine=FACTORY, accepts=("messages",), emits="text", replicas=2)
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(Pipeline(name="tokens", stages={"able": stage})) as omni:
            freeze(pid_of(omni, "able"))
            assert (await omni.tokenize("x", timeout_s=2 * WATCHDOG_S)).token_strs == ["x"]
            os.kill(pid_of(omni, "able"), signal.SIGCONT)


async def test_a_stage_without_replicas_says_so_when_tokens_are_asked_of_it() -> None:
    stage = Stage(engine="echo", accepts=("messages",), emits="text", replicas=0)
    async with OmniSystem.open(Pipeline(name="empty", stages={"echo": stage})) as omni:
        with pytest.raises(WorkerLost) as caught:
            await omni.tokenize("x")
    assert str(caught.value) == "stage 'echo' did not answer 'tokenize': it has no replicas"
    assert (caught.value.replica, caught.value.exit) == (None, None)


async def test_every_replica_replies_with_a_value_or_an_error_and_a_frozen_one_times_out_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(standby=1) as omni:
        replies = await omni.call("notes")
        assert [reply.value["pid"] for reply in replies["able"]] == [pid_of(omni, "able", each) for each in (0, 1)]
        (plain,) = replies["plain"]
        assert isinstance(plain.error, Unsupported)
        assert (plain.error.stage, plain.error.capability) == ("plain", "notes")
        assert plain.error.why == "its engine has no such capability"
        replies = await omni.call("note", {"name": "a", "text": ""}, stages=["able"])
        assert [type(reply.error) for reply in replies["able"]] == [InvalidRequest] * 2
        for wrong in ({"stages": ["nowhere"]}, {"arguments": {"x": object()}}, {"arguments": {"x": "y" * 70_000}}):
            with pytest.raises(InvalidRequest):
                await omni.call("note", **wrong)
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await omni.set_desired("note", {"name": "a", "text": "1"}, stages=["able"], timeout_s=math.nan)
        freeze(frozen := pid_of(omni, "able"))
        let_time_out_at({Address("able", 0)}, monkeypatch)
        replies = await omni.call("notes", timeout_s=0.2)
        first, second = replies["able"]
        assert isinstance(first.error, CallTimedOut)
        assert second.result()["notes"] == {}
        for _ in range(MAX_CALLS - 1):
            await omni.call("notes", stages=["able"], timeout_s=0.0)
        first, second = (await omni.call("notes", stages=["able"], timeout_s=0.2))["able"]
        assert isinstance(first.error, TooManyCalls)
        assert second.result()["notes"] == {}
        monkeypatch.undo()
        os.kill(frozen, signal.SIGCONT)
        while isinstance((await omni.call("notes"))["able"][0].error, TooManyCalls):
            pass
        assert notes(await omni.call("notes")) == [{}, {}]


async def test_a_call_that_cannot_be_sent_is_refused_and_ends_no_worker() -> None:
    wrong: list[tuple[Any, Any, Any]] = [(5, {}, 1.0), ("\ud800", {}, 1.0), ("note", {"name": "a", "text": ""}, None)]
    wrong += [("note", arguments, 1.0) for arguments in (5, {1: 2}, {"name": object()}, {"name": "\ud800"})]
    wrong += [("note", {"name": "a", "text": "1"}, timeout_s) for timeout_s in (-1, 10**400, True)]
    async with opened() as omni:
        for capability, arguments, timeout_s in wrong:
            for method in (omni.call, omni.set_desired):
                with pytest.raises(InvalidRequest):
                    await method(capability, arguments, timeout_s=timeout_s)
        os.kill(pid_of(omni, "able"), signal.SIGKILL)
        await wait_generation(omni, 0, 2)
        assert notes(await omni.call("notes", stages=["able"])) == [{}]


async def test_stages_that_are_no_names_are_refused() -> None:
    wrong: list[Any] = ["able", 5, [1, "a"], [["able"]], (name for name in ["able"])]
    async with opened() as omni:
        for stages in wrong:
            with pytest.raises(InvalidRequest, match="expected names") as refused:
                await omni.call("notes", stages=stages)
            assert refused.value.param == "stages"


async def test_a_shutdown_with_a_wrong_time_changes_nothing() -> None:
    wrong: list[Any] = [-1, math.nan, 10**400, "1", None]
    async with opened() as omni:
        for timeout_s in wrong:
            with pytest.raises(InvalidRequest) as refused:
                await omni.shutdown(timeout_s)
            assert refused.value.param == "timeout_s"
        assert omni.is_running
        assert await ask(omni, "served").text() == "served"


@pytest.mark.parametrize(
    ("capability", "arguments"),
    [("worker_status", {"x": 1}), ("freeze", {}), ("supports", {}), ("note", {"x": 1}), ("itself", {}), ("huge", {})],
)
async def test_wrong_arguments_and_values_that_cannot_be_sent_end_no_worker(
    capability: str, arguments: dict[str, Any]
) -> None:
    async with opened() as omni:
        (reply,) = (await omni.call(capability, arguments, stages=["able"]))["able"]
        assert isinstance(reply.error, InvalidRequest)
        assert notes(await omni.call("notes", stages=["able"])) == [{}]


async def test_a_change_of_state_reaches_a_worker_that_has_many_calls_to_answer() -> None:
    async with opened() as omni:
        running = ask(omni, "running")
        assert await running.text() == "running"
        await omni.pause_generation("keep")
        freeze(frozen := pid_of(omni, "able"))
        for _ in range(MAX_CALLS + 1):
            await omni.call("notes", stages=["able"], timeout_s=0.0)
        note = {"name": "a", "text": "1"}
        (reply,) = (await omni.set_desired("note", note, stages=["able"], timeout_s=0.0))["able"]
        assert isinstance(reply.error, CallTimedOut)
        await omni.resume_generation()
        while True:
            try:
                await omni.set_desired("note", note, stages=["able"], timeout_s=0.0)
            except TooManyCalls:
                break
        with pytest.raises(TooManyCalls):
            await omni.set_desired("note", {"name": "b", "text": "2"}, key="b", stages=["able"])
        os.kill(frozen, signal.SIGCONT)
        assert await ask(omni, "again").text() == "again"
        while (reply := (await omni.call("notes"))["able"][0]).error is not None:
            pass
        assert reply.value["notes"] == {"a": "1"}


async def test_the_death_of_a_worker_is_its_reply() -> None:
    async with opened() as omni:
        freeze(pid := pid_of(omni, "able"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_kill, pid)  # runs when the call was posted
            (killed,) = (await omni.call("notes"))["able"]
        await wait_generation(omni, 0, 2)
        (crashed,) = (await omni.call("crash", stages=["able"]))["able"]
        await wait_generation(omni, 0, 3)
        exits = [each.error.exit for each in (killed, crashed) if isinstance(each.error, WorkerLost)]
        assert [(each.signal, each.exit_code) for each in exits if each] == [("SIGKILL", None), (None, 1)]
        assert (await omni.call("notes"))["able"][0].error is None


async def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def test_every_worker_has_the_desired_state_and_a_refused_change_leaves_it_as_it_was() -> None:
    async with opened(standby=1) as omni:
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
        replies = await omni.set_desired("note", {"name": "b", "text": ""}, key="b")
        assert isinstance(replies["plain"][0].error, Unsupported)
        assert {type(reply.error) for reply in replies["able"]} == {InvalidRequest}
        os.kill(pid_of(omni, "able"), signal.SIGKILL)
        os.kill(pid_of(omni, "plain"), signal.SIGKILL)
        await wait_generation(omni, 0, 4)
        assert notes(await omni.call("notes", stages=["able"])) == [{"b": "2"}, {"a": "3", "b": "2"}]


async def test_a_change_at_which_the_engine_raises_ends_two_workers_and_no_more() -> None:
    async with opened() as omni:
        await omni.set_desired("note", {"name": "a", "text": "1"}, stages=["able"])
        (reply,) = (await omni.set_desired("note", {"name": "a", "text": "/none"}, stages=["able"]))["able"]
        assert isinstance(reply.error, WorkerLost)
        assert reply.error.raised
        await wait_generation(omni, 0, 3)
        assert notes(await omni.call("notes", stages=["able"])) == [{"a": "1"}]


@pytest.mark.parametrize("accepts", [True, False])
async def test_a_worker_that_has_not_answered_a_change_decides_before_those_that_load(
    tmp_path: Path, accepts: bool
) -> None:
    note = {"name": "a", "text": str(tmp_path / "note")}
    async with opened(standby=1) as omni:
        freeze(frozen := pid_of(omni, "able", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(omni.set_desired, "note", note, stages=["able"]))
            while omni.health().stages["able"][1].restarts < 2:  # its workers find no file
                await omni.wait_changed()
            assert omni._supervisor.desired.get("able", "note") == note
            if accepts:
                (tmp_path / "note").write_text("1")
            os.kill(frozen, signal.SIGCONT)
        while not all(replica.state == "ready" for replica in omni.health().stages["able"]):
            await omni.wait_changed()
        assert notes(await omni.call("notes", stages=["able"])) == [{"a": "1"} if accepts else {}] * 2


async def test_a_refused_change_is_taken_back_also_when_its_caller_was_cancelled() -> None:
    async with opened() as omni:
        freeze(frozen := pid_of(omni, "able"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(omni.set_desired, "note", {"name": "a", "text": ""}, stages=["able"]))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        os.kill(frozen, signal.SIGCONT)
        assert notes(await omni.call("notes", stages=["able"])) == [{}], "the worker has answered the change before"
        os.kill(frozen, signal.SIGKILL)
        await wait_generation(omni, 0, 2)
        assert notes(await omni.call("notes", stages=["able"])) == [{}]


async def test_a_change_that_is_refused_after_its_timeout_is_taken_back() -> None:
    async with opened() as omni:
        freeze(frozen := pid_of(omni, "able"))
        for _ in range(2):  # tried again, before the worker has answered
            replies = await omni.set_desired("note", {"name": "a", "text": ""}, stages=["able"], timeout_s=0.0)
            assert isinstance(replies["able"][0].error, CallTimedOut)
        os.kill(frozen, signal.SIGCONT)
        assert notes(await omni.call("notes", stages=["able"])) == [{}], "the worker has answered the changes before"
        os.kill(frozen, signal.SIGKILL)
        await wait_generation(omni, 0, 2)
        assert notes(await omni.call("notes", stages=["able"])) == [{}]


async def test_asking_often_for_the_health_of_a_failed_system_keeps_no_frames() -> None:
    never = {"stages.able.restart.intensity": 0, "stages.able.restart.retry_s": 0.0}
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(PIPELINE, overrides=never) as omni:
            os.kill(pid_of(omni, "able"), signal.SIGKILL)
            while not omni.errored:
                await omni.wait_changed()
            for _ in range(10):
                with pytest.raises(StageFailed) as caught:
                    await omni.check_health()
            assert len(caught.traceback) < 10


# aborting and pausing


def ask(omni: OmniSystem, text: str = "x", **options: Any) -> Generation:
    return omni.submit({"script": [Input({"text": text, **options})]}, ("text",))


async def test_an_abort_answers_what_the_workers_have_freed() -> None:
    async with opened() as omni:
        freeze(stopped := pid_of(omni, "able"))
        first, second = ask(omni), ask(omni)
        aborting = omni.abort([first.request_id, second.request_id, "unknown"])
        assert omni.in_flight == 0, "it is aborted before it is awaited"
        os.kill(stopped, signal.SIGCONT)
        freed = await aborting
        assert freed.requests == {name: ["plain", "able"] for name in (first.request_id, second.request_id)}
        left = {stage: [reply.value["requests"] for reply in replies] for stage, replies in freed.replies.items()}
        assert left == {"plain": [0], "able": [0]}
        with pytest.raises(Aborted):
            await first.collect()
        omni.abort(second.request_id)  # harmless
        assert (await omni.abort("unknown")).requests == {}


async def test_new_requests_wait_while_generation_is_paused() -> None:
    async with opened() as omni:
        with pytest.raises(InvalidRequest, match="mode"):
            await omni.pause_generation("later")  # type: ignore[arg-type]
        assert not await omni.is_paused()
        for generation, mode in enumerate(PAUSE_MODES, start=2):
            running = ask(omni, "running")
            if mode == "keep":
                assert await running.text() == "running"
            await omni.pause_generation(mode)
            assert await omni.is_paused()
            if mode == "abort":
                with pytest.raises(Aborted, match="paused"):
                    await running.text()
            elif mode == "wait":
                assert omni.in_flight <= 1, "it was waited for; its client may not have read it"
                assert await running.text() == "running"
            held = ask(omni, "held")
            os.kill(pid_of(omni, "able"), signal.SIGKILL)
            await wait_generation(omni, 0, generation)
            assert omni.in_flight == 1
            assert [reply.value["requests"] for reply in (await omni.call("worker_status"))["able"]] == [0]
            await omni.resume_generation()
            assert await held.text() == "held"


async def test_a_kept_request_goes_on_exactly_where_it_was_also_after_a_death() -> None:
    """The pause finds a worker that has got all its input, and has made one output."""
    async with opened() as omni:
        send, receive = trio.open_memory_channel[Input](200)
        running = omni.submit({"script": receive}, ("text",))
        send.send_nowait(Input({"text": "0"}))
        first = await running.__anext__()
        pid, able = pid_of(omni, "able"), omni._supervisor.replicas[Address("able", 0)]
        freeze(pid)
        for each in range(1, 200):
            send.send_nowait(Input({"text": str(each)}))
        send.close()
        request = running.stream.request
        while "plain" not in request.stats:  # noqa: ASYNC110 - no event announces that the first stage has sent all
            await trio.sleep(0.001)
        replies = dict[str, list[Reply]]()

        async def pause() -> None:
            replies.update(await omni.pause_generation("keep"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pause)
            while not able.incarnation.calls.remaining_s():  # noqa: ASYNC110 - no event announces the call
                await trio.sleep(0.001)
            os.kill(pid, signal.SIGCONT)
        assert {reply.error for each in replies.values() for reply in each} == {None}
        os.kill(pid, signal.SIGKILL)
        await wait_generation(omni, 0, 2)
        while (await omni.call("active", stages=["able"]))["able"][0].result() == []:
            pass
        await omni.call("worker_status")  # the first stage has sent its outputs again
        for _ in range(20):  # turns, in each of which a worker makes a step unless it is frozen
            await omni.call("worker_status", stages=["able"])
        await trio.testing.wait_all_tasks_blocked()
        assert not request.pieces, "a worker that starts meanwhile is frozen too"
        await omni.resume_generation()
        assert f"{first.delta}{await running.text()}" == "".join(map(str, range(200)))
