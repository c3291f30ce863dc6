"""A single worker process: its death is noticed, its last messages and stderr are kept, and nothing of it is left."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing

from omni_actors.errors import WorkerExit
from omni_actors.platform import allocator
from omni_actors.protocol.messages import (
    Address,
    Bounds,
    Configure,
    ControlMessage,
    LoadFailed,
    Loading,
    Ping,
    Pong,
    Ready,
    Stop,
    WorkerSpec,
)
from omni_actors.supervisor.process import LocalSpawner, SpawnFailed
from omni_actors.supervisor.spawned_process import SpawnedProcess
from omni_actors.worker.priority import LOADING_NICE, may_raise_to
from tests.support.open_descriptors import open_descriptors

HERE = Address("here", 0)
BOUNDS = Bounds(0, 0)
WATCHDOG_S = 60.0
ENGINES = """
    import ctypes, json, os, psutil, resource, signal, subprocess, sys, threading
    from omni_actors.stages.echo.engine import EchoEngine

    def reports(context):
        variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        main = sys.modules["__main__"]
        context.report(json.dumps({
            "threads": {name: os.environ.get(name) for name in variables},
            "wait": os.environ.get("OMP_WAIT_POLICY"),
            "main": getattr(main, "__file__", None),
            "sigint_handled": signal.getsignal(signal.SIGINT) not in (signal.SIG_DFL, signal.default_int_handler),
            "torch": "torch" in sys.modules,
            "nice": [os.getpriority(os.PRIO_PROCESS, thread) for thread in (0, os.getpid())],
            "rss": psutil.Process().memory_info().rss,
        }))
        global kept
        kept = [b"x" * 100_000 for _ in range(2000)][-1]  # the end of the heap, which is freed below it
        return EchoEngine(type(context)(context.stage, None, {}, 1, "cpu", context.report))

    class Warm(EchoEngine):
        def __init__(self, context):
            super().__init__(context)
            self._report = context.report

        def warm_up(self):
            self._report("every kernel ran once")

    class CountsFaults(EchoEngine):
        def gauges(self):
            PR_SET_THP_DISABLE = 41
            ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page is one fault
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(100):
                [b"x" * 2**20 for _ in range(8)]
            return {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before}

    def keeps_a_thread(context):
        global thread
        thread = threading.Thread(target=threading.Event().wait, name="kept", daemon=True)
        thread.start()
        child = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL)
        kept = 0, thread.native_id, child.pid
        context.report(json.dumps([child.pid, *(os.getpriority(os.PRIO_PROCESS, each) for each in kept)]))
        return EchoEngine(context)

    def names_a_file(context):
        context.report("reading \\udcff")
        raise FileNotFoundError("\\udcff")

    def leaves_a_child(context):
        child = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL)
        print(f"child {child.pid}", file=sys.stderr, flush=True)
        os._exit(9)

    def writes_much(context):
        for number in range(100):
            print(f"line {number}", file=sys.stderr)
        sys.stderr.write("x" * 10_000_000)
        sys.stderr.flush()
        os._exit(9)
"""


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "process_engines.py").write_text(textwrap.dedent(ENGINES))
    monkeypatch.syspath_prepend(tmp_path)


def configure(factory: str, threads: int = 1, nice: int = 0) -> Configure:
    spec = WorkerSpec(address=HERE, factory=factory, bounds=BOUNDS, threads=threads, nice=nice, spins=False)
    return Configure(spec, fence=0)


async def run_until_dead(factory: str) -> tuple[WorkerExit, list[ControlMessage]]:
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            worker.mailbox.post(configure(factory))
            received = [message async for message, _ in worker.mailbox.incoming]
            return await worker.wait_dead(), received


async def test_a_worker_loads_serves_and_stops() -> None:
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            worker.mailbox.post(configure("process_engines:reports", threads=3, nice=2))
            loading, _ = await worker.mailbox.incoming.receive()
            assert isinstance(loading, Loading)
            facts = json.loads(loading.note)
            rss = facts.pop("rss")
            assert set(facts.pop("threads").values()) == {"3"}
            assert facts == {
                "wait": "PASSIVE",
                "main": None,
                "sigint_handled": True,
                "torch": False,
                "nice": [os.getpriority(os.PRIO_PROCESS, 0) + 2, os.getpriority(os.PRIO_PROCESS, 0)],
            }
            while not isinstance((await worker.mailbox.incoming.receive())[0], Ready):
                pass
            if hasattr(ctypes.CDLL(None), "malloc_trim"):  # glibc only
                grown = psutil.Process(worker.pid).memory_info().rss - rss
                assert grown < 100e6, "the 200 MB that loading freed went back to the kernel"
            worker.mailbox.post(Stop())
            assert await worker.wait_dead() == WorkerExit(worker.pid, None, 0, ())


@pytest.mark.parametrize(("behind", "shares_cores"), [(True, True), (False, True), (True, False)])
async def test_a_worker_that_loads_behind_another_one_has_a_low_priority_until_it_is_ready(
    behind: bool, shares_cores: bool
) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    spec = WorkerSpec(address=HERE, factory="process_engines:keeps_a_thread", bounds=BOUNDS, shares_cores=shares_cores)
    loads_with = max(own, LOADING_NICE) if behind and shares_cores and may_raise_to(own) else own
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            worker.mailbox.post(Configure(spec, fence=0, behind=behind))
            loading, _ = await worker.mailbox.incoming.receive()
            assert isinstance(loading, Loading)
            child, *found = json.loads(loading.note)
            assert found == [loads_with] * 3
            while not isinstance((await worker.mailbox.incoming.receive())[0], Ready):
                pass
            threads = map(int, os.listdir(f"/proc/{worker.pid}/task"))
            assert {os.getpriority(os.PRIO_PROCESS, each) for each in (*threads, child)} == {own}
            os.kill(child, signal.SIGKILL)
            worker.mailbox.post(Stop())
            await worker.wait_dead()


def test_the_priority_is_kept_where_it_could_not_be_raised_again() -> None:
    """As any user but root, who may not raise it."""
    code = (
        "import os, resource\n"
        "from omni_actors.worker import priority\n"
        "resource.setrlimit(resource.RLIMIT_NICE, (0, 0))\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "before = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "with priority.lowered():\n"
        "    assert os.getpriority(os.PRIO_PROCESS, 0) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_a_worker_ignores_the_signals_that_end_a_whole_service() -> None:
    """A terminal and systemd signal every process of a server; the parent drains while its workers still serve."""
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            os.kill(worker.pid, signal.SIGTERM)  # while its interpreter starts, too
            worker.mailbox.post(configure("process_engines:reports"))
            while not isinstance((await worker.mailbox.incoming.receive())[0], Ready):
                pass
            for stop_signal in (signal.SIGTERM, signal.SIGINT):
                os.kill(worker.pid, stop_signal)
            worker.mailbox.post(Ping(1))
            assert (await worker.mailbox.incoming.receive())[0] == Pong(1)
            worker.mailbox.post(Stop())
            assert await worker.wait_dead() == WorkerExit(worker.pid, None, 0, ())


async def test_an_engine_warms_up_before_its_worker_is_ready() -> None:
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            worker.mailbox.post(configure("process_engines:Warm"))
            received: list[ControlMessage] = []
            while not (received and isinstance(received[-1], Ready)):
                received.append((await worker.mailbox.incoming.receive())[0])
            assert received[-3:-1] == [Loading("warming up"), Loading("every kernel ran once")]


async def test_a_worker_reuses_the_memory_of_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocator.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library is not glibc")
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            worker.mailbox.post(configure("process_engines:CountsFaults"))
            while not isinstance((await worker.mailbox.incoming.receive())[0], Ready):
                pass
            worker.mailbox.post(Ping(1))
            pong, _ = await worker.mailbox.incoming.receive()
            assert isinstance(pong, Pong)
            pages = 100 * 8 * 2**20 // os.sysconf("SC_PAGE_SIZE")
            assert pong.gauges["faults"] < pages / 20


async def test_any_number_of_tasks_may_wait_for_a_death() -> None:
    exits: list[WorkerExit] = []
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker, trio.open_nursery() as nursery:

            async def wait() -> None:
                exits.append(await worker.wait_dead())

            for _ in range(3):
                nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            worker.kill()
        worker_pid = exits[0].pid
    assert exits == [WorkerExit(worker_pid, "SIGKILL", None, ())] * 3


async def test_reaping_a_worker_does_not_hold_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    reaping, may_reap = threading.Event(), threading.Event()
    join, went_on = SpawnedProcess.join, []

    def join_late(self: SpawnedProcess, timeout: float | None = None) -> None:
        reaping.set()
        went_on.append(may_reap.wait(WATCHDOG_S / 4))
        join(self, timeout)

    monkeypatch.setattr(SpawnedProcess, "join", join_late)
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            worker.kill()
            await trio.to_thread.run_sync(reaping.wait)
            may_reap.set()
            assert (await worker.wait_dead()).signal == "SIGKILL"
    assert went_on == [True]
    assert not psutil.pid_exists(worker.pid)


async def test_a_worker_is_reaped_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_sync(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    exit, _ = await run_until_dead("no_such_module:engine")
    assert exit.exit_code == 1
    assert not psutil.pid_exists(exit.pid)


def reap_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    join = SpawnedProcess.join

    def joined(self: SpawnedProcess, timeout: float | None = None) -> None:
        os.waitpid(self.pid, 0)
        join(self, timeout)

    monkeypatch.setattr(SpawnedProcess, "join", joined)


@pytest.fixture
def sigchld_is_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


async def stopped_worker_s_exit() -> WorkerExit:
    """Return how a worker ended that has served and was stopped. All of its descriptors are closed."""
    before = len(open_descriptors())
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            worker.mailbox.post(configure("omni_actors.stages.echo.engine:EchoEngine"))
            while not isinstance((await worker.mailbox.incoming.receive())[0], Ready):
                pass
            worker.mailbox.post(Stop())
            exit = await worker.wait_dead()
    assert len(open_descriptors()) == before
    assert not psutil.pid_exists(worker.pid)
    return exit


async def test_a_worker_whose_exit_status_another_part_of_the_program_takes_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reap_elsewhere(monkeypatch)
    exit = await stopped_worker_s_exit()
    assert exit == WorkerExit(exit.pid, None, None, ())
    assert str(exit) == f"pid {exit.pid} ended, and its exit status is unknown"


@pytest.mark.usefixtures("sigchld_is_ignored")
async def test_a_worker_whose_exit_status_the_kernel_drops_has_ended() -> None:
    exit = await stopped_worker_s_exit()
    assert exit == WorkerExit(exit.pid, None, None, ())


async def test_an_exception_of_the_task_that_watches_a_worker_ends_the_worker() -> None:
    """Here of the program's logging, to which the worker's stderr goes."""

    def refuse(record: logging.LogRecord) -> bool:
        raise ArithmeticError

    before, log = len(open_descriptors()), logging.getLogger(f"omni_actors.worker.{HERE}")
    log.addFilter(refuse)
    log.setLevel(logging.INFO)
    try:
        with trio.fail_after(WATCHDOG_S), pytest.RaisesGroup(ArithmeticError, flatten_subgroups=True):
            async with LocalSpawner().spawn(HERE, 8) as worker:
                worker.mailbox.post(configure("process_engines:writes_much"))
                await trio.sleep_forever()
    finally:
        log.removeFilter(refuse)
        log.setLevel(logging.NOTSET)
    assert not psutil.pid_exists(worker.pid)
    assert len(open_descriptors()) == before


async def test_killing_a_dead_worker_is_harmless() -> None:
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            worker.kill()
            await worker.wait_dead()
            worker.kill()


@pytest.mark.parametrize("how", ["normally", "by an exception", "by cancellation"])
async def test_leaving_reaps_the_worker_and_closes_every_descriptor(how: str) -> None:
    before = len(open_descriptors())
    process: psutil.Process | None = None
    with trio.CancelScope() as scope:
        try:
            async with LocalSpawner().spawn(HERE, 8) as worker:
                process = psutil.Process(worker.pid)
                if how == "by an exception":
                    raise ExceptionGroup("mine", [ArithmeticError()])
                if how == "by cancellation":
                    scope.cancel()
                    await trio.sleep_forever()
        except* ArithmeticError:
            assert how == "by an exception"
    assert process is not None
    assert not process.is_running()
    assert len(open_descriptors()) == before


async def test_a_spawn_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """First there is no descriptor for the pidfd, then none for the process's own pipe."""
    before, children = len(open_descriptors()), psutil.Process().children()

    def none_left(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    for place in ("omni_actors.supervisor.process.pidfd_open", "subprocess.Popen"):
        with monkeypatch.context() as patch:
            patch.setattr(place, none_left)
            with pytest.raises(SpawnFailed, match="Too many"):
                async with LocalSpawner().spawn(HERE, 8):
                    pytest.fail("it started")
        assert len(open_descriptors()) == before
        assert psutil.Process().children() == children


async def test_a_worker_ends_when_its_control_socket_closes() -> None:
    with trio.fail_after(WATCHDOG_S):
        async with LocalSpawner().spawn(HERE, 8) as worker:
            worker.mailbox.post(configure("omni_actors.stages.echo.engine:EchoEngine"))
            while not isinstance((await worker.mailbox.incoming.receive())[0], Ready):
                pass
            worker.mailbox._sock.shutdown(2)
            assert (await worker.wait_dead()).exit_code == 0


async def test_a_load_error_is_reported_and_its_traceback_kept() -> None:
    exit, received = await run_until_dead("process_engines:nothing")
    assert exit.exit_code == 1
    assert isinstance(received[-1], LoadFailed)
    assert "nothing" in received[-1].error
    assert exit.stderr_tail[0].startswith("Traceback")
    assert exit.stderr_tail[-1].startswith("AttributeError")


async def test_what_a_worker_says_while_it_loads_may_have_surrogates() -> None:
    """As the name of a file that is not UTF-8."""
    _, received = await run_until_dead("process_engines:names_a_file")
    assert received[-2:] == [Loading("reading \\udcff"), LoadFailed("FileNotFoundError: \\udcff")]


async def test_the_tail_of_stderr_is_bounded_in_lines_and_line_length() -> None:
    exit, _ = await run_until_dead("process_engines:writes_much")
    assert exit.exit_code == 9
    assert len(exit.stderr_tail) == 40
    assert exit.stderr_tail[-2] == "line 99"
    assert exit.stderr_tail[-1] == "x" * 4096


async def test_a_cancelled_owner_still_gets_a_worker_s_last_lines() -> None:
    exit: WorkerExit | None = None
    with trio.fail_after(WATCHDOG_S), trio.CancelScope() as scope:
        async with LocalSpawner().spawn(HERE, 8) as worker:
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                worker.mailbox.post(configure("process_engines:writes_much"))
                with trio.CancelScope(shield=True):
                    exit = await worker.wait_dead()
    assert exit is not None
    assert (exit.exit_code, len(exit.stderr_tail)) == (9, 40)


async def test_a_child_that_keeps_stderr_open_does_not_hide_a_worker_s_death() -> None:
    exit, _ = await run_until_dead("process_engines:leaves_a_child")
    assert exit.exit_code == 9
    (line,) = exit.stderr_tail
    os.kill(int(line.split()[1]), signal.SIGKILL)
