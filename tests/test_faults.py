"""What the system does when its workers crash, hang, refuse, or cannot load. Real processes, real signals.

Where one worker's misfortune is the matter, the system has that one only, or is the module's, whose workers come back.
"""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import trio
import trio.testing

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import (
    Aborted,
    ConfigError,
    InvalidRequest,
    Overloaded,
    StageCrashed,
    StageFailed,
    StageUnavailable,
)
from omni_actors.generation import Generation, Output
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import CLIENT_ADDRESS, Abort, Address
from omni_actors.supervisor.process import LocalWorker
from omni_actors.supervisor.supervisor import NOT_STARTED
from omni_actors.system import OmniSystem
from ringbuf._words import CONSUMER, PRODUCER, Column
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

WATCHDOG_S = 60.0
QUICK = {f"stages.{stage}.restart.backoff_s": 0.01 for stage in ("first", "second")}
OFTEN = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)


def alone(engine: str = "echo", **more: Any) -> Pipeline:
    """A pipeline of one stage, "only", that comes back quickly."""
    more = {"accepts": ("script",), "emits": "audio", "restart": OFTEN, **more}
    return Pipeline(name="alone", stages={"only": Stage(engine=engine, **more)})


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    """Two stages, listed upside down, with rings that are small for the inputs here."""
    small: dict[str, Any] = {"engine": "echo", "restart": OFTEN, "ring_bytes": 4096}
    stages = {
        "second": Stage(inputs=("first",), emits="audio", **small),
        "first": Stage(accepts=("script",), emits="text", **small),
    }
    with open_shared_system(
        lambda: OmniSystem.open(Pipeline(name="small", stages=stages)), fixture_processes
    ) as shared_system:
        yield shared_system


def ask(omni: OmniSystem, modalities: tuple[str, ...] = ("audio",), /, **echo: Any) -> Generation:
    """A request of one chunk through the system, never replayed; ``echo`` are the failures it asks for."""
    return omni.submit({"script": [Input({"text": "x", "echo": echo})]}, modalities, on_failure="fail")


async def read(generation: Generation) -> list[Output]:
    with trio.fail_after(WATCHDOG_S):
        return [output async for output in generation]


async def wait_for(omni: OmniSystem, condition: Callable[[], bool]) -> None:
    with trio.fail_after(WATCHDOG_S):
        while not condition():
            await omni.wait_changed()


async def wait_back(omni: OmniSystem, stage: str, generation: int, replica: int = 0) -> None:
    def back() -> bool:
        health = omni.health().stages[stage][replica]
        return health.state == "ready" and health.generation >= generation

    await wait_for(omni, back)


def generation_of(omni: OmniSystem, stage: str) -> int:
    return omni.health().stages[stage][0].generation


def pid_of(omni: OmniSystem, stage: str, replica: int = 0) -> int:
    pid = omni.health().stages[stage][replica].pid
    assert pid is not None
    return pid


# crashes


@pytest.mark.parametrize(("stage", "other"), [("first", "second"), ("second", "first")])
def test_sigkill_ends_the_request_with_the_facts_and_the_stage_comes_back(
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
        await wait_back(omni, stage, before.generation + 1)
        assert omni.health().stages[other] == [neighbour], "its neighbour did not notice"
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
        await wait_back(omni, stage, before + 1)
        assert len(await read(ask(omni))) == 1

    shared_system.run(work)


@with_shared_system
async def test_what_a_worker_wrote_to_stderr_and_its_exit_code_are_kept(omni: OmniSystem) -> None:
    with pytest.raises(StageCrashed) as caught:
        await read(ask(omni, stage="second", stderr="out of ideas", exit=42))
    assert (caught.value.exit_code, caught.value.stderr_tail) == (42, ("out of ideas",))


@with_shared_system
async def test_a_signal_without_a_name_is_a_signal(omni: OmniSystem) -> None:
    hanging = ask(omni, stage="second", hang=True)
    os.kill(pid_of(omni, "second"), signal.SIGRTMIN + 5)
    with pytest.raises(StageCrashed) as caught:
        await read(hanging)
    assert caught.value.signal == f"signal {signal.SIGRTMIN + 5}"


@with_shared_system
async def test_outputs_that_came_before_the_crash_are_read_before_the_error(omni: OmniSystem) -> None:
    generation = ask(omni, ("text", "audio"), stage="second", exit=3)
    got = []
    with pytest.raises(StageCrashed), trio.fail_after(WATCHDOG_S):  # noqa: PT012
        async for output in generation:
            got.append(output.stage)  # noqa: PERF401 - it ends by an exception
    assert got == ["first"]


async def test_requests_on_the_other_replica_do_not_notice() -> None:
    async with OmniSystem.open(alone(replicas=2, options={"step_s": 0.002, "fan_out": 100})) as omni:
        pieces = [Input({"text": "x"}), Input({"text": "x", "echo": {"hang": True}})]
        doomed, safe = omni.submit({"script": pieces}, ("audio",), on_failure="fail"), ask(omni)
        placed = [g._stream.request.placement["only"].replica for g in (doomed, safe)]
        assert sorted(placed) == [0, 1]
        with trio.fail_after(WATCHDOG_S):
            await anext(aiter(doomed))
            await anext(aiter(safe))  # both are in the middle
        os.kill(pid_of(omni, "only", placed[0]), signal.SIGKILL)
        assert len(await read(safe)) == 99
        with pytest.raises(StageCrashed) as caught:
            await read(doomed)
        assert caught.value.replica == placed[0]
        await wait_back(omni, "only", 2, replica=placed[0])
        assert omni.health().stages["only"][placed[1]].generation == 1


async def test_a_crash_does_not_reach_the_stage_above_that_is_still_sending() -> None:
    """The consumer closes its rings on the way out, with much of the producer's output still waiting for room."""
    overrides = {"stages.first.ring_bytes": 4096, "stages.first.options.payload_bytes": 300_000}
    async with OmniSystem.open("echo", **{**QUICK, **overrides, "stages.first.options.fan_out": 10}) as omni:
        with pytest.raises(StageCrashed, match="'second'"):
            await read(ask(omni, stage="second", **{"raise": "feed"}))
        await wait_back(omni, "second", generation=2)
        assert len(await read(ask(omni))) == 10
        assert omni.health().stages["first"][0].generation == 1


@with_shared_system
async def test_a_crash_does_not_reach_the_system_that_is_still_sending_input(omni: OmniSystem) -> None:
    before = generation_of(omni, "first")
    failing = {"text": "x", "echo": {"stage": "first", "raise": "feed"}}
    big = {"pixels": np.zeros(3_000_000, np.uint8)}
    script = {"script": [Input(failing), Input({}, big)]}
    requests = [omni.submit(script, ["audio"], on_failure="fail") for _ in range(4)]
    for request in requests:
        with pytest.raises(StageCrashed, match="'first'"):
            await read(request)
    await wait_back(omni, "first", before + 1)
    assert len(await read(ask(omni))) == 1


async def test_a_replica_that_is_given_up_does_not_stop_the_stage_above_it() -> None:
    """Its backlog there exceeds what the stage above lets wait."""
    overrides = {
        "stages.second.replicas": 2,
        "stages.second.restart.intensity": 0,
        "stages.first.options.payload_bytes": 20_000_000,
        "stages.first.options.fan_out": 2,
    }
    async with OmniSystem.open("echo", **overrides) as omni:
        doomed = ask(omni, stage="second", hang=True)
        replica = doomed._stream.request.placement["second"].replica
        with trio.fail_after(WATCHDOG_S):
            # It has given its second output, which waits for room: the stage below hangs in the first.
            while "first" not in doomed._stream.request.stats:  # noqa: ASYNC110 - nobody tells
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
async def test_a_refused_request_costs_nobody_else_anything(omni: OmniSystem) -> None:
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
def test_a_spoilt_ring_costs_no_more_than_the_workers_at_its_ends(
    shared_system: SharedSystem, pair: tuple[Address, Address], column: Column
) -> None:
    """A position that the protocol never writes, as a program that writes where it should not leaves it.

    It is met, or overwritten by its owner, who knows better; the answer is the same.
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


async def test_a_stage_past_its_intensity_is_given_up_and_the_rest_still_serves() -> None:
    overrides = {**QUICK, "stages.second.restart.intensity": 1}
    async with OmniSystem.open("echo", **overrides) as omni:
        for generation in (1, 2):
            await wait_back(omni, "second", generation)
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
    async with OmniSystem.open(alone(restart=Restart(intensity=0))) as omni:
        with pytest.raises(StageCrashed):
            await read(ask(omni, exit=7))
        await wait_for(omni, lambda: omni.errored)
        assert not omni.is_running
        with pytest.raises(StageUnavailable):
            ask(omni)
        with pytest.raises(StageFailed, match="exited with code 7") as caught:
            await omni.check_health()
        assert caught.value is omni.dead_error


# loading


ENGINES = """
    import os, pathlib, signal, time
    from omni_actors.stages.echo.engine import EchoEngine

    def broken(context):
        context.report("about to fail")
        raise ValueError("the weights are upside down")

    def echo(context):
        return EchoEngine(type(context)(context.stage, None, {}, 1, "cpu", context.report))

    def is_first(context):
        marker = pathlib.Path(context.options["marker"])
        if marker.exists():
            return False
        marker.touch()
        return True

    def killed_once(context):
        if is_first(context):
            os.kill(os.getpid(), signal.SIGKILL)
        return echo(context)

    def never(context):
        context.report("thinking")
        time.sleep(3600)

    def never_again(context):
        return echo(context) if is_first(context) else never(context)
"""


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of a user, importable here and thus in the workers."""
    (tmp_path / "faulty_engines.py").write_text(textwrap.dedent(ENGINES))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("engines")
async def test_an_engine_that_cannot_load_fails_the_opening_in_its_own_words() -> None:
    with pytest.raises(StageFailed) as caught:
        async with OmniSystem.open("echo", **{"stages.second.engine": "faulty_engines:broken"}):
            pytest.fail("it opened")
    assert caught.value.stage == "second"
    assert caught.value.reason == "ValueError: the weights are upside down"
    assert caught.value.exits[0].exit_code == 1
    assert "faulty_engines.py" in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "error"), [("no_such_module:Engine", ConfigError), ("faulty_engines:no_such_name", StageFailed)]
)
@pytest.mark.usefixtures("engines")
async def test_an_engine_that_is_nowhere_fails_the_opening(engine: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="no_such"):
        async with OmniSystem.open(alone(engine)):
            pytest.fail("it opened")


@pytest.mark.usefixtures("engines")
async def test_a_worker_killed_while_it_loads_is_started_again(tmp_path: Path) -> None:
    options = {"marker": str(tmp_path / "was here")}
    async with OmniSystem.open(alone("faulty_engines:killed_once", options=options)) as omni:
        assert generation_of(omni, "only") == 2
        assert len(await read(ask(omni))) == 1


@pytest.mark.usefixtures("engines")
async def test_requests_that_wait_for_a_stage_fail_when_it_is_given_up(tmp_path: Path) -> None:
    options, once = {"marker": str(tmp_path / "was here")}, Restart(intensity=1, backoff_s=0.01)
    async with OmniSystem.open(alone("faulty_engines:never_again", options=options, restart=once)) as omni:
        with pytest.raises(StageCrashed):
            await read(ask(omni, exit=1))
        waiting = ask(omni)
        assert omni._orchestrator.queued == 1
        await wait_for(omni, lambda: omni.health().stages["only"][0].note == "thinking")
        os.kill(pid_of(omni, "only"), signal.SIGKILL)
        with pytest.raises(StageUnavailable):
            await read(waiting)
        assert omni.dead_error is not None


@pytest.mark.usefixtures("engines")
async def test_a_stage_that_never_loads_holds_up_neither_the_opening_nor_the_leaving() -> None:
    overrides = {"stages.second.engine": "faulty_engines:never", "stages.second.shutdown_timeout_s": 2 * WATCHDOG_S}
    async with OmniSystem.open("echo", **overrides, wait_ready=False) as omni:
        await wait_for(omni, lambda: omni.health().stages["second"][0].note == "thinking")
        await wait_back(omni, "first", generation=1)
        assert [output.delta for output in await read(ask(omni, ("text",)))] == ["x"]
        began = time.monotonic()
    assert time.monotonic() - began < WATCHDOG_S


async def test_rings_that_cannot_be_made_fail_the_opening() -> None:
    with pytest.raises(StageFailed, match="rings"):
        async with OmniSystem.open(alone(ring_bytes=1 << 60)):
            pytest.fail("it opened")


# wedged


@pytest.mark.parametrize("how", ["stopped", "hung in a step"])
async def test_a_worker_that_does_not_stop_is_killed_after_its_time(how: str) -> None:
    shutdown_timeout_s = 0.3
    async with OmniSystem.open(alone(shutdown_timeout_s=shutdown_timeout_s)) as omni:
        process = psutil.Process(pid_of(omni, "only"))
        if how == "stopped":
            process.suspend()
        else:
            hanging = ask(omni, stderr="now", hang=True)
            worker = omni._supervisor.replicas[Address("only", 0)].worker
            assert isinstance(worker, LocalWorker)
            with trio.fail_after(WATCHDOG_S):
                while not worker.stderr_tail:  # noqa: ASYNC110 - nobody tells
                    await trio.sleep(0.005)
            hanging.abort()
        began = time.monotonic()
    assert shutdown_timeout_s <= time.monotonic() - began < WATCHDOG_S
    assert not process.is_running()


async def test_a_flood_is_refused_where_a_worker_reads_no_mail_and_nobody_is_killed() -> None:
    """Requests that end at once hold no place, but each leaves mail. The neighbour may be behind, too."""
    async with OmniSystem.open("echo", **{"limits.max_requests": 4}) as omni:
        second = psutil.Process(pid_of(omni, "second"))
        second.suspend()
        with trio.fail_after(WATCHDOG_S):
            while (refused := refusal_of_one_more(omni)) is None or refused.stage != "second":
                await trio.lowlevel.checkpoint()
        assert "stage 'second' does not keep up" in str(refused)
        second.resume()
        with trio.fail_after(WATCHDOG_S):
            while refusal_of_one_more(omni) is not None:  # noqa: ASYNC110 - nobody tells
                await trio.sleep(0.005)
        assert len(await read(ask(omni))) == 1
        assert not any(replica.history for stage in omni.health().stages.values() for replica in stage)


async def test_a_replica_that_reads_no_mail_is_passed_over() -> None:
    async with OmniSystem.open(alone(replicas=2), **{"limits.max_requests": 4}) as omni:
        stopped = psutil.Process(pid_of(omni, "only", 0))
        stopped.suspend()
        with trio.fail_after(WATCHDOG_S):
            while not omni._supervisor.replicas[Address("only", 0)].congested:
                refusal_of_one_more(omni)  # the neighbour's, if it has one
                await trio.testing.wait_all_tasks_blocked()  # all that the sockets have room for is sent
            while refusal_of_one_more(omni) is not None:  # noqa: ASYNC110 - nobody tells
                await trio.sleep(0.005)
        assert len(await read(ask(omni))) == 1
        stopped.resume()
        assert not any(replica.history for stage in omni.health().stages.values() for replica in stage)


def refusal_of_one_more(omni: OmniSystem) -> Overloaded | None:
    try:
        ask(omni).abort()
    except Overloaded as error:
        return error
    return None


@with_shared_system
async def test_a_worker_that_reads_no_mail_at_all_is_killed_and_replaced(omni: OmniSystem) -> None:
    before = generation_of(omni, "second")
    psutil.Process(pid_of(omni, "second")).suspend()
    replica = omni._supervisor.replicas[Address("second", 0)]
    with trio.fail_after(WATCHDOG_S):
        while replica.accepts_work:
            replica.post(Abort(0))  # harmless: it knows of no such request
            await trio.lowlevel.checkpoint()  # in which a worker that reads would be sent it
    await wait_back(omni, "second", before + 1)
    assert "waiting unread" in (omni.health().stages["second"][0].history[-1].reason or "")
    assert len(await read(ask(omni))) == 1


async def test_a_machine_out_of_descriptors_fails_the_stage_not_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.socketpair", none_left)
    with pytest.raises(StageFailed, match="Too many open files"):
        async with OmniSystem.open(alone()):
            pytest.fail("it started")


async def test_a_machine_out_of_memory_for_a_lifeline_fails_the_start_not_the_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory is taken before it is touched."""

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    async with OmniSystem.open(alone()) as omni:
        os.kill(pid_of(omni, "only"), signal.SIGKILL)
        with monkeypatch.context() as patched:
            patched.setattr("os.posix_fallocate", full)
            await wait_for(omni, lambda: len(omni.health().stages["only"][0].history) >= 2)
        await wait_for(omni, lambda: omni.health().ready)
        assert omni.health().stages["only"][0].history[1].exit_code == NOT_STARTED
        assert len(await read(ask(omni))) == 1


async def test_a_machine_that_gives_no_more_threads_still_sees_workers_die(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("omni_actors.platform.lifeline.threading.Thread.start", none_left)
        async with OmniSystem.open(alone()) as omni:
            os.kill(pid_of(omni, "only"), signal.SIGKILL)
            await wait_back(omni, "only", 2)
            assert len(await read(ask(omni))) == 1


async def test_a_worker_that_says_what_is_no_message_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "babbling_engine.py").write_text(
        textwrap.dedent("""
            import contextlib, os, socket
            from omni_actors.stages.echo.engine import EchoEngine

            class Babbling(EchoEngine):
                def feed(self, request_id, chunk):
                    for fd in map(int, os.listdir("/proc/self/fd")):
                        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as control:
                            if control.type == socket.SOCK_SEQPACKET:
                                control.send(b"\\xff babble")
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with OmniSystem.open(alone("babbling_engine:Babbling")) as omni:
        with pytest.raises(StageCrashed, match="is no message"):
            await read(ask(omni))
        await wait_back(omni, "only", 2)


async def test_a_system_that_refuses_every_request_is_errored() -> None:
    """Both ways to the last stage are needed, so one that has failed is the end of all."""
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
async def test_a_full_mailbox_at_the_moment_its_neighbour_comes_back_costs_that_worker_only(omni: OmniSystem) -> None:
    """The new worker's rings are announced to a neighbour that has stopped reading: it is killed, nothing else is."""
    before = {stage: generation_of(omni, stage) for stage in ("first", "second")}
    replica = omni._supervisor.replicas[Address("second", 0)]
    assert replica.worker is not None
    mailbox = replica.worker.mailbox
    os.kill(replica.worker.pid, signal.SIGSTOP)
    with trio.fail_after(WATCHDOG_S):
        while (room := mailbox._capacity - mailbox._out_send.statistics().current_buffer_used) > 0:
            for _ in range(room):
                mailbox.post(Abort(0))
            await trio.sleep(0.02)  # its writer delays a little, then moves what the socket still takes
    os.kill(pid_of(omni, "first"), signal.SIGKILL)
    for stage, generation in before.items():
        await wait_back(omni, stage, generation + 1)
    assert len(await read(ask(omni))) == 1


@with_shared_system
async def test_a_stage_s_place_in_the_pipeline_does_not_matter(omni: OmniSystem) -> None:
    assert list(omni.pipeline.stages) == ["second", "first"]
    assert not omni.errored
    assert omni.is_running
    assert len(await read(omni.generate(script="x", modalities=("audio",)))) == 1


@with_shared_system
async def test_two_requests_of_one_name_and_times_that_are_none_are_refused(omni: OmniSystem) -> None:
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
    omni.abort("nobody")
