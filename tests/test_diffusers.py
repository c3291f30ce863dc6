"""A directory of diffusers in a real worker, opened by its path; tiny random weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from omni_actors import OmniSystem
from omni_actors.outputs import Output
from tests.support.hostile_pictures import check_refused
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system
from tests.support.worker_environment import noisy_workers
from tiny_models import diffusers_pipelines as tiny

pytestmark = [pytest.mark.slow, pytest.mark.voice, pytest.mark.filterwarnings("ignore::FutureWarning")]
STEPS = 4
ASKED: dict[str, Any] = {"modalities": ("image",), "size": "32x16", "steps": STEPS, "seed": 3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny", "stable_diffusion_3")


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], directory: Path) -> Iterator[SharedSystem]:
    often = {"stages.diffusers.restart.intensity": 100, "stages.diffusers.threads": 1}
    opening = lambda: OmniSystem.open(str(directory), overrides=often)  # noqa: E731
    with open_shared_system(opening, fixture_processes) as shared_system:
        yield shared_system


def test_the_picture_is_that_of_the_pipeline(shared_system: SharedSystem, directory: Path) -> None:
    own: Any = diffusers.DiffusionPipeline.from_pretrained(directory)
    own.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    made = own("a cat", width=32, height=16, num_inference_steps=STEPS, generator=generator, output_type="np").images

    async def work(omni: OmniSystem) -> None:
        picture = await omni.generate("a cat", **ASKED).picture()
        assert (picture.step, picture.total, picture.final) == (STEPS, STEPS, True)
        assert np.array_equal(picture.pixels, (made[0] * 255).round().astype(np.uint8))

    shared_system.run(work)


@with_shared_system
async def test_a_death_at_any_step_changes_no_picture(omni: OmniSystem) -> None:
    """The request begins again, and no preview comes twice."""
    whole = [output async for output in omni.generate("a cat", **ASKED, previews=1)]
    for dies_after in range(1, len(whole)):
        outputs: list[Output] = []
        async for output in omni.generate("a cat", **ASKED, previews=1):
            outputs.append(output)
            if len(outputs) == dies_after:
                os.kill(omni.health().stages["diffusers"][0].pid or 0, signal.SIGKILL)
        assert [_content(each) for each in outputs] == [_content(each) for each in whole]


def _content(output: Output) -> Any:
    picture = output.delta
    return None if picture is None else (picture.step, picture.final, picture.pixels.tobytes())


@with_shared_system
async def test_what_is_out_of_bounds_names_its_field(omni: OmniSystem) -> None:
    several = ("pipeline_kwargs", {"num_images_per_prompt": 50})
    await check_refused(omni, {"prompt": "a cat", **ASKED}, ("steps", 500), ("strength", 0.5), several)


@pytest.mark.skipif("OMNI_ACTORS_TEST_NOISE" in os.environ, reason="this test adds its own, larger noise")
def test_an_incarnation_that_computes_otherwise_goes_on(shared_system: SharedSystem) -> None:
    """What the client has is not compared. This is the last test: the worker that it leaves has noise."""

    async def work(omni: OmniSystem) -> None:
        whole = await _pictures(omni)
        drawn = await _pictures(omni, dies_after=2)
        assert [step for step, _ in drawn] == list(range(1, STEPS + 1)), "no preview comes twice, and none is missing"
        for (step, found), (_, expected) in zip(drawn, whole, strict=True):
            off = np.abs(found.astype(int) - expected).max()
            assert off == 0 if step <= 2 else 0 < off < 16, f"step {step} is off by {off}"

    with noisy_workers(seed=1):
        shared_system.run(work)


async def _pictures(omni: OmniSystem, dies_after: int = 0) -> list[tuple[int, Any]]:
    """Return the steps and the pixels of the previews and of the picture. SIGKILL the worker after so many of them."""
    found = []
    async for output in omni.generate("a cat", **ASKED, previews=1):
        picture: Any = output.delta
        found.append((picture.step, picture.pixels))
        if len(found) == dies_after:
            os.kill(omni.health().stages["diffusers"][0].pid or 0, signal.SIGKILL)
    return found
