"""Workers that do not react or do not read, and machines that lack descriptors, memory or threads. Real processes."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing

from omni_actors.errors import (
    Overloaded,
    StageCrashed,
    StageFailed,
)
from omni_actors.protocol.messages import Abort, Address
from omni_actors.supervisor.process import LocalWorker
from omni_actors.system import OmniSystem
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
from tests.support.open_descriptors import few_descriptors
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(two_stages()), fixture_processes) as shared_system:
        yield shared_system


@pytest.mark.parametrize("how", ["stopped", "hung in a step"])
async def test_a_worker_that_does_not_stop_is_killed_after_its_timeout(how: str) -> None:
    shutdown_timeout_s = 0.3
    async with OmniSystem.open(one_stage(shutdown_timeout_s=shutdown_timeout_s)) as omni:
        process = psutil.Process(pid_of(omni, "only"))
        if how == "stopped":
            process.suspend()
        else:
            hanging = ask(omni, stderr="now", hang=True)
            worker = omni._supervisor.replicas[Address("only", 0)].worker
            assert isinstance(worker, LocalWorker)
            with trio.fail_after(WATCHDOG_S):
                while not worker._stderr.lines:  # noqa: ASYNC110 - there is no event for it
                    await trio.sleep(0.005)
            hanging.abort()
        began = time.monotonic()
    assert shutdown_timeout_s <= time.monotonic() - began < WATCHDOG_S
    assert not process.is_running()


async def test_requests_are_refused_while_a_worker_reads_no_control_messages_and_no_worker_is_killed() -> None:
    """Requests that end at once hold no place, but leave control messages. The other worker may be congested, too."""
    async with OmniSystem.open("echo", **{"limits.max_requests": 4}) as omni:
        second = psutil.Process(pid_of(omni, "second"))
        second.suspend()
        with trio.fail_after(WATCHDOG_S):
            while (refused := refusal_of_one_more(omni)) is None or refused.stage != "second":
                await trio.lowlevel.checkpoint()
        assert "stage 'second' does not keep up" in str(refused)
        second.resume()
        with trio.fail_after(WATCHDOG_S):
            while refusal_of_one_more(omni) is not None:  # noqa: ASYNC110 - there is no event for it
                await trio.sleep(0.005)
        assert len(await read(ask(omni))) == 1
        assert not any(replica.history for stage in omni.health().stages.values() for replica in stage)


async def test_a_replica_that_reads_no_control_messages_gets_no_requests() -> None:
    async with OmniSystem.open(one_stage(replicas=2), **{"limits.max_requests": 4}) as omni:
        first = min(omni._supervisor.replicas.values(), key=lambda replica: replica.incarnation.ready_at)
        stopped = psutil.Process(pid_of(omni, "only", first.address.replica))
        stopped.suspend()
        with trio.fail_after(WATCHDOG_S):
            while not first.congested:
                refusal_of_one_more(omni)  # the other replica may be congested, too
                await trio.testing.wait_all_tasks_blocked()  # the sockets are full then
            while refusal_of_one_more(omni) is not None:  # noqa: ASYNC110 - there is no event for it
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
async def test_a_worker_with_a_full_mailbox_is_killed_and_replaced(omni: OmniSystem) -> None:
    before = generation_of(omni, "second")
    psutil.Process(pid_of(omni, "second")).suspend()
    replica = omni._supervisor.replicas[Address("second", 0)]
    with trio.fail_after(WATCHDOG_S):
        while replica.accepts_work:
            replica.post(Abort(0))  # harmless: there is no such request
            await trio.lowlevel.checkpoint()  # in which a worker that reads would receive it
    await wait_restarted(omni, "second", before + 1)
    assert "does not read its control messages" in (omni.health().stages["second"][0].history[-1].reason or "")
    assert len(await read(ask(omni))) == 1


async def test_a_lack_of_descriptors_fails_the_stage_not_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.socketpair", none_left)
    with pytest.raises(StageFailed, match="Too many open files"):
        async with OmniSystem.open(one_stage()):
            pytest.fail("it started")


async def test_a_lack_of_memory_for_a_death_mutex_fails_the_start_not_the_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory is allocated before it is used."""

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    async with OmniSystem.open(one_stage()) as omni:
        os.kill(pid_of(omni, "only"), signal.SIGKILL)
        with monkeypatch.context() as patched:
            patched.setattr("os.posix_fallocate", full)
            await wait_for(omni, lambda: len(omni.health().stages["only"][0].history) >= 2)
        await wait_for(omni, lambda: omni.health().ready)
        failed = omni.health().stages["only"][0].history[1]
        assert (failed.pid, failed.exit_code) == (None, None)
        assert "No space left on device" in (failed.reason or "")
        assert len(await read(ask(omni))) == 1


async def test_deaths_are_noticed_without_a_thread_for_the_death_mutex(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("omni_actors.platform.death_mutex.threading.Thread.start", none_left)
        async with OmniSystem.open(one_stage()) as omni:
            os.kill(pid_of(omni, "only"), signal.SIGKILL)
            await wait_restarted(omni, "only", 2)
            assert len(await read(ask(omni))) == 1


async def test_a_worker_that_sends_undecodable_packets_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corrupting_engine.py").write_text(
        textwrap.dedent("""
            import contextlib, os, socket
            from omni_actors.stages.echo.engine import EchoEngine

            class Corrupting(EchoEngine):
                def feed(self, request_id, chunk):
                    for fd in map(int, os.listdir("/proc/self/fd")):
                        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as control:
                            if control.type == socket.SOCK_SEQPACKET:
                                control.send(b"\\xff noise")
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with OmniSystem.open(one_stage("corrupting_engine:Corrupting")) as omni:
        with pytest.raises(StageCrashed, match="cannot be decoded"):
            await read(ask(omni))
        await wait_restarted(omni, "only", 2)


@with_shared_system
async def test_a_mailbox_that_is_full_when_another_worker_restarts_ends_that_worker_only(omni: OmniSystem) -> None:
    """The restarted worker's rings are announced to a worker that has stopped reading: only that one is killed."""
    before = {stage: generation_of(omni, stage) for stage in ("first", "second")}
    replica = omni._supervisor.replicas[Address("second", 0)]
    assert replica.worker is not None
    mailbox = replica.worker.mailbox
    os.kill(replica.worker.pid, signal.SIGSTOP)
    with trio.fail_after(WATCHDOG_S):
        while (room := mailbox._capacity - mailbox.waiting) > 0:
            for _ in range(room):
                mailbox.post(Abort(0))
            await trio.testing.wait_all_tasks_blocked()  # the writer has filled the socket
    os.kill(pid_of(omni, "first"), signal.SIGKILL)
    for stage, generation in before.items():
        await wait_restarted(omni, stage, generation + 1)
    assert len(await read(ask(omni))) == 1


async def test_a_death_while_the_parent_has_no_descriptors_ends_no_other_worker() -> None:
    async with OmniSystem.open(two_stages()) as omni:
        upstream = pid_of(omni, "first")
        with few_descriptors():
            os.kill(pid_of(omni, "second"), signal.SIGKILL)
            await wait_for(omni, lambda: len(omni.health().stages["second"][0].history) >= 2)
        await wait_for(omni, lambda: omni.health().ready)
        assert pid_of(omni, "first") == upstream
        assert len(await read(ask(omni))) == 1
