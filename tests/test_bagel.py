"""BAGEL as a running pipeline, opened by its directory: texts, pictures, and deaths of each stage."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import OmniSystem, Picture
from tests.support.closeness import assert_same_picture
from tests.support.echo_systems import generation_of, pid_of, wait_restarted
from tests.support.hostile_pictures import check_refused
from tests.support.shared_system import SharedSystem, open_shared_system

pytestmark = [pytest.mark.voice, pytest.mark.slow]

QUICK = {
    f"stages.{stage}.{name}": value
    for stage in ("context", "denoiser")
    for name, value in {"threads": 1, "restart.backoff_s": 0.01, "restart.intensity": 100}.items()
}
DRAWN: dict[str, Any] = {
    "prompt": "hello, what are you",
    "modalities": ("image",),
    "size": "64x48",
    "steps": 6,
    "previews": 1,
    "seed": 3,
}
IMAGE = np.linspace(0, 255, 48 * 64 * 3).astype(np.uint8).reshape(48, 64, 3)
EDITED = {**DRAWN, "size": None, "image": IMAGE}
THOUGHT = {**DRAWN, "modalities": ("image", "text"), "think": True, "max_tokens": 6}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import bagel

    return bagel.save(tmp_path_factory.mktemp("bagel"))


@pytest.fixture(scope="module")
def shared(directory: Path, fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(str(directory), **QUICK), fixture_processes) as system:
        yield system


async def draw(omni: OmniSystem, asked: dict[str, Any], victim: str | None = None, at: int = 0) -> Any:
    """The steps of a request's pictures, the finished picture, and how often it was replayed.

    SIGKILL the worker of ``victim`` when output number ``at`` has arrived.
    """
    steps, picture, outputs = [], None, []
    async for output in omni.generate(**asked):
        outputs.append(output)
        if isinstance(output.delta, Picture):
            steps.append(output.delta.step)
            picture = output.delta.pixels if output.delta.final else picture
        if victim is not None and len(outputs) == at + 1:
            os.kill(pid_of(omni, victim), signal.SIGKILL)
    return steps, picture, outputs[-1].metrics.replays


def test_it_writes_about_a_picture_and_draws(shared: SharedSystem) -> None:
    async def ask(omni: OmniSystem) -> None:
        answer = await omni.generate("what is it ?", image=IMAGE, max_tokens=5).collect()
        assert answer.text
        steps, picture, _ = await draw(omni, DRAWN)
        assert steps == [1, 2, 3, 4, 5, 6]
        assert picture.shape == (48, 64, 3)
        _, edited, _ = await draw(omni, EDITED)
        assert edited.shape == IMAGE.shape
        assert not np.array_equal(edited, picture)

    shared.run(ask)


def test_a_bad_request_is_refused_by_the_field_and_nothing_is_allocated(shared: SharedSystem) -> None:
    async def ask(omni: OmniSystem) -> None:
        others = [("steps", 1001), ("negative_prompt", "grey"), ("strength", 0.5), ("shift", 0.0), ("renorm", "none")]
        await check_refused(omni, {**DRAWN, "steps": 2}, *others)

    shared.run(ask)


@pytest.mark.parametrize("victim", ["context", "denoiser"])
@pytest.mark.parametrize(
    ("asked", "at"),
    [
        pytest.param(DRAWN, 3, id="drawn"),
        pytest.param(EDITED, 0, id="edited"),
        pytest.param(THOUGHT, 0, id="thought: text"),
        pytest.param(THOUGHT, 4, id="thought: pictures"),
    ],
)
def test_the_picture_is_the_same_after_a_death(
    shared: SharedSystem, asked: dict[str, Any], victim: str, at: int
) -> None:
    async def kill(omni: OmniSystem) -> None:
        generation = generation_of(omni, victim)
        _, expected, _ = await draw(omni, asked)
        _, picture, _ = await draw(omni, asked, victim, at)
        assert_same_picture(picture, expected)
        await wait_restarted(omni, victim, generation + 1)

    shared.run(kill)


def test_one_stage_goes_on_with_the_picture_after_a_death(directory: Path, tmp_path: Path) -> None:
    """SIGKILL before and behind a checkpoint: one step is done twice, or none."""
    log, plan = tmp_path / "log", tmp_path / "plan"
    cases: list[tuple[dict[str, Any], int, str, list[int]]] = [
        (EDITED, 2, "computed", [1, 2, 2, 3, 4, 5, 6]),
        ({**THOUGHT, "modalities": ("image",)}, 4, "sent", [1, 2, 3, 4, 5, 6]),
    ]
    settings: dict[str, Any] = {
        "engine": "tests.support.killing_engines:make",
        "model": str(directory),
        "device": "cpu",
        "options": {"engine": "bagel", "context": 512, "log": str(log), "plan": str(plan)},
        "resumable": True,
        "threads": 1,
        "restart": {"intensity": 100, "backoff_s": 0.01},
    }

    async def work() -> None:
        overrides = {f"stages.bagel.{name}": value for name, value in settings.items()}
        async with OmniSystem.open("bagel_one_stage", overrides=overrides) as omni:
            for asked, step, place, computed in cases:
                plan.write_text("[]")
                _, expected, _ = await draw(omni, asked)
                log.write_text("")
                plan.write_text(json.dumps([[step, place, 0]]))
                _, picture, replays = await draw(omni, asked)
                assert replays == 1
                assert [int(line) for line in log.read_text().split()] == computed
                assert_same_picture(picture, expected)

    trio.run(work)
