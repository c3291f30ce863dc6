"""Prefill apart from decode on vLLM, with real processes that die in the middle of a transfer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Restart, Stage
from tests.support.shared_system import SharedSystem, open_shared_system
from tests.vllm.split_model import ARGS, BLOCK, PARAMS, save

WATCHDOG_S = 120.0
PROMPT: Any = {"prompt_token_ids": np.random.default_rng(1).integers(4, 250, 5 * BLOCK + 1).tolist()}
"""6 blocks."""
ROLES = "prefill", "decode"
DEATHS = {
    "prefill in mid-transfer": [("prefill", "output", 2)],
    "decode in mid-transfer": [("decode", "feed", 3)],
    "prefill with the last chunk": [("prefill", "output", 5)],
    "decode before the last chunk": [("decode", "feed", 5)],
    "decode in the middle of its answer": [("decode", "output", 4)],
    "both in turn": [("prefill", "output", 1), ("decode", "feed", 4)],
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def shared_system(
    fixture_processes: set[int], plans: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedSystem]:
    model = save(tmp_path_factory.mktemp("tiny"))
    quick = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)

    def stage(role: str, **wiring: Any) -> Stage:
        (plans / role).write_text("[]")
        options = {"engine": "vllm", "plan": str(plans / role), "role": role, "engine_args": ARGS}
        wiring |= {"resumable": True, "restart": quick, "threads": 1}
        return Stage(engine="tests.support.killed_prefill:make", model=str(model), options=options, **wiring)

    stages = {
        "prefill": stage("prefill", accepts=("messages",)),
        "decode": stage("decode", inputs=("prefill",), emits="text"),
    }
    pipeline = Pipeline(name="split", stages=stages)
    with open_shared_system(lambda: OmniSystem.open(pipeline), fixture_processes) as shared:
        yield shared


async def answer(omni: OmniSystem) -> tuple[str, int]:
    """The text, and the number of replays."""
    with trio.fail_after(WATCHDOG_S):
        outputs = [output async for output in omni.generate(PROMPT, max_tokens=12, **PARAMS)]
    metrics = outputs[-1].metrics
    assert metrics is not None
    return "".join(output.delta or "" for output in outputs), metrics.replays


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(deaths, id=name, marks=() if name.endswith("in mid-transfer") else pytest.mark.exhaustive)
        for name, deaths in DEATHS.items()
    ],
)
def test_a_death_at_any_moment_of_a_transfer_changes_no_token(
    shared_system: SharedSystem, plans: Path, deaths: list[tuple[str, str, int]]
) -> None:
    async def work(omni: OmniSystem) -> None:
        expected, none = await answer(omni)
        assert not none
        for role in ROLES:
            entries = [[place, number] for other, place, number in deaths if other == role]
            (plans / role).write_text(json.dumps(entries))
        text, replays = await answer(omni)
        assert text == expected
        assert all(json.loads((plans / role).read_text()) == [] for role in ROLES), "no such place"
        assert replays >= 1 or deaths == DEATHS["prefill with the last chunk"]

    shared_system.run(work)
