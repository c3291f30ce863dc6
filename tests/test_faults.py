"""What clients and operators see when workers crash, refuse requests or are given up. Real processes, real signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import trio
import trio.testing

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import (
    Aborted,
    InvalidRequest,
    StageCrashed,
    StageFailed,
    StageUnavailable,
)
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import CLIENT_ADDRESS, Address
from omni_actors.system import OmniSystem
from ringbuf._words import CONSUMER, PRODUCER, Column
from tests.support.echo_systems import (
    WATCHDOG_S,
    ask,
    generation_of,
    one_stage,
    pid_of,
    read,
    two_stages,
    wait_for,
    wait_restarted,
)
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

QUICK = {f"stages.{stage}.restart.backoff_s": 0.01 for stage in ("first", "second")}


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(two_stages()), fixture_processes) as shared_system:
        yield shared_system


@pytest.mark.parametrize(("stage", "other"), [("first", "second"), ("second", "first")])
def test_sigkill_ends_the_request_with_the_facts_and_the_stage_is_restarted(
    shared_system: SharedSystem, stage: str, other: str
) -> None:
    async def work(omni: OmniSystem) -> None:
        [before], [neighbour] = omni.health().stages[stage], omni.health().stages[other]
        hanging = ask(omni, stage=stage, hang=True)
        pid = pid_of(omni, stage)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StageCrashed, match=f"'{stage}'.*SIGKILL") as caught:
            await read(hanging)
        error = caught.value
        assert (error.stage, error.replica, error.generation) == (stage, 0, before.generation)
        assert (error.pid, error.signal, error.exit_code) == (pid, "SIGKILL", None)
        assert error.retryable
        await wait_restarted(omni, stage, before.generation + 1)
        assert omni.health().stages[other] == [neighbour], "the other worker is not affected"
        [after] = omni.health().stages[stage]
        assert after.restarts == before.restarts + 1
        assert "SIGKILL" in (after.last_exit or "")
        assert [output.finished for output in await read(ask(omni))] == [True]

    shared_system.run(work)


@pytest.mark.parametrize(("stage", "where"), [("first", "feed"), ("second", "step")])
def test_an_engine_s_exception_is_exit_code_1_with_its_traceback(
    shared_system: SharedSystem, stage: str, where: str
) -> None:
    async def work(omni: OmniSystem) -> None:
        before = generation_of(omni, stage)
        with pytest.raises(StageCrashed) as caught:
            await read(ask(omni, stage=stage, **{"raise": where}))
        assert (caught.value.signal, caught.value.exit_code) == (None, 1)
        tail = caught.value.stderr_tail
        assert tail[0] == "Traceback (most recent call last):"
        assert tail[-1] == f"RuntimeError: the chunk asked for a crash in {where}"
        await wait_restarted(omni, stage, before + 1)
        assert len(await read(ask(omni))) == 1

    shared_system.run(work)


@with_shared_system
async def test_stderr_and_exit_code_of_a_worker_are_kept(omni: OmniSystem) -> None:
    with pytest.raises(StageCrashed) as caught:
        await read(ask(omni, stage="second", stderr="out of ideas", exit=42))
    assert (caught.value.exit_code, caught.value.stderr_tail) == (42, ("out of ideas",))


@with_shared_system
async def test_a_signal_without_a_name_is_reported_by_its_number(omni: OmniSystem) -> None:
    hanging = ask(omni, stage="second", hang=True)
    os.kill(pid_of(omni, "second"), signal.SIGRTMIN + 5)
    with pytest.raises(StageCrashed) as caught:
        await read(hanging)
    assert caught.value.signal == f"signal {signal.SIGRTMIN + 5}"


@with_shared_system
async def test_outputs_from_before_the_crash_are_read_before_the_error(omni: OmniSystem) -> None:
    generation = ask(omni, ("text", "audio"), stage="second", exit=3)
    got = []
    with pytest.raises(StageCrashed), trio.fail_after(WATCHDOG_S):  # noqa: PT012
        async for output in generation:
            got.append(output.stage)  # noqa: PERF401 - it ends by an exception
    assert got == ["first"]


async def test_a_crash_does_not_affect_requests_on_the_other_replica() -> None:
    async with OmniSystem.open(one_stage(replicas=2, options={"step_s": 0.002, "fan_out": 100})) as omni:
        pieces = [Input({"text": "x"}), Input({"text": "x", "echo": {"hang": True}})]
        doomed, safe = omni.submit({"script": pieces}, ("audio",), on_failure="fail"), ask(omni)
        placed = [g.stream.request.replay_state.placement["only"].replica for g in (doomed, safe)]
        assert sorted(placed) == [0, 1]
        with trio.fail_after(WATCHDOG_S):
            await anext(aiter(doomed))
            await anext(aiter(safe))  # both have begun
        os.kill(pid_of(omni, "only", placed[0]), signal.SIGKILL)
        assert len(await read(safe)) == 99
        with pytest.raises(StageCrashed) as caught:
            await read(doomed)
        assert caught.value.replica == placed[0]
        await wait_restarted(omni, "only", 2, replica=placed[0])
        assert omni.health().stages["only"][placed[1]].generation == 1


async def test_a_crash_does_not_end_an_upstream_stage_that_is_still_sending() -> None:
    """The dying consumer closes its rings while much of the producer's output still waits for room."""
    overrides = {"stages.first.ring_bytes": 4096, "stages.first.options.payload_bytes": 300_000}
    async with OmniSystem.open("echo", **{**QUICK, **overrides, "stages.first.options.fan_out": 10}) as omni:
        with pytest.raises(StageCrashed, match="'second'"):
            await read(ask(omni, stage="second", **{"raise": "feed"}))
        await wait_restarted(omni, "second", generation=2)
        assert len(await read(ask(omni))) == 10
        assert omni.health().stages["first"][0].generation == 1


@with_shared_system
async def test_a_crash_does_not_end_the_parent_that_is_still_sending_input(omni: OmniSystem) -> None:
    before = generation_of(omni, "first")
    failing = {"text": "x", "echo": {"stage": "first", "raise": "feed"}}
    big = {"pixels": np.zeros(3_000_000, np.uint8)}
    script = {"script": [Input(failing), Input({}, big)]}
    requests = [omni.submit(script, ["audio"], on_failure="fail") for _ in range(4)]
    for request in requests:
        with pytest.raises(StageCrashed, match="'first'"):
            await read(request)
    await wait_restarted(omni, "first", before + 1)
    assert len(await read(ask(omni))) == 1


async def test_a_replica_that_is_given_up_does_not_stop_its_upstream_stage() -> None:
    """Its backlog exceeds the bytes above which the upstream stage is congested."""
    overrides = {
        "stages.second.replicas": 2,
        "stages.second.restart.intensity": 0,
        "stages.first.options.payload_bytes": 20_000_000,
        "stages.first.options.fan_out": 2,
    }
    async with OmniSystem.open("echo", **overrides) as omni:
        doomed = ask(omni, stage="second", hang=True)
        replica = doomed.stream.request.replay_state.placement["second"].replica
        with trio.fail_after(WATCHDOG_S):
            # The first stage has sent its second output, which waits for room: the second stage hangs in the first one.
            while "first" not in doomed.stream.request.stats:  # noqa: ASYNC110 - there is no event for it
                await trio.sleep(0.01)
        os.kill(pid_of(omni, "second", replica), signal.SIGKILL)
        with pytest.raises(StageCrashed):
            await read(doomed)
        await wait_for(omni, lambda: omni.health().stages["second"][replica].state == "failed")
        assert not omni.errored, "the other replica serves"
        assert omni.dead_error is None
        assert omni.is_running
        assert len(await read(ask(omni))) == 2


@with_shared_system
async def test_a_refused_request_does_not_affect_others(omni: OmniSystem) -> None:
    before = [generation_of(omni, stage) for stage in ("first", "second")]
    for where in ("feed", "step"):
        for stage in ("first", "second"):
            with pytest.raises(InvalidRequest, match="asked to be refused"):
                await read(ask(omni, stage=stage, invalid=where))
    assert len(await read(ask(omni))) == 1
    assert [generation_of(omni, stage) for stage in ("first", "second")] == before


PAIRS = [
    (CLIENT_ADDRESS, Address("first", 0)),
    (Address("first", 0), Address("second", 0)),
    (Address("second", 0), CLIENT_ADDRESS),
]


@pytest.mark.parametrize("column", [PRODUCER, CONSUMER], ids=lambda column: column.end)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].stage)
def test_a_corrupted_ring_ends_at_most_the_workers_at_its_ends(
    shared_system: SharedSystem, pair: tuple[Address, Address], column: Column
) -> None:
    """A program that writes to the wrong address leaves a position that the protocol never writes.

    A reader finds it, or its owner overwrites it; the answer is the same.
    """
    script = {"script": [Input({}, {"pixels": np.arange(100_000, dtype=np.uint8)})]}

    async def work(omni: OmniSystem) -> None:
        restarts = {stage: replica.restarts for stage, [replica] in omni.health().stages.items()}
        (before,) = await read(omni.submit(script, ["audio"]))
        omni._edges._rings[pair]._segment.words[column.position] = 12345
        (after,) = await read(omni.submit(script, ["audio"]))
        assert np.array_equal(after.tensors["pixels"].numpy(), before.tensors["pixels"].numpy())
        await wait_for(omni, lambda: omni.health().ready)
        assert all(replica.restarts <= restarts[stage] + 1 for stage, [replica] in omni.health().stages.items())

    shared_system.run(work)


# giving up


async def test_a_stage_past_its_intensity_is_given_up_and_the_others_still_serve() -> None:
    overrides = {**QUICK, "stages.second.restart.intensity": 1}
    async with OmniSystem.open("echo", **overrides) as omni:
        for generation in (1, 2):
            await wait_restarted(omni, "second", generation)
            with pytest.raises(StageCrashed):
                await read(ask(omni, stage="second", exit=generation))
        await wait_for(omni, lambda: omni.dead_error is not None)
        error = omni.dead_error
        assert isinstance(error, StageFailed)
        assert (error.stage, [exit.exit_code for exit in error.exits]) == ("second", [1, 2])
        assert "intensity 1" in error.reason
        with pytest.raises(StageUnavailable, match="'second'") as caught:
            ask(omni)
        assert caught.value.cause is error
        assert not omni.errored, "the first stage still gives text"
        assert [output.delta for output in await read(ask(omni, ("text",)))] == ["x"]
        health = await omni.check_health()
        assert (health.ready, health.stages["second"][0].state) == (False, "failed")
        assert health.error == str(error)


async def test_a_system_that_can_serve_nothing_is_errored() -> None:
    async with OmniSystem.open(one_stage(restart=Restart(intensity=0))) as omni:
        with pytest.raises(StageCrashed):
            await read(ask(omni, exit=7))
        await wait_for(omni, lambda: omni.errored)
        assert not omni.is_running
        with pytest.raises(StageUnavailable):
            ask(omni)
        with pytest.raises(StageFailed, match="exited with code 7") as caught:
            await omni.check_health()
        assert caught.value is omni.dead_error


async def test_a_system_that_refuses_every_request_is_errored() -> None:
    """The last stage needs both its inputs, so one failed stage leaves no route."""
    stages = {
        "a": Stage(engine="echo", accepts=("script",)),
        "b": Stage(engine="echo", inputs=("a",), restart=Restart(intensity=0)),
        "c": Stage(engine="echo", inputs=("a", "b"), emits="audio"),
    }
    async with OmniSystem.open(Pipeline(name="detour", stages=stages)) as omni:
        assert not omni.errored
        os.kill(pid_of(omni, "b"), signal.SIGKILL)
        await wait_for(omni, lambda: omni.dead_error is not None)
        with pytest.raises(StageUnavailable):
            ask(omni)
        assert omni.errored


@with_shared_system
async def test_the_order_of_stages_in_the_pipeline_does_not_matter(omni: OmniSystem) -> None:
    assert list(omni.pipeline.stages) == ["second", "first"]
    assert not omni.errored
    assert omni.is_running
    assert len(await read(omni.generate(script="x", modalities=("audio",)))) == 1


@with_shared_system
async def test_a_name_in_use_and_an_invalid_deadline_are_refused(omni: OmniSystem) -> None:
    held = omni.generate(script="x", modalities=("audio",), request_id="mine")
    with pytest.raises(InvalidRequest) as caught:
        omni.generate(script="x", modalities=("audio",), request_id="mine")
    assert caught.value.param == "request_id"
    for deadline_s in (float("nan"), float("inf"), -1.0):
        with pytest.raises(InvalidRequest) as caught:
            omni.generate(script="x", modalities=("audio",), deadline_s=deadline_s)
        assert caught.value.param == "deadline_s"
    omni.abort("mine")
    with pytest.raises(Aborted):
        await read(held)
    omni.abort("unknown")
