"""What happens when engines cannot load, or never finish loading. Real processes."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from omni_actors.config import Restart
from omni_actors.errors import (
    ConfigError,
    StageCrashed,
    StageFailed,
    StageUnavailable,
)
from omni_actors.system import OmniSystem
from tests.support.echo_systems import (
    WATCHDOG_S,
    ask,
    generation_of,
    one_stage,
    pid_of,
    read,
    wait_for,
    wait_restarted,
)

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
    """A user's engines, importable here and thus in the workers."""
    (tmp_path / "faulty_engines.py").write_text(textwrap.dedent(ENGINES))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("engines")
async def test_an_engine_that_cannot_load_fails_the_opening_with_its_error() -> None:
    with pytest.raises(StageFailed) as caught:
        async with OmniSystem.open("echo", **{"stages.second.engine": "faulty_engines:broken"}):
            pytest.fail("it opened")
    assert caught.value.stage == "second"
    assert caught.value.reason == "ValueError: the weights are upside down"
    assert caught.value.exits[0].exit_code == 1
    assert "faulty_engines.py" in "\n".join(caught.value.stderr_tail)


@pytest.mark.parametrize(
    ("engine", "error"), [("no_such_module:Engine", ConfigError), ("faulty_engines:no_such_name", StageFailed)]
)
@pytest.mark.usefixtures("engines")
async def test_an_engine_that_cannot_be_imported_fails_the_opening(engine: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="no_such"):
        async with OmniSystem.open(one_stage(engine)):
            pytest.fail("it opened")


@pytest.mark.usefixtures("engines")
async def test_a_worker_killed_while_it_loads_is_restarted(tmp_path: Path) -> None:
    options = {"marker": str(tmp_path / "was here")}
    async with OmniSystem.open(one_stage("faulty_engines:killed_once", options=options)) as omni:
        assert generation_of(omni, "only") == 2
        assert len(await read(ask(omni))) == 1


@pytest.mark.usefixtures("engines")
async def test_requests_that_wait_for_a_stage_fail_when_it_is_given_up(tmp_path: Path) -> None:
    options, once = {"marker": str(tmp_path / "was here")}, Restart(intensity=1, backoff_s=0.01)
    async with OmniSystem.open(one_stage("faulty_engines:never_again", options=options, restart=once)) as omni:
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
async def test_a_stage_that_never_loads_delays_neither_opening_nor_closing() -> None:
    overrides = {"stages.second.engine": "faulty_engines:never", "stages.second.shutdown_timeout_s": 2 * WATCHDOG_S}
    async with OmniSystem.open("echo", **overrides, wait_ready=False) as omni:
        await wait_for(omni, lambda: omni.health().stages["second"][0].note == "thinking")
        await wait_restarted(omni, "first", generation=1)
        assert [output.delta for output in await read(ask(omni, ("text",)))] == ["x"]
        began = time.monotonic()
    assert time.monotonic() - began < WATCHDOG_S


async def test_rings_that_cannot_be_created_fail_the_opening() -> None:
    with pytest.raises(StageFailed, match="rings"):
        async with OmniSystem.open(one_stage(ring_bytes=1 << 52)):
            pytest.fail("it opened")


@pytest.mark.usefixtures("engines")
async def test_a_system_that_closes_while_it_loads_has_no_error_of_its_own() -> None:
    overrides = {"stages.second.engine": "faulty_engines:never", "start_timeout_s": WATCHDOG_S}
    async with OmniSystem.open("echo", **overrides, wait_ready=False) as omni:
        await wait_for(omni, lambda: omni.health().stages["second"][0].note == "thinking")
    assert omni.start_error is None
    overrides["stages.first.engine"] = "faulty_engines:broken"
    with pytest.raises(StageFailed, match="upside down"):
        async with OmniSystem.open("echo", **overrides):
            pytest.fail("it opened")
