"""Hangs, restart strategies and types, the order of start and stop, and the history of deaths. Real processes."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import RequestError, StageFailed, StageUnavailable
from omni_actors.protocol.messages import Address
from omni_actors.serve.app import admission_to, build
from omni_actors.serve.media.loader import MediaLoader
from omni_actors.serve.pipelines import Pipelines
from omni_actors.serve.settings import ServerSettings
from omni_actors.supervisor.process import LocalSpawner, Worker
from omni_actors.system import OmniSystem
from tests.support.echo_systems import ask, one_stage, pid_of, read, until, wait_for
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

STEP_S = 5.0
"""The ``step_timeout_s`` of a worker that hangs. Without a hang, no worker of a busy machine takes that long."""
NO_PROGRESS = f"no progress for {STEP_S:g} s (step_timeout_s)"
ENGINES = """
    import collections, itertools, time
    from omni_actors.stages.echo.engine import EchoEngine

    class Endless(EchoEngine):
        def step(self):
            for output in super().step():
                match output.data["text"]:
                    case "python":
                        while True:
                            pass
                    case "c":
                        collections.deque(itertools.repeat(0), maxlen=0)  # without giving up the interpreter
                yield output

    def never(context):
        time.sleep(3600)
"""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = tmp_path_factory.mktemp("wedged")
    (path / "wedged_engines.py").write_text(textwrap.dedent(ENGINES))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        yield


@pytest.fixture(scope="module")
def shared_system(engines: None, fixture_processes: set[int]) -> Iterator[SharedSystem]:
    pipeline = one_stage("wedged_engines:Endless", step_timeout_s=STEP_S)
    with open_shared_system(lambda: OmniSystem.open(pipeline), fixture_processes) as shared_system:
        yield shared_system


def chain(**stages: dict[str, Any]) -> Pipeline:
    """top -> middle -> bottom, each an echo that is restarted quickly. stages: further configuration by name."""
    usual: dict[str, dict[str, Any]] = {
        "top": {"accepts": ("script",), "emits": "text"},
        "middle": {"inputs": ("top",)},
        "bottom": {"inputs": ("middle",), "emits": "audio"},
    }
    quick = Restart(backoff_s=0.01)
    return Pipeline(
        name="chain",
        stages={
            name: Stage(**{"engine": "echo", "restart": quick, **usual[name], **stages.get(name, {})}) for name in usual
        },
    )


def generations(omni: OmniSystem) -> dict[str, int]:
    return {stage: replicas[0].generation for stage, replicas in omni.health().stages.items()}


async def wait_generations(omni: OmniSystem, **expected: int) -> None:
    """Wait until all stages are ready, in these generations; the others in their first."""
    of_all = {**dict.fromkeys(omni.health().stages, 1), **expected}
    await wait_for(omni, lambda: omni.health().ready and generations(omni) == of_all)


# hangs


@with_shared_system
async def test_a_stopped_worker_is_killed_and_replaced(omni: OmniSystem) -> None:
    before, worker = generations(omni)["only"], omni._supervisor.replicas[Address("only", 0)].incarnation
    await until(lambda: worker.pong.is_set())  # a ping that waits already would shorten the time
    os.kill(pid_of(omni, "only"), signal.SIGSTOP)
    stopped = time.monotonic()
    await wait_for(omni, lambda: generations(omni)["only"] == before + 1)
    assert time.monotonic() - stopped > 0.9 * STEP_S
    await wait_generations(omni, only=before + 1)
    past = omni.health().stages["only"][0].history[-1]
    assert (past.generation, past.signal, past.reason) == (before, "SIGKILL", NO_PROGRESS)
    assert len(await read(ask(omni))) == 1


@pytest.mark.parametrize("loop", [pytest.param("python", marks=pytest.mark.slow), "c"])
def test_an_endless_loop_in_a_step_is_ended_with_its_reason(shared_system: SharedSystem, loop: str) -> None:
    async def work(omni: OmniSystem) -> None:
        before = generations(omni)["only"]
        with pytest.raises(RequestError, match=re.escape(NO_PROGRESS)):
            await read(ask(omni, text=loop))
        await wait_generations(omni, only=before + 1)
        assert len(await read(ask(omni))) == 1

    shared_system.run(work)


@pytest.mark.slow  # supervisor/test_heartbeat.py shows it in virtual time
async def test_neither_a_slow_worker_nor_one_that_waits_for_it_is_killed() -> None:
    """The upstream stage has more to send than may wait, so it stands still for as long as the slow stage takes."""
    overrides = {
        "stages.first.step_timeout_s": 1.5 * STEP_S,
        "stages.first.options.payload_bytes": 6_000_000,
        "stages.first.options.fan_out": 3,
        "stages.second.step_timeout_s": 1.5 * STEP_S,
        "stages.second.options.step_s": 0.6 * STEP_S,
    }
    async with OmniSystem.open("echo", **overrides) as omni:
        assert len(await read(ask(omni))) == 3
        assert generations(omni) == {"first": 1, "second": 1}


@pytest.mark.usefixtures("engines")
async def test_a_worker_that_never_finishes_loading_is_killed_in_time() -> None:
    stuck = one_stage("wedged_engines:never", load_timeout_s=0.4, restart=Restart(intensity=1, backoff_s=0.01))
    with pytest.raises(StageFailed, match="1 restarts were tried") as caught:
        async with OmniSystem.open(stuck):
            pytest.fail("it opened")
    assert [exit.signal for exit in caught.value.exits] == ["SIGKILL", "SIGKILL"]
    assert {exit.reason for exit in caught.value.exits} == {"not loaded within 0.4 s (load_timeout_s)"}


# restart strategies and types


async def test_each_strategy_restarts_its_stages() -> None:
    quick = {"backoff_s": 0.01}
    stages = {
        "middle": {"restart": Restart(strategy="rest_for_one", **quick)},
        "bottom": {"restart": Restart(strategy="one_for_all", **quick)},
    }
    async with OmniSystem.open(chain(**stages)) as omni:
        os.kill(pid_of(omni, "middle"), signal.SIGKILL)
        await wait_generations(omni, middle=2, bottom=2)
        reason = omni.health().stages["bottom"][0].history[0].reason
        assert reason == "restarted with stage 'middle' (rest_for_one)"
        os.kill(pid_of(omni, "bottom"), signal.SIGKILL)
        await wait_generations(omni, top=2, middle=3, bottom=3)
        assert len(await read(ask(omni))) == 1


async def test_each_type_restarts_after_its_deaths() -> None:
    stages = {
        "middle": {"restart": Restart(type="transient", backoff_s=0.01)},
        "bottom": {"restart": Restart(type="temporary")},
    }
    async with OmniSystem.open(chain(**stages)) as omni:
        with pytest.raises(RequestError, match="exited with code 3"):
            await read(ask(omni, stage="middle", exit=3))
        await wait_generations(omni, middle=2)
        with pytest.raises(RequestError, match="exited with code 0"):
            await read(ask(omni, stage="middle", exit=0))
        os.kill(pid_of(omni, "bottom"), signal.SIGKILL)
        await wait_for(omni, lambda: omni.health().stages["bottom"][0].state == "failed")
        assert {replicas[0].state for replicas in omni.health().stages.values()} == {"ready", "failed"}
        with pytest.raises(StageUnavailable, match="it is transient"):
            ask(omni)
        assert len(await read(ask(omni, ("text",)))) == 1


# the order of start and stop


class Recording(LocalSpawner):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    @asynccontextmanager
    async def spawn(self, address: Address, mailbox_capacity: int, **inherited: Any) -> AsyncIterator[Worker]:
        self.log.append(f"{address.stage} starts")
        try:
            async with super().spawn(address, mailbox_capacity, **inherited) as worker:
                yield worker
        finally:
            self.log.append(f"{address.stage} is gone")


async def test_stages_start_in_order_and_stop_in_reverse() -> None:
    spawner = Recording()
    async with OmniSystem.open(chain(middle={"shutdown_timeout_s": 0.2}), spawner=spawner) as omni:
        os.kill(pid_of(omni, "middle"), signal.SIGSTOP)  # so it uses its whole shutdown timeout
    starts = [f"{stage} starts" for stage in ("top", "middle", "bottom")]
    assert spawner.log == [*starts, *(f"{stage} is gone" for stage in ("bottom", "middle", "top"))]


# the history of deaths


async def test_the_history_is_in_dead_error_and_without_stderr_in_health() -> None:
    async with OmniSystem.open(one_stage(restart=Restart(intensity=1, backoff_s=0.01))) as omni:
        began = time.time()
        for code in (3, 4):
            await wait_generations(omni, only=code - 2)
            pid = pid_of(omni, "only")
            with pytest.raises(RequestError):
                await read(ask(omni, exit=code, stderr="a line of stderr"))
        await wait_for(omni, lambda: omni.errored)
        with pytest.raises(StageFailed) as caught:
            await omni.check_health()
        error = caught.value
        assert error is omni.dead_error
        facts = (error.stage, error.replica, error.generation, error.pid, error.exit_code, error.signal)
        assert facts == ("only", 0, 2, pid, 4, None)
        assert error.stderr_tail == ("a line of stderr",)
        assert [(death.generation, death.exit.exit_code) for death in error.history] == [(1, 3), (2, 4)]
        assert began <= error.history[0].at <= error.history[1].at <= time.time()
        pipelines, settings = Pipelines([omni]), ServerSettings(api_key="secret")
        app = build(pipelines, settings, admission=admission_to(pipelines, settings), media=MediaLoader())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as client:
            answer = await client.get("/health", headers={"authorization": "Bearer secret"})
            stranger = await client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "failed")
        (replica,) = answer.json()["stages"]["only"]
        assert [(past["generation"], past["exit_code"]) for past in replica["history"]] == [(1, 3), (2, 4)]
        assert "line of stderr" not in answer.text
        states = {"only": [{"replica": 0, "state": "failed"}]}
        summary = {"status": "failed", "model": "alone", "ready": False, "errored": True, "stages": states}
        assert (stranger.status_code, stranger.json()) == (503, summary), "no pid, no reason, no history"
