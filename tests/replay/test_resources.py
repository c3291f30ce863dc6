"""What a request keeps for its replay: the retained chunks, and the seed."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import psutil

from omni_actors import config
from omni_actors.errors import DeadlineExceeded
from omni_actors.orchestrator.pieces import Input
from omni_actors.system import OmniSystem
from omni_actors.system.parameters import Parameters
from tests.support.echo_systems import pid_of, read
from tests.support.shared_system import with_shared_system


@with_shared_system
async def test_retained_chunks_are_freed_however_a_request_ends(omni: OmniSystem) -> None:
    """For each request the first stage retains 0.4 MB and the second stage 0.8 MB."""
    script = {"script": [Input({"n": 0}, {"x": np.zeros(200_000, np.uint8)})]}

    async def done() -> None:
        await read(omni.submit(script, ["audio"]))

    async def aborted() -> None:
        async for _ in omni.submit(script, ["text", "audio"]):
            break  # drops the stream

    async def late() -> None:
        with suppress(DeadlineExceeded):  # a fast machine may complete it
            await read(omni.submit(script, ["audio"], deadline_s=0.005))

    workers = {stage: psutil.Process(pid_of(omni, stage)) for stage in ("first", "second")}
    for end in (done, aborted, late):
        for _ in range(5):
            await end()
        before = {stage: worker.memory_info().rss for stage, worker in workers.items()}
        for _ in range(60):
            await end()
        for stage, worker in workers.items():
            assert worker.memory_info().rss - before[stage] < 15_000_000, (end.__name__, stage)


def test_a_missing_seed_is_drawn_when_the_request_is_admitted() -> None:
    parameters = Parameters(config.load("voice"))
    stages = ("llm", "acoustic", "vocoder")
    drawn = [parameters.by_stage(stages, {}) for _ in range(3)]
    assert len({params["llm"]["seed"] for params in drawn}) == 3
    assert all(isinstance(params["llm"]["seed"], int) for params in drawn)
    assert "seed" not in drawn[0]["acoustic"]
    given = parameters.by_stage(stages, {"seed": 7})
    assert given["llm"]["seed"] == given["vocoder"]["seed"] == 7
