"""Standbys with real processes and signals: a death does not wait for a worker to load."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
import trio

from omni_actors.config import Pipeline
from omni_actors.outputs import Output
from omni_actors.system import OmniSystem
from tests.replay.mortal import WATCHDOG_S
from tests.replay.test_resume import STAGES, check_continuous, pipeline, submit
from tests.support.echo_systems import read


def with_standby(file: Path) -> Pipeline:
    """The pipeline with one standby per stage, whose workers cannot load while ``file`` exists."""
    plain = pipeline({stage: {"blocked_by": str(file)} for stage in STAGES})
    stages = {name: msgspec.structs.replace(stage, standby=1) for name, stage in plain.stages.items()}
    return msgspec.structs.replace(plain, stages=stages)


def standbys(omni: OmniSystem) -> dict[str, list[bool]]:
    return {stage: [each.standby for each in replicas] for stage, replicas in omni.health().stages.items()}


async def all_loaded(omni: OmniSystem) -> None:
    with trio.fail_after(WATCHDOG_S):
        while any(each.state != "ready" for replicas in omni.health().stages.values() for each in replicas):
            await omni.wait_changed()


async def read_and_kill_pid(omni: OmniSystem, pid: int) -> list[Output]:
    """Read an answer, and kill this process when the first output has arrived."""
    outputs: list[Output] = []
    with trio.fail_after(WATCHDOG_S):
        async for output in submit(omni):
            if not outputs:
                os.kill(pid, signal.SIGKILL)
            outputs.append(output)
    return outputs


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage == "second" else pytest.mark.slow) for stage in STAGES]
)
async def test_a_standby_takes_over_before_the_dead_worker_is_back(stage: str, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    async with OmniSystem.open(with_standby(blocked)) as omni:
        await all_loaded(omni)
        before = standbys(omni)
        assert all(sorted(each) == [False, True] for each in before.values())
        served = before[stage].index(False)
        blocked.touch()
        pid = omni.health().stages[stage][served].pid
        assert pid is not None
        check_continuous(await read_and_kill_pid(omni, pid))
        with trio.fail_after(WATCHDOG_S):
            while (states := omni.health().stages[stage])[served].state == "ready":
                await omni.wait_changed()  # all outputs had been sent before the death
        assert not states[1 - served].standby
        check_continuous(await read(submit(omni)))
        blocked.unlink()
        await all_loaded(omni)
        assert standbys(omni)[stage].index(True) == served, "the restarted worker is the standby now"
