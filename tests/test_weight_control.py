"""Updates of weights among pauses, deaths and requests that do not end, with real workers without a model."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
import trio.testing
from safetensors.numpy import load, save_file

from omni_actors import Pipeline
from omni_actors.config import Stage
from omni_actors.errors import CallTimedOut, InvalidRequest, OmniError, SystemClosed, WorkerLost
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import Address
from omni_actors.supervisor import devices
from omni_actors.supervisor.calls import MAX_CALLS, PendingCall, Reply
from omni_actors.supervisor.replica import Replica
from omni_actors.system import OmniSystem
from omni_actors.system.calls import Replies
from omni_actors.system.kept_updates import CAPABILITY, MOST_TENSORS
from omni_actors.system.weight_memory import WeightMemory
from tests.support.controllable_engine import FACTORY
from tests.support.frozen import freeze, let_time_out_at
from tests.support.open_descriptors import weights_in_memory

WATCHDOG_S = 60.0
STAGES = ("able",)
ABLE = Stage(engine=FACTORY, accepts=("script",), emits="text", replicas=2, deterministic=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "new.safetensors"
    save_file({"unused": np.zeros(2, np.float32)}, path)
    return path


def contents_of(file: Path) -> tuple[bytes, int]:
    """The bytes of a file, and when it was changed, in ns."""
    return file.read_bytes(), file.stat().st_mtime_ns


def restore(file: Path, content: bytes, changed: int) -> None:
    file.write_bytes(content)
    os.utime(file, ns=(changed, changed))


@asynccontextmanager
async def opened(**overrides: Any) -> AsyncIterator[OmniSystem]:
    """overrides: of the stage."""
    overrides = {"restart.backoff_s": 0.01, "restart.intensity": 10, **overrides}
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(
            Pipeline(name="weights", stages={"able": ABLE}),
            overrides={f"stages.able.{name}": value for name, value in overrides.items()},
        ) as omni:
            yield omni


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that changes without an event of the system."""
    while not holds():  # noqa: ASYNC110 - of what is changed here, not all has an event
        await trio.sleep(0.005)


def generations(omni: OmniSystem) -> list[int]:
    """Those of the replicas, if all are ready."""
    replicas = omni.health().stages["able"]
    return [replica.generation for replica in replicas] if all(each.state == "ready" for each in replicas) else []


def ask(omni: OmniSystem) -> Generation:
    return omni.submit({"script": [Input({"text": "x"})]}, ("text",))


async def update(omni: OmniSystem, file: Path, version: str = "1") -> list[OmniError | None]:
    return [reply.error for reply in (await omni.update_weights(file, version=version, stages=STAGES))["able"]]


async def versions(omni: OmniSystem) -> set[str | None]:
    """Return the versions of many answers at a time: all replicas are among those that answered."""
    asked = [ask(omni) for _ in range(8)]
    return {(await each.collect()).data["text"].get("weights_version") for each in asked}


async def test_weights_at_which_an_engine_raises_are_taken_back_everywhere(file: Path) -> None:
    async with opened() as omni:
        assert all(
            reply.error is None for reply in (await omni.update_weights(file, version="1", stages=STAGES))["able"]
        )
        errors = await update(omni, file, "poison")
        assert any(isinstance(error, WorkerLost) and error.raised for error in errors)
        await omni.wait_ready()
        while not all(replica.state == "ready" for replica in omni.health().stages["able"]):
            await omni.wait_changed()
        assert await versions(omni) == {"1"}
        os.kill(omni.health().stages["able"][0].pid or 0, signal.SIGKILL)
        await omni.wait_ready()
        assert await versions(omni) == {"1"}


async def test_a_sleeping_stage_takes_any_number_of_updates_by_tensors() -> None:
    async with opened() as omni:
        await omni.sleep(2)
        for number in range(MOST_TENSORS + 2):
            await omni.update_weights({f"name{number}": np.zeros(2, np.float32)}, version=str(number), stages=STAGES)
        await omni.wake_up()
        assert await versions(omni) == {str(MOST_TENSORS + 1)}


@pytest.mark.parametrize("as_tensors", [False, True])
async def test_weights_of_a_sleeping_stage_at_which_its_engines_raise_are_taken_back(
    file: Path, as_tensors: bool
) -> None:
    given = {"unused": np.zeros(2, np.float32)} if as_tensors else file
    async with opened() as omni:
        await omni.update_weights(given, version="1", stages=STAGES)
        await omni.sleep(2)
        replies = await omni.update_weights(given, version="poison", stages=STAGES)
        assert all(isinstance(reply.error, WorkerLost) for reply in replies["able"])
        await omni.wake_up()
        while not all(replica.state == "ready" for replica in omni.health().stages["able"]):
            await omni.wait_changed()
        assert await versions(omni) == {"1"}
        assert await omni.get_weight_version() == {"able": "1"}


async def test_an_update_waits_for_running_requests_as_long_as_its_timeout(file: Path) -> None:
    async with opened() as omni:
        sender, receiver = trio.open_memory_channel[Input](1)
        running = omni.submit({"script": receiver}, ("text",))
        await sender.send(Input({"text": "first"}))
        assert (await running.__anext__()).delta == "first"
        replies = (await omni.update_weights(file, version="1", stages=STAGES, timeout_s=0.2))["able"]
        assert [type(reply.error) for reply in replies] == [CallTimedOut, CallTimedOut]
        assert not await omni.is_paused()
        assert await versions(omni) == {"0"}
        await sender.aclose()
        assert (await running.collect()).text == ""


async def test_an_update_does_not_wait_for_requests_that_a_pause_holds(file: Path) -> None:
    async with opened() as omni:
        await omni.pause_generation("keep")
        held = ask(omni)
        assert all(
            reply.error is None for reply in (await omni.update_weights(file, version="1", stages=STAGES))["able"]
        )
        assert await omni.is_paused()
        await omni.resume_generation()
        assert (await held.collect()).data["text"]["weights_version"] == "1"
        sender, receiver = trio.open_memory_channel[Input](1)
        running = omni.submit({"script": receiver}, ("text",))
        await sender.send(Input({"text": "first"}))
        assert (await running.__anext__()).delta == "first"
        await omni.pause_generation("keep")
        with pytest.raises(InvalidRequest, match="keep"):
            await omni.update_weights(file, version="2", stages=STAGES)
        await omni.resume_generation()
        await sender.aclose()
        await running.collect()


async def test_a_pause_that_begins_during_an_update_lasts(file: Path) -> None:
    async with opened() as omni:
        await omni.start_weight_update()
        await omni.pause_generation("wait")
        await omni.finish_weight_update()
        assert await omni.is_paused()
        await omni.resume_generation()
        assert await versions(omni) == {"0"}


async def test_generation_that_is_resumed_during_an_update_goes_on_at_its_end(file: Path) -> None:
    async with opened() as omni:
        await omni.pause_generation("wait")
        await omni.start_weight_update()
        await omni.resume_generation()
        assert await omni.is_paused(), "the update goes on"
        held = ask(omni)
        assert await update(omni, file, "1") == [None, None]
        await omni.finish_weight_update()
        assert not await omni.is_paused()
        assert (await held.collect()).data["text"]["weights_version"] == "1"


async def test_weights_at_which_workers_are_killed_are_taken_back(file: Path) -> None:
    """As by the kernel, for lack of memory: each worker that gets these weights ends by SIGKILL."""
    async with opened() as omni:
        assert await omni.get_weight_version() == {"able": "0"}
        assert await update(omni, file, "1") == [None, None]
        errors = await update(omni, file, "large")
        assert all(isinstance(error, WorkerLost) and not error.raised for error in errors)
        assert await omni.get_weight_version() == {"able": "1"}
        while not all(replica.state == "ready" for replica in omni.health().stages["able"]):
            await omni.wait_changed()
        assert await versions(omni) == {"1"}


async def test_a_worker_that_dies_once_during_an_update_gets_the_new_weights(file: Path) -> None:
    async with opened() as omni:
        frozen = omni._supervisor.replicas[Address("able", 0)]
        pid = omni.health().stages["able"][0].pid or 0
        freeze(pid)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(update, omni, file, "2")
            while not frozen.incarnation.calls.remaining_s():  # noqa: ASYNC110 - no event announces that it is called
                await trio.sleep(0.001)
            os.kill(pid, signal.SIGKILL)
        assert await omni.get_weight_version() == {"able": "2"}
        assert await versions(omni) == {"2"}


async def test_tensors_of_many_updates_take_the_memory_of_one() -> None:
    """And a worker that starts later has the newest of each name."""
    async with opened() as omni:
        for number in range(6):
            tensors = {"same": np.full(1000, number, np.float32), f"{number % 2}": np.full(10, number, np.int64)}
            replies = (await omni.update_weights(tensors, version="part", stages=STAGES))["able"]
            assert [reply.result() for reply in replies] == [{"updated": 2, "complete": False}] * 2
        [kept] = weights_in_memory()
        found = load(os.pread(kept, 1 << 20, 0))
        assert {name: array[0] for name, array in found.items()} == {"same": 5, "0": 4, "1": 5}
        os.kill(omni.health().stages["able"][0].pid or 0, signal.SIGKILL)
        await omni.wait_ready()
        assert await versions(omni) == {"part"}


async def test_tensors_without_dense_data_are_refused() -> None:
    async with opened() as omni:
        for tensor in (torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()):
            with pytest.raises(InvalidRequest, match="'name': a tensor was expected"):
                await omni.update_weights({"name": tensor}, stages=STAGES)
        assert not await omni.is_paused()


async def test_the_name_of_a_version_is_a_bounded_string(file: Path) -> None:
    async with opened() as omni:
        for version in (3, "v" * 257, "", "a\nb", "\ud800"):
            with pytest.raises(InvalidRequest, match="version") as refused:
                await omni.update_weights(file, version=version, stages=STAGES)  # type: ignore[arg-type]
            assert refused.value.param == "version"
        assert await omni.get_weight_version() == {"able": "0"}


async def test_the_version_of_a_relative_path_is_the_name_of_the_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    async with opened() as omni:
        for path in (".", Path()):
            await omni.update_weights(path, stages=STAGES)
            assert await omni.get_weight_version() == {"able": file.parent.name}
            assert await versions(omni) == {file.parent.name}


async def test_an_update_with_a_wrong_argument_changes_nothing(file: Path) -> None:
    wrong: list[dict[str, Any]] = [{"timeout_s": timeout_s} for timeout_s in (math.nan, -1, 10**400, "9", None)]
    wrong += [{"path": 5}, {"path": b"/"}, {"stages": 5}]
    async with opened() as omni:
        for given in wrong:
            with pytest.raises(InvalidRequest) as refused:
                await omni.update_weights(**{"path": file, "stages": STAGES, **given})
            assert [refused.value.param] == list(given)
        assert not await omni.is_paused()
        assert await versions(omni) == {"0"}


async def test_an_update_waits_for_the_requests_that_a_cancelled_start_has_left(file: Path) -> None:
    async with opened() as omni:
        sender, receiver = trio.open_memory_channel[Input](1)
        running = omni.submit({"script": receiver}, ("text",))
        await sender.send(Input({"text": "first"}))
        assert (await running.__anext__()).delta == "first"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(omni.start_weight_update)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        replies = (await omni.update_weights(file, version="1", stages=STAGES, timeout_s=0.2))["able"]
        assert [type(reply.error) for reply in replies] == [CallTimedOut, CallTimedOut]
        assert await omni.is_paused(), "until the caller of the start finishes"
        assert await omni.get_weight_version() == {"able": "0"}
        await omni.pause_generation("keep")
        with pytest.raises(InvalidRequest, match="keep"):
            await update(omni, file)
        await omni.resume_generation()
        async with trio.open_nursery() as nursery:

            async def expect_the_weights() -> None:
                assert await update(omni, file) == [None, None]

            nursery.start_soon(expect_the_weights)
            await until(lambda: omni._turn.value == 0)
            await sender.aclose()
            await running.collect()
        await omni.finish_weight_update()
        assert await versions(omni) == {"1"}


async def test_damaged_files_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    save_file({"unused": np.zeros(2, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    async with opened() as omni:
        assert [type(error) for error in await update(omni, path)] == [InvalidRequest, InvalidRequest]
        assert await versions(omni) == {"0"}


async def test_weights_that_are_refused_after_the_timeout_are_taken_back(file: Path) -> None:
    os.truncate(file, 8)
    async with opened() as omni:
        pids = [replica.pid or 0 for replica in omni.health().stages["able"]]
        for pid in pids:
            freeze(pid)
        await omni.start_weight_update()
        late = await omni.update_weights(file, version="1", stages=STAGES, timeout_s=0.0)
        assert [type(reply.error) for reply in late["able"]] == [CallTimedOut, CallTimedOut]
        assert await omni.get_weight_version() == {"able": "1"}, "the workers may still take them"
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await omni.call("worker_status")  # which they answer after the update
        assert await omni.get_weight_version() == {"able": "0"}


async def test_replicas_that_took_weights_which_another_refuses_after_the_timeout_start_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_time_out_at({Address("able", 1)}, monkeypatch)
    async with opened() as omni:
        freeze(pid := omni.health().stages["able"][1].pid or 0)
        await omni.start_weight_update()
        took, late = (await omni.update_weights(file, version="1", stages=STAGES, timeout_s=0.2))["able"]
        assert (took.error, type(late.error)) == (None, CallTimedOut)
        os.truncate(file, 8)
        os.kill(pid, signal.SIGCONT)
        while omni.health().stages["able"][0].generation == 1:
            await omni.wait_changed()
        await omni.finish_weight_update()
        await omni.wait_ready()
        assert await versions(omni) == {"0"}
        assert await omni.get_weight_version() == {"able": "0"}


@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("ended", [False, True])
async def test_all_replicas_have_one_version_whatever_they_answer_after_the_timeout(
    file: Path, monkeypatch: pytest.MonkeyPatch, *, accepts: bool, ended: bool
) -> None:
    """ended: whether the first refusal comes when the update has ended. accepts: what the last answer is."""
    content, changed = contents_of(file)
    may_end = trio.Event()

    async def waits(*_: Any) -> bool:
        await may_end.wait()
        return False

    monkeypatch.setattr(OmniSystem, "_die_again", waits)
    async with opened(replicas=3) as omni:
        _, *frozen = (replica.pid or 0 for replica in omni.health().stages["able"])
        for pid in frozen:
            freeze(pid)
        await omni.start_weight_update()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(omni.update_weights, file, version="1", stages=STAGES, timeout_s=0.0))
            await until(lambda: any(part.accepted for part in omni._supervisor.desired.parts("able")))
            if ended:
                may_end.set()
                await omni.finish_weight_update()
                await omni.start_weight_update()
            os.truncate(file, 8)
            os.kill(frozen[0], signal.SIGCONT)
            await until(lambda: generations(omni) == [2, 1, 1])
            may_end.set()
        if accepts:
            restore(file, content, changed)
        os.kill(frozen[1], signal.SIGCONT)
        await until(lambda: generations(omni) == [2, 1, 1 + accepts])
        await omni.call("worker_status")
        assert generations(omni) == [2, 1, 1 + accepts]
        await omni.finish_weight_update()
        assert await versions(omni) == {"0"}
        assert await omni.get_weight_version() == {"able": "0"}


@pytest.mark.parametrize("kind", ["permanent", "temporary"])
async def test_a_replica_raises_at_new_weights_after_the_timeout(file: Path, tmp_path: Path, kind: str) -> None:
    """kind: of restart. The one that took them starts again in any case, as it is not to blame."""
    raises = tmp_path / "raises"
    async with opened(**{"restart.type": kind}) as omni:
        pid = omni.health().stages["able"][1].pid or 0
        freeze(pid)
        await omni.start_weight_update()
        await omni.update_weights(file, version=str(raises), stages=STAGES, timeout_s=0.0)
        await until(lambda: any(part.accepted for part in omni._supervisor.desired.parts("able")))
        raises.touch()
        os.kill(pid, signal.SIGCONT)
        await until(lambda: omni.health().stages["able"][0].generation == 2)
        last = "ready" if kind == "permanent" else "failed"
        await until(lambda: [each.state for each in omni.health().stages["able"]] == ["ready", last])
        await omni.finish_weight_update()
        assert await versions(omni) == {"0"}
        assert await omni.get_weight_version() == {"able": "0"}


@pytest.mark.parametrize("raises", [False, True])
async def test_a_replica_fails_at_new_weights_after_its_timeout_while_the_reply_of_another_is_waited_for(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, raises: bool
) -> None:
    """raises: whether its engine raises, or refuses them."""
    late, flag = Address("able", 0), tmp_path / "raises"
    let_time_out_at(frozen := {late}, monkeypatch)
    wait = PendingCall.wait
    async with opened() as omni:
        pid, replica = omni.health().stages["able"][0].pid or 0, omni._supervisor.replicas[late]

        async def waits(call: PendingCall) -> Reply:
            if call.capability == CAPABILITY and call.address != late and frozen:  # and the wait for the other is over
                [part] = omni._supervisor.desired.parts("able")
                await until(lambda: bool(part.accepted))
                flag.touch() if raises else os.truncate(file, 8)
                os.kill(pid, signal.SIGCONT)
                await until(lambda: part.taken_back or bool(replica.history))
                frozen.clear()
            return await wait(call)

        monkeypatch.setattr(PendingCall, "wait", waits)
        freeze(pid)
        await omni.start_weight_update()
        first, _ = (await omni.update_weights(file, version=str(flag), stages=STAGES, timeout_s=0.0))["able"]
        assert isinstance(first.error, CallTimedOut)
        await until(lambda: bool(generations(omni)))
        await omni.finish_weight_update()
        assert await versions(omni) == {"0"}
        assert await omni.get_weight_version() == {"able": "0"}


def when_own_weights_are_sent(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], then: Callable[[], bool] = lambda: True
) -> None:
    """Act when the model's own weights were sent after one update, and wait until something holds before the rest."""
    replies = OmniSystem._replies
    sent = list[str]()

    async def waits(self: OmniSystem, calls: Any, stages: Any) -> Replies:
        sent.extend(call.capability for call in calls)
        if sent.count("update_weights") != 2 * len(calls):
            return await replies(self, calls, stages)
        act()
        found = await replies(self, calls, stages)
        await until(then)
        return found

    monkeypatch.setattr(OmniSystem, "_replies", waits)


async def test_a_replica_that_takes_new_weights_while_the_earlier_ones_are_sent_does_not_start_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, changed = contents_of(file)
    os.truncate(file, 8)
    let_time_out_at(frozen := {Address("able", 1)}, monkeypatch)
    async with opened() as omni:
        pid = omni.health().stages["able"][1].pid or 0

        def act() -> None:
            restore(file, content, changed)
            os.kill(pid, signal.SIGCONT)
            frozen.clear()

        when_own_weights_are_sent(monkeypatch, act)
        freeze(pid)
        await omni.update_weights(file, version="1", stages=STAGES, timeout_s=1.0)
        assert generations(omni) == [1, 1]
        assert await versions(omni) == {"0"}


async def test_replicas_start_again_if_one_cannot_be_sent_the_earlier_weights(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_time_out_at({Address("able", 1)}, monkeypatch)
    async with opened() as omni:
        pid = omni.health().stages["able"][1].pid or 0
        freeze(pid)
        for number in range(MAX_CALLS - 1):
            note = {"name": str(number), "text": "x"}
            await omni.set_desired("note", note, key=str(number), stages=STAGES, timeout_s=0.0)
        os.truncate(file, 8)
        await omni.update_weights(file, version="1", stages=STAGES, timeout_s=1.0)
        await until(lambda: generations(omni) == [2, 2])
        assert await versions(omni) == {"0"}
        assert len(omni._supervisor.desired.parts("able")) == MAX_CALLS - 1


async def test_an_update_that_is_taken_back_while_earlier_weights_are_sent_is_not_sent(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second.safetensors"
    second.write_bytes(b"")
    let_time_out_at(frozen := {Address("able", 1)}, monkeypatch)
    async with opened() as omni:
        pid = omni.health().stages["able"][1].pid or 0

        def act() -> None:
            os.truncate(file, 8)
            os.kill(pid, signal.SIGCONT)
            frozen.clear()

        freeze(pid)
        await omni.start_weight_update()
        await omni.update_weights(file, version="1", stages=STAGES, timeout_s=0.0)
        await until(lambda: any(part.accepted for part in omni._supervisor.desired.parts("able")))
        when_own_weights_are_sent(monkeypatch, act, lambda: generations(omni) == [2, 1])
        await omni.update_weights(second, version="2", stages=STAGES, timeout_s=1.0)
        await omni.finish_weight_update()
        assert await versions(omni) == {"0"}
        assert await omni.get_weight_version() == {"able": "0"}


async def test_an_update_ends_when_a_replica_that_had_no_worker_has_loaded_with_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = trio.Event()

    async def waits(*_: Any) -> tuple[str, ...]:
        await there.wait()
        return ()

    async with opened(replicas=1) as omni, trio.open_nursery() as nursery:
        monkeypatch.setattr(devices, "wait_place", waits)
        os.kill(omni.health().stages["able"][0].pid or 0, signal.SIGKILL)
        await until(lambda: omni.health().stages["able"][0].generation == 2)
        replies: list[Any] = []

        async def update_weights() -> None:
            replies.extend((await omni.update_weights(file, version="1", stages=STAGES))["able"])

        nursery.start_soon(update_weights)
        await until(lambda: bool(omni._supervisor.desired.parts("able")))
        there.set()
        await until(lambda: bool(replies))
        assert [type(reply.error) for reply in replies] == [WorkerLost]
        assert generations(omni) == [2]
        assert await versions(omni) == {"1"}


async def test_an_update_does_not_wait_for_a_replica_that_no_node_has_room_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(_: object, replica: Replica, changes: trio.lowlevel.ParkingLot) -> None:
        replica.incarnation.no_place = "no node has room"
        changes.unpark_all()
        await trio.sleep_forever()

    async with opened() as omni:
        monkeypatch.setattr(devices, "wait_place", no_room)
        replica = omni._supervisor.replicas[Address("able", 1)]
        replica.kill("by the test")
        await until(lambda: replica.incarnation.no_place is not None)
        assert [type(error) for error in await update(omni, file, "1")] == [type(None), WorkerLost]
        assert await omni.get_weight_version() == {"able": "1"}
        assert await versions(omni) == {"1"}


async def test_new_weights_are_kept_if_a_worker_ends_with_its_link_while_it_loads_them(file: Path) -> None:
    async with opened() as omni:
        replica = omni._supervisor.replicas[Address("able", 0)]
        freeze(omni.health().stages["able"][0].pid or 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(update, omni, file, "2")
            await until(lambda: replica.incarnation.calls.remaining_s() > 0)
            replica.kill("NodeLost: by the test")
            await until(lambda: replica.generation == 2 and replica.incarnation.worker is not None)
            replica.kill("LinkLost: by the test")
        assert [death.exit.was_cut_off for death in replica.history] == [True, True]
        assert await omni.get_weight_version() == {"able": "2"}
        assert await versions(omni) == {"2"}


@pytest.mark.parametrize("path", ["a\0b", "\0"])
async def test_a_path_with_a_nul_is_refused(path: str) -> None:
    async with opened() as omni:
        with pytest.raises(InvalidRequest, match="path: "):
            await omni.update_weights(path, stages=STAGES)


@pytest.mark.parametrize("version", ["2", "poison"])
async def test_workers_may_wake_while_updates_are_merged(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """version: of the second update, which workers take or die at."""
    merge = WeightMemory.merge

    async with opened() as omni:

        def meanwhile(*arguments: Any) -> Path:
            merged = merge(*arguments)
            trio.from_thread.run(omni.wake_up)
            trio.from_thread.run(until, lambda: bool(generations(omni)))
            return merged

        monkeypatch.setattr(WeightMemory, "merge", meanwhile)
        await omni.sleep(2)
        for number, each in enumerate(("1", version)):
            await omni.update_weights({f"name{number}": np.zeros(2, np.float32)}, version=each, stages=STAGES)
        last = "1" if version == "poison" else version
        assert await versions(omni) == {last}
        assert await omni.get_weight_version() == {"able": last}
        for part in omni._supervisor.desired.parts("able"):
            assert part.carried_out


async def test_tensors_are_kept_while_a_worker_loads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that was added during an update of all weights loads the earlier ones, too."""
    write = WeightMemory.write

    async with opened(**{"replicas": 1, "options.load_s": 1.0}) as omni:
        await omni.update_weights({"a": np.zeros(2, np.float32)}, version="part", stages=STAGES)
        pid = omni.health().stages["able"][0].pid or 0

        def freezes(*arguments: Any) -> Path:
            freeze(pid)
            return write(*arguments)

        monkeypatch.setattr(WeightMemory, "write", freezes)
        async with trio.open_nursery() as nursery:
            tensors = {"b": np.zeros(2, np.float32)}
            nursery.start_soon(partial(omni.update_weights, tensors, version="2", stages=STAGES))
            await until(lambda: len(omni._supervisor.desired.parts("able")) == 2)
            nursery.start_soon(omni.scale, "able", 2)
            added = Address("able", 1)
            await until(lambda: added in omni._supervisor.replicas)
            await until(lambda: len(omni._supervisor.replicas[added].incarnation.parts) == 2)
            os.kill(pid, signal.SIGCONT)
        assert generations(omni) == [1, 1]


async def test_tensors_of_an_update_that_timed_out_are_merged_with_those_of_the_next() -> None:
    async with opened() as omni:
        pids = [replica.pid or 0 for replica in omni.health().stages["able"]]
        await omni.start_weight_update()
        for number, timeout_s in enumerate((WATCHDOG_S, 0.0, WATCHDOG_S)):
            for pid in pids:
                freeze(pid) if not timeout_s else os.kill(pid, signal.SIGCONT)
            tensors = {f"{number}": np.full(10, number, np.int64)}
            await omni.update_weights(tensors, version="part", stages=STAGES, timeout_s=timeout_s)
        [kept] = weights_in_memory()
        assert load(os.pread(kept, 1 << 20, 0)).keys() == {"0", "1", "2"}


async def cancel_an_update(omni: OmniSystem, file: Path) -> int:
    """Cancel a caller when the engine of one replica has raised at the weights, and the other one has not answered.

    Returns the pid of the other one, which is stopped: the update goes on.
    """
    pid, call = omni.health().stages["able"][0].pid or 0, omni.call

    async def call_and_stop(*args: Any, **kwargs: Any) -> Replies:
        replies = await call(*args, **kwargs)
        freeze(pid)
        omni.call = call
        return replies

    omni.call = call_and_stop  # the update asks first whether the engines take weights
    async with trio.open_nursery() as nursery:
        nursery.start_soon(update, omni, file, "poison")
        while omni.health().stages["able"][1].generation == 1:
            await omni.wait_changed()
        assert await omni.is_paused()
        nursery.cancel_scope.cancel()
    return pid


async def test_an_update_is_brought_to_its_end_also_when_its_caller_was_cancelled(file: Path) -> None:
    async with opened() as omni:
        pid = await cancel_an_update(omni, file)
        assert await omni.is_paused(), "the update goes on"
        os.kill(pid, signal.SIGCONT)
        later = file.with_stem("later")
        save_file({"unused": np.ones(2, np.float32)}, later)
        await update(omni, later, "part")  # in its turn, after the other one
        assert not await omni.is_paused()
        while not all(replica.state == "ready" for replica in omni.health().stages["able"]):
            await omni.wait_changed()
        assert await versions(omni) == {"part"}
        os.kill(omni.health().stages["able"][0].pid or 0, signal.SIGKILL)
        await omni.wait_ready()
        assert await versions(omni) == {"part"}, "no worker gets the weights that were taken back"


async def test_finishing_waits_for_an_update_whose_caller_was_cancelled(file: Path) -> None:
    async with opened() as omni:
        await omni.start_weight_update()
        pid = await cancel_an_update(omni, file)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(omni.finish_weight_update)
            await trio.testing.wait_all_tasks_blocked()
            assert await omni.is_paused(), "the update goes on"
            os.kill(pid, signal.SIGCONT)
        assert not await omni.is_paused()


async def test_updates_end_with_the_system(file: Path) -> None:
    """One waits for a request, and another one for its turn."""
    ended: list[str] = []

    async def expect_the_end(omni: OmniSystem, version: str) -> None:
        with suppress(SystemClosed):
            await update(omni, file, version)
        ended.append(version)

    async with opened() as omni:
        sender, receiver = trio.open_memory_channel[Input](1)
        running = omni.submit({"script": receiver}, ("text",))
        await sender.send(Input({"text": "first"}))
        assert (await running.__anext__()).delta == "first"
        async with trio.open_nursery() as nursery:
            for version in "12":
                nursery.start_soon(expect_the_end, omni, version)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(WATCHDOG_S):
                await omni.shutdown()
                while len(ended) < 2:
                    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_an_update_of_a_closed_system_raises_and_keeps_no_tensors(
    monkeypatch: pytest.MonkeyPatch, *, meanwhile: bool
) -> None:
    """meanwhile: whether the system closes while the tensors are written, not before."""
    write = WeightMemory.write

    async with opened(replicas=1) as omni:

        def closes(*arguments: Any) -> Path:
            trio.from_thread.run(omni.shutdown)
            return write(*arguments)

        if meanwhile:
            monkeypatch.setattr(WeightMemory, "write", closes)
        else:
            await omni.shutdown()
        with pytest.raises(SystemClosed):
            await omni.update_weights({"a": np.zeros(2, np.float32)}, stages=STAGES)
        assert weights_in_memory() == []


async def test_a_refused_start_of_an_update_leaves_nothing(file: Path) -> None:
    async with opened() as omni:
        for mode in ("keep", "later"):
            with pytest.raises(InvalidRequest, match="mode"):
                await omni.start_weight_update(mode)  # type: ignore[arg-type]
        sender, receiver = trio.open_memory_channel[Input](1)
        running = omni.submit({"script": receiver}, ("text",))
        await sender.send(Input({"text": "first"}))
        assert (await running.__anext__()).delta == "first"
        replies = (await omni.update_weights(file, version="1", stages=STAGES, timeout_s=0.2))["able"]
        assert [type(reply.error) for reply in replies] == [CallTimedOut, CallTimedOut], "it waits for the request"
        await sender.aclose()
        await running.collect()
