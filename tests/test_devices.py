"""Devices of a running system: what a worker sees, who loads when, and what is left when systems are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from typing import Any

import pytest
import trio

from omni_actors.config import Autoscale, Pipeline, Stage
from omni_actors.errors import ConfigError, StageFailed, StartTimedOut
from omni_actors.platform.device_locks import DeviceBusy, DeviceLocks
from omni_actors.protocol.messages import Address
from omni_actors.system import OmniSystem
from tests.support.echo_systems import OFTEN, WATCHDOG_S, pid_of, wait_for

ENGINES = """
    import fcntl, json, os, random, time
    from omni_actors.stages.echo.engine import EchoEngine

    def observed(context):
        facts = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OF_A_STAGE", "OF_THE_PARENT")}
        facts |= {"device": context.device, "device_count": context.device_count}
        path = os.path.join(os.environ["WITNESS"], f"{context.stage}.{facts['CUDA_VISIBLE_DEVICES']}")
        with open(path, "w") as file:
            json.dump(facts, file)
        return EchoEngine(type(context)(context.stage, None, {}, 1, "cpu", context.report))

    def alone(context):
        '''Load for a moment, and note each device onto which another process loads at the same time.'''
        folder, witnesses = os.environ["WITNESS"], []
        for device in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
            witnesses.append(os.open(os.path.join(folder, device), os.O_CREAT | os.O_RDWR))
            try:
                fcntl.flock(witnesses[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                open(os.path.join(folder, f"shared.{device}.{os.getpid()}"), "w").close()
        time.sleep(random.uniform(0.0, 0.1))
        for witness in witnesses:
            os.close(witness)
        with open(os.path.join(folder, "loads"), "a") as file:
            file.write("x")
        return EchoEngine(type(context)(context.stage, None, {}, 1, "cpu", context.report))

    def never(context):
        context.report("loading for ever")
        time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "device_engines.py").write_text(textwrap.dedent(ENGINES))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WITNESS", str(tmp_path))


@pytest.fixture
def names() -> list[str]:
    """Two devices that no other process locks."""
    tag = uuid.uuid4()
    return [f"GPU-{tag}-{number}" for number in range(2)]


def pipeline(engine: str, *, start_timeout_s: float | None = None, **stage: Any) -> Pipeline:
    configured = Stage(engine=f"device_engines:{engine}", accepts=("script",), emits="audio", restart=OFTEN, **stage)
    return Pipeline(name="devices", stages={"only": configured}, start_timeout_s=start_timeout_s)


async def test_each_worker_sees_its_own_devices_and_the_environment_of_its_stage(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(["9", *names]))
    monkeypatch.setenv("OF_THE_PARENT", "kept")
    before = dict(os.environ)
    configured = pipeline("observed", device="cuda:1", standby=1, env={"OF_A_STAGE": "1"})
    async with OmniSystem.open(configured) as omni:
        assert [each.devices for each in omni.health().stages["only"]] == [(names[0],), (names[1],)]
    assert dict(os.environ) == before
    for name in names:
        assert json.loads((tmp_path / f"only.{name}").read_text()) == {
            "CUDA_VISIBLE_DEVICES": name,
            "OF_A_STAGE": "1",
            "OF_THE_PARENT": "kept",
            "device": "cuda:0",
            "device_count": 1,
        }


@pytest.mark.parametrize(
    "how",
    [
        {"device": "cuda:0", "replicas": 2},
        {"device": "cuda:1", "replicas": 0, "scale_from_zero": True},
        {"device": "cuda:1", "replicas": 0, "autoscale": Autoscale(min=0, max=1)},
    ],
)
async def test_devices_that_are_not_visible_are_refused_before_a_process_starts(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match="only 1 devices are visible") as caught:
        async with OmniSystem.open(pipeline("observed", **how)):
            pass
    assert caught.value.path == "stages.only.device"


async def test_a_device_onto_which_others_load_for_too_long_fails_the_start(names: list[str]) -> None:
    holder = DeviceLocks()
    await holder.acquire(names[:1], 1.0)
    configured = pipeline("alone", device="cuda", devices=tuple(names[:1]), device_lock_timeout_s=0.05)
    with pytest.raises(StageFailed, match=f"locked by pid {os.getpid()}") as caught:
        async with OmniSystem.open(configured):
            pass
    holder.release()
    assert isinstance(caught.value.__cause__, DeviceBusy)
    assert (caught.value.__cause__.device, caught.value.__cause__.holder_pid) == (names[0], os.getpid())


async def test_a_lock_that_cannot_be_taken_is_a_start_that_failed(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(device: str) -> None:
        raise OSError(24, "Too many open files")

    async with OmniSystem.open(pipeline("alone", device="cuda", devices=tuple(names[:1]))) as omni:
        with monkeypatch.context() as patched:
            patched.setattr("omni_actors.platform.device_locks._try_lock", none_left)
            os.kill(pid_of(omni, "only"), signal.SIGKILL)
            await wait_for(omni, lambda: len(omni.health().stages["only"][0].history) >= 2)
        failed = omni._supervisor.replicas[Address("only", 0)].history[1].exit
        assert failed.pid is None
        assert str(failed).startswith("no process was started: the device locks of worker only.0 could not be opened")
        await wait_for(omni, lambda: omni.health().ready)


async def test_workers_on_one_device_load_one_after_another(tmp_path: Path, names: list[str]) -> None:
    configured = pipeline("alone", device="cuda", devices=tuple(names[:1]), replicas=2, share_devices=True)
    async with OmniSystem.open(configured):
        assert (tmp_path / "loads").read_text() == "xx"
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shared.")]


async def test_a_system_that_does_not_load_in_time_is_stopped() -> None:
    with trio.fail_after(WATCHDOG_S), pytest.raises(StartTimedOut) as caught:
        async with OmniSystem.open(pipeline("never", start_timeout_s=0.5)):
            pass
    assert list(caught.value.not_ready) == [("only", 0)]
    assert "start_timeout_s" in str(caught.value)


ROUNDS = """
    import ctypes, os, random, select, signal, sys, time, trio
    from pathlib import Path
    from omni_actors.config import Pipeline, Restart, Stage
    from omni_actors.platform.device_locks import DeviceLocks
    from omni_actors.system import OmniSystem

    WATCHDOG_S = 60.0
    rounds, seed, *names = int(sys.argv[1]), *sys.argv[2:]
    draw = random.Random(seed)
    folder = Path(os.environ["WITNESS"])
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of a killed system become children of this process


    def pipeline(order):
        common = {"engine": "device_engines:alone", "device": "cuda", "restart": Restart(intensity=1000)}
        both = Stage(devices=tuple(order), devices_per_replica=2, accepts=("script",), emits="text", **common)
        one = Stage(devices=tuple(order[:1]), inputs=("both",), emits="audio", **common)
        return Pipeline(name="two", stages={"both": both, "one": one})


    async def run(order, ready):
        async with OmniSystem.open(pipeline(order)):
            os.write(ready, b"x")
            await trio.sleep_forever()


    def start(order):
        ready, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                trio.run(run, order, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        return pid, ready


    def is_free():
        async def take():
            locks = DeviceLocks()
            await locks.acquire(names, WATCHDOG_S)
            locks.release()
        trio.run(take)


    for number in range(rounds):
        systems = [start(names), start(names[::-1])]
        draw.shuffle(systems)
        time.sleep(draw.uniform(0.0, 1.2))
        os.kill(systems[0][0], signal.SIGKILL)
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0.0, 0.6))
        else:
            readable, _, _ = select.select([systems[1][1]], [], [], WATCHDOG_S)
            assert readable and os.read(systems[1][1], 1), f"round {number}: the other system does not load: deadlock"
        os.kill(systems[1][0], signal.SIGKILL)
        for _, ready in systems:
            os.close(ready)
        try:
            while True:
                os.waitpid(-1, 0)  # every worker ends too
        except ChildProcessError:
            pass
        is_free()
        assert not list(folder.glob("shared.*")), f"round {number}: two workers loaded onto one device"
        left = [line for line in Path("/proc/net/unix").read_text().splitlines() if names[0][:-2] in line]
        assert not left, f"round {number}: {left}"
    print("loads:", len((folder / "loads").read_text()))
"""


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(4, marks=pytest.mark.slow),
        pytest.param(200, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3000)]),
    ],
)
def test_two_systems_that_want_the_same_devices_are_killed_at_random(
    rounds: int, tmp_path: Path, names: list[str]
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    script = [sys.executable, "-c", textwrap.dedent(ROUNDS), str(rounds), "17", *names]
    result = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    loads = int(result.stdout.rpartition(" ")[2])
    print(f"{rounds} rounds, {loads} loads")
    assert loads >= rounds // 2
