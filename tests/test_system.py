"""Opening and leaving a system: nothing is left behind, and the block's own exception is raised."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
import trio.testing

import omni_actors
from omni_actors.config import Pipeline, Stage
from omni_actors.errors import Aborted, ConfigError, InvalidRequest
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.request import Request
from omni_actors.system import OmniSystem
from omni_actors.system.ended import RECENT
from tests.support.open_descriptors import open_descriptors

ROOT = Path(omni_actors.__file__).parent.parent
WATCHDOG_S = 60.0
ONE = Pipeline(name="one", stages={"only": Stage(engine="echo", accepts=("script",), emits="text")})
"""A pipeline with one worker."""


def ask(omni: OmniSystem, text: str = "x", modalities: tuple[str, ...] = ("text",)) -> Generation:
    return omni.submit({"script": [Input({"text": text})]}, modalities)


async def test_a_request_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    """Only the latest are kept. A full collection takes a second while 10,000 requests are in flight."""
    async with OmniSystem.open(ONE) as omni:
        gc.collect()
        gc.disable()
        try:
            for _ in range(RECENT + 3):
                assert len([output async for output in ask(omni)]) == 1
            await trio.testing.wait_all_tasks_blocked()
            kept = [each.name for each in gc.get_objects() if type(each) is Request]
        finally:
            gc.enable()
    assert len(kept) == RECENT


async def test_a_request_that_has_failed_is_not_kept_for_the_live_state() -> None:
    """Its error would keep what the frames of its traceback refer to: a connection's request, a whole conversation."""
    async with OmniSystem.open(ONE) as omni:
        for _ in range(3):
            with pytest.raises(InvalidRequest):
                await anext(omni.submit({"script": [Input({"echo": {"invalid": "step"}})]}, ("text",)))
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        kept = [each.name for each in gc.get_objects() if type(each) is Request]
        assert len(kept) <= len(ONE.stages)  # the latest of each stage


async def test_the_error_of_a_request_keeps_nothing_of_the_callers_that_it_was_raised_to() -> None:
    async def read(generation: Generation) -> weakref.ref[Any]:
        mine = trio.Event()
        with suppress(Aborted):
            await anext(generation)
        return weakref.ref(mine)

    async with OmniSystem.open(ONE) as omni:
        generation = ask(omni)
        generation.abort()
        gc.disable()
        try:
            assert (await read(generation))() is None
        finally:
            gc.enable()
        for _ in range(10):
            with pytest.raises(Aborted) as caught:
                await anext(generation)
        assert len(caught.traceback) < 10


# leaving, in this process


async def test_two_systems_one_after_the_other_leave_no_descriptor() -> None:
    counts = []
    for _ in range(2):
        async with OmniSystem.open("echo") as omni:
            assert len([output async for output in ask(omni, modalities=("text", "audio"))]) == 2
        counts.append(len(open_descriptors()))
    assert len(set(counts)) == 1


async def test_a_restart_leaves_no_descriptor() -> None:
    async with OmniSystem.open("echo", **{"stages.first.restart.backoff_s": 0.01}) as omni:
        counts = []
        for generation in range(1, 4):
            with trio.fail_after(WATCHDOG_S):
                while not (omni.health().ready and omni.health().stages["first"][0].generation == generation):
                    await omni.wait_changed()
            await trio.testing.wait_all_tasks_blocked()
            counts.append(len(open_descriptors()))
            os.kill(omni.health().stages["first"][0].pid or 0, signal.SIGKILL)
        assert len(set(counts)) == 1


async def test_the_exception_of_the_block_is_raised_as_it_is() -> None:
    error = ArithmeticError("mine")
    with pytest.raises(ArithmeticError) as caught:  # noqa: PT012
        async with OmniSystem.open(ONE) as omni:
            ask(omni)
            raise error
    assert caught.value is error
    assert error.__cause__ is None


async def test_the_exception_of_a_cancelled_block_is_raised_as_it_is() -> None:
    error = ArithmeticError("while cleaning up")
    with trio.CancelScope() as scope, pytest.raises(ArithmeticError) as caught:  # noqa: PT012
        async with OmniSystem.open(ONE):
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                raise error
    assert caught.value is error


async def test_leaving_by_cancellation() -> None:
    with trio.CancelScope() as scope:
        async with OmniSystem.open(ONE) as omni:
            generation = ask(omni)
            scope.cancel()
            async for _ in generation:
                pytest.fail("it is cancelled")
    assert scope.cancelled_caught


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 10, 50])
async def test_cancelled_while_it_opens(ticks: int) -> None:
    before = len(open_descriptors())
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel() -> None:
                for _ in range(ticks):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            nursery.start_soon(cancel)
            async with OmniSystem.open("echo", **{"stages.first.options.load_s": WATCHDOG_S}):
                pytest.fail("it opened")
    assert scope.cancelled_caught
    assert len(open_descriptors()) == before


async def test_a_closed_system_admits_no_request() -> None:
    async with OmniSystem.open(ONE) as omni:
        assert omni.is_running
        left = ask(omni)
    assert (omni.is_running, omni.health().ready) == (False, False)
    with pytest.raises(RuntimeError, match="closed"):
        ask(omni)
    with suppress(omni_actors.OmniError):  # the request had ended or was aborted; in both cases reading ends
        with trio.fail_after(WATCHDOG_S):
            async for _ in left:
                pass


async def test_a_bad_configuration_starts_no_process() -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError):
        async with OmniSystem.open("echo", **{"stages.second.threads": "many"}):
            pytest.fail("it opened")
    assert psutil.Process().children() == before


async def test_two_systems_at_once_do_not_mix() -> None:
    async with OmniSystem.open(ONE) as one, OmniSystem.open(ONE) as other:
        async with trio.open_nursery() as nursery:
            for omni, text in ((one, "a"), (other, "b")):

                async def check(omni: OmniSystem = omni, text: str = text) -> None:
                    assert [output.data["text"] async for output in ask(omni, text)] == [text]

                nursery.start_soon(check)
        for omni in (one, other):
            assert omni.metrics.registry.get_sample_value("omni_requests_total", {"outcome": "done"}) == 1
        assert b"omni_ring_payload_bytes" in one.metrics.exposition()


# a user's script in its own process


Script = Callable[[str], "subprocess.Popen[str]"]
WaitEnded = Callable[[list[psutil.Process]], None]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    """Return a function that runs a script file without a ``__main__`` guard."""
    running: list[subprocess.Popen[str]] = []

    def run(text: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(PROLOGUE + textwrap.dedent(text))
        process = subprocess.Popen(
            [sys.executable, path],
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


PROLOGUE = """\
import os, signal, sys, trio
from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Stage
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.request import Request

print("began", flush=True)
ONE = Pipeline(name="one", stages={"only": Stage(engine="echo", accepts=("script",), emits="text")})

def ask(omni, *modalities, **data):
    return omni.submit({"script": [Input({"text": "x", **data})]}, modalities)

"""


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return list(psutil.Process(process.pid).children(recursive=True))


def expect(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for printed in process.stdout:
        if printed.strip() == line:
            return
    assert process.stderr is not None
    pytest.fail(f"the script did not print {line!r}: {process.stderr.read()}")


def test_a_script_needs_no_main_guard(script: Script) -> None:
    process = script("""
        async def main():
            async with OmniSystem.open("echo") as omni:
                print(sorted([f"{output.modality} {output.delta}" async for output in ask(omni, "text", "audio")]))

        trio.run(main)
    """)
    out, err = process.communicate(timeout=WATCHDOG_S)
    assert (process.returncode, out, err) == (0, "began\n['audio x', 'text x']\n", "")


def test_an_engine_beside_the_script_is_found(script: Script, tmp_path: Path) -> None:
    (tmp_path / "my_engine.py").write_text(
        textwrap.dedent("""
            from msgspec.structs import replace
            from omni_actors.stages.echo.engine import EchoEngine

            class Shouting(EchoEngine):
                def __init__(self, context):
                    super().__init__(type(context)(context.stage, None, {}, 1, "cpu", context.report))

                def feed(self, request_id, chunk):
                    super().feed(request_id, replace(chunk, data={"text": chunk.data["text"].upper()}))
        """)
    )
    process = script("""
        async def main():
            async with OmniSystem.open(ONE, **{"stages.only.engine": "my_engine:Shouting"}) as omni:
                print([f"{output.modality} {output.delta}" async for output in ask(omni, "text")])

        trio.run(main)
    """)
    out, err = process.communicate(timeout=WATCHDOG_S)
    assert (process.returncode, out, err) == (0, "began\n['text X']\n", "")


SLEEPS = """
    async def main():
        async with OmniSystem.open("echo") as omni:
            hanging = ask(omni, "audio", echo={"stage": "second", "hang": True})
            print("open", flush=True)
            await trio.sleep_forever()

    trio.run(main)
"""


def test_workers_die_with_their_parent(script: Script, wait_ended: WaitEnded) -> None:
    process = script(SLEEPS)
    expect(process, "open")
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    process.wait(WATCHDOG_S)
    wait_ended(workers)


def test_workers_die_with_a_parent_that_is_killed_while_they_start(script: Script, wait_ended: WaitEnded) -> None:
    process = script("""
        async def main():
            async with OmniSystem.open(ONE, wait_ready=False) as omni:
                while not all(each[0].pid for each in omni.health().stages.values()):
                    await trio.lowlevel.checkpoint()
                print("started", flush=True)
                await trio.sleep_forever()

        trio.run(main)
    """)
    expect(process, "started")
    workers = workers_of(process)
    process.kill()
    process.wait(WATCHDOG_S)
    wait_ended(workers)


@pytest.mark.parametrize("target", ["the process", "its group, as a terminal does"])
def test_ctrl_c_ends_a_script_with_keyboard_interrupt(script: Script, target: str, wait_ended: WaitEnded) -> None:
    process = script("""
        async def main():
            async with OmniSystem.open(ONE) as omni:
                print("open", flush=True)
                await trio.sleep_forever()

        trio.run(main)
    """)
    expect(process, "open")
    workers = workers_of(process)
    if target == "the process":
        process.send_signal(signal.SIGINT)
    else:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=WATCHDOG_S)
    assert process.returncode == -signal.SIGINT
    assert "ExceptionGroup" not in err
    assert err.rstrip().endswith("KeyboardInterrupt")
    wait_ended(workers)


def test_ctrl_c_inside_the_systems_own_code_ends_the_users_task(script: Script) -> None:
    """The signal arrives inside the supervisor, inside the orchestrator, and while a worker is started."""
    process = script("""
        from omni_actors.supervisor.edges import Edges
        from omni_actors.supervisor.process import LocalWorker
        from omni_actors.orchestrator.worker_events import WorkerEvents

        def interrupted(owner, name):
            original = getattr(owner, name)

            def patched(*args, **kwargs):
                setattr(owner, name, original)
                print(name, flush=True)
                signal.raise_signal(signal.SIGINT)
                return original(*args, **kwargs)

            setattr(owner, name, patched)

        async def main():
            async with OmniSystem.open(ONE) as omni:
                async for output in ask(omni, "text"):
                    pass
                await trio.sleep_forever()

        for owner, name in ((LocalWorker, "__init__"), (Edges, "connect_worker"), (WorkerEvents, "on_message")):
            interrupted(owner, name)
            try:
                trio.run(main)
            except BaseException as error:
                print(type(error).__name__, len(os.listdir("/proc/self/fd")), flush=True)
    """)
    out, err = process.communicate(timeout=WATCHDOG_S)
    lines = out.split("\n")[1:-1]
    assert err == ""
    assert lines[::2] == ["__init__", "connect_worker", "on_message"]
    assert {line.split()[0] for line in lines[1::2]} == {"KeyboardInterrupt"}
    assert len(set(lines[1::2])) == 1, "no descriptor is leaked"


# idle


@pytest.mark.perf
def test_an_idle_system_does_not_wake_up(script: Script) -> None:
    """For one second no thread of the parent or of a worker wakes up. Pings are an hour apart."""
    process = script("""
        STAGES = "first", "second"

        async def main():
            async with OmniSystem.open("echo", **{f"stages.{name}.step_timeout_s": 3600.0 for name in STAGES}) as omni:
                async for output in ask(omni, "text", "audio"):
                    pass
                print("open", flush=True)
                await trio.sleep_forever()

        trio.run(main)
    """)
    expect(process, "open")
    watched = [psutil.Process(process.pid), *workers_of(process)]
    wait_quiet(watched)
    before = [(wakes(each), sum(each.cpu_times()[:2])) for each in watched]
    trio.run(trio.sleep, 1.0)
    after = [(wakes(each), sum(each.cpu_times()[:2])) for each in watched]
    assert all(woken - at <= 2 for (at, _), (woken, _) in zip(before, after, strict=True)), (
        "at most two wake-ups, by chance"
    )
    assert all(spent - at < 0.05 for (_, at), (_, spent) in zip(before, after, strict=True))


def wakes(process: psutil.Process) -> int:
    """Return how often the threads of a process went to sleep, which is how often they woke up."""
    total = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(FileNotFoundError):
            (line,) = [at for at in (task / "status").read_text().splitlines() if at.startswith("voluntary_ctxt")]
            total += int(line.split()[1])
    return total


def wait_quiet(processes: list[psutil.Process]) -> None:
    """Wait until the work of the last request has ended."""
    last: list[int] = []
    for _ in range(50):
        now = [wakes(each) for each in processes]
        if now == last:
            return
        last = now
        trio.run(trio.sleep, 0.2)
    pytest.fail(f"the processes do not become idle: {last}")
