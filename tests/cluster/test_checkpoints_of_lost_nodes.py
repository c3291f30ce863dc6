"""Checkpoints of a worker whose node is lost: its successor on another node starts over, and says nothing of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omni_actors import OmniSystem
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.orchestrator.pieces import Input
from tests.cluster.subprocess_cluster import FixedPlaces, named
from tests.replay.test_checkpoints import STEPS, check_answer, piece, pipeline
from tests.support.checkpointing_engine import steps_done
from tests.support.echo_systems import read, until, wait_restarted


@pytest.mark.parametrize("successor", ["parent", "b"])
async def test_a_successor_on_another_node_starts_over_and_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, successor: str
) -> None:
    caplog.set_level("INFO", "omni_actors.worker")
    log, agents = tmp_path / "log", SubprocessAgents()
    places = FixedPlaces({"encoder": "parent", "sampler": ("a", successor), "decoder": "parent"})
    async with (
        open_cluster(named("a", "b"), agents, places) as spawner,
        OmniSystem.open(pipeline(log), spawner=spawner) as omni,
    ):

        async def pieces() -> AsyncIterator[Input]:
            yield piece(live=True)
            await until(lambda: bool(spawner.agents["a"]._checkpoints._memories))
            yield piece(*((4, "end", pid, tmp_path / f"{pid} killed") for pid in (agents.pids["a"], 0)))

        check_answer(await read(omni.submit({"script": pieces()}, ("image",))))
        await wait_restarted(omni, "sampler", 2)
        assert omni.health().stages["sampler"][0].node == successor
    assert [step for _, step in steps_done(log)] == [1, 2, 3, 4, *range(1, STEPS + 1)]
    assert "checkpoint" not in caplog.text
