"""The times that a worker on another machine measures: its clocks count from another moment than the parent's."""

from __future__ import annotations

import subprocess
import time

import pytest

from omni_actors import config
from tests.cluster.subprocess_cluster import open_on_nodes
from tests.support.echo_systems import WATCHDOG_S

AHEAD_S = 1_000_000
OTHER_CLOCK = (
    *("unshare", "--time", "--fork", "--kill-child"),
    *("--monotonic", str(AHEAD_S), "--boottime", str(AHEAD_S)),
)
"""A command that runs another one where the clocks are ahead."""


@pytest.fixture
def _needs_time_namespaces() -> None:
    command = [*OTHER_CLOCK, "cat", "/proc/uptime"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S, check=False)
    if ran.returncode or float(ran.stdout.split()[0]) < AHEAD_S:
        pytest.skip(f"no time namespace can be made here: {ran.stderr.strip()}")


@pytest.mark.usefixtures("_needs_time_namespaces")
async def test_the_times_of_a_stage_on_another_machine_are_those_of_the_parent() -> None:
    began = time.monotonic()
    nodes = {"first": "a", "second": "parent"}
    async with open_on_nodes(config.load("echo"), nodes, commands={"a": OTHER_CLOCK}) as on:
        outputs = [output async for output in on.omni.generate("hello", modalities=("text", "audio"))]
        took_s = time.monotonic() - began
    assert outputs[-1].metrics is not None
    stages = outputs[-1].metrics.stages
    assert set(stages) == {"first", "second"}
    for times in stages.values():
        measured = [times.started_s, times.first_input_s, times.first_output_s, times.finished_s]
        known = [each for each in measured if each is not None]
        assert known == sorted(known)
        assert all(-1 < each < took_s for each in known), measured
