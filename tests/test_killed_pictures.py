"""SIGKILL of each stage of Qwen-Image at every step: the client gets the same picture, and little is computed twice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import OmniSystem, Picture
from tests.support.killing_denoiser import PLACES
from tests.support.shared_system import SharedSystem, open_shared_system

pytestmark = [pytest.mark.voice, pytest.mark.timeout(900)]

STAGES = ("text_encoder", "image_encoder", "denoiser", "vae")
STEPS = 4
WATCHDOG_S = 200.0
ASKED: dict[str, Any] = {"prompt": "a red fox", "size": "48x32", "seed": 1, "steps": STEPS, "previews": 1}
GUIDED: dict[str, Any] = {"guidance": 3.0, "negative_prompt": "grey"}


class Pictures:
    """A running pipeline whose workers are killed. folder: of its log and its plan."""

    def __init__(self, directory: Path, folder: Path, **more: Any) -> None:
        self._directory, self._log, self._plan = directory, folder / "log", folder / "plan"
        self._more = more
        self._expected: dict[bool, list[Picture]] = {}

    def open(self) -> Any:
        """Open the shipped pipeline on the checkpoint, with the denoiser that kills."""
        each = {"threads": 1, "restart": {"intensity": 1000, "backoff_s": 0.01, "backoff_max_s": 0.01}}
        settings: dict[str, Any] = {f"stages.{name}.{key}": value for name in STAGES for key, value in each.items()}
        settings |= {"limits.replays": 100, "stages.denoiser.resumable": True}
        settings["stages.denoiser.engine"] = "tests.support.killing_denoiser:KillingDenoiser"
        settings["stages.denoiser.options"] = {"log": str(self._log), "plan": str(self._plan)}
        return OmniSystem.open(self._directory, overrides={**settings, **self._more})

    async def draw(self, omni: OmniSystem, *, starts: bool) -> tuple[list[Picture], list[int]]:
        """Return the previews and the picture, and the steps that were computed. starts: from another picture."""
        self._log.write_text("")
        image = np.random.default_rng(0).integers(0, 255, (32, 48, 3), np.uint8)
        more = {"multi_modal_data": {"image": image}, "strength": 1.0} if starts else {}
        with trio.fail_after(WATCHDOG_S):
            outputs = [output async for output in omni.generate(**ASKED, **GUIDED, **more, modalities=("image",))]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        steps = [int(line) for line in self._log.read_text().split()]
        return [output.delta for output in outputs if output.delta is not None], steps

    async def kill(self, omni: OmniSystem, stage: str, step: int, place: str) -> None:
        """Draw a picture, kill a stage's worker there, and check the picture. Return when all stages are ready."""
        starts = stage == "image_encoder"
        if starts not in self._expected:
            self._expected[starts], computed = await self.draw(omni, starts=starts)
            assert computed == list(range(1, STEPS + 1))
        pid = next(replica.pid for replica in omni.health().stages[stage] if replica.state == "ready")
        self._plan.write_text(json.dumps([step, place, 0 if stage == "denoiser" else pid]))
        found, computed = await self.draw(omni, starts=starts)
        assert not self._plan.exists(), "the request did not come to that place"
        assert sorted(set(computed)) == list(range(1, STEPS + 1))
        assert len(computed) <= STEPS + (stage == "denoiser"), "steps were computed twice"
        expected = {picture.step: picture for picture in self._expected[starts]}
        steps = [picture.step for picture in found]
        assert steps == sorted(set(steps)), "a preview came twice, or out of order"
        assert found[-1].final
        for picture in found:
            np.testing.assert_array_equal(picture.pixels, expected[picture.step].pixels)
        with trio.fail_after(WATCHDOG_S):
            while not omni.health().ready:
                await omni.wait_changed()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import qwen_image as tiny

    return tiny.save(tmp_path_factory.mktemp("qwen_image"))


@pytest.fixture(scope="module")
def pictures(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return Pictures(directory, tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def shared_system(pictures: Pictures, fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(pictures.open, fixture_processes) as shared_system:
        yield shared_system


IN_CI = [
    *(("denoiser", step, "computed") for step in (1, STEPS)),
    ("denoiser", 2, "sent"),
    ("vae", 2, "sent"),
    ("text_encoder", 2, "begin"),
]
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.slow if case in IN_CI else pytest.mark.kills)
    for case in itertools.product(STAGES, range(1, STEPS + 1), PLACES)
    if case != ("denoiser", STEPS, "sent")  # then it has no request any more
]


@pytest.mark.parametrize(("stage", "step", "place"), CASES)
def test_a_stage_killed_at_a_step(
    shared_system: SharedSystem, pictures: Pictures, stage: str, step: int, place: str
) -> None:
    async def work(omni: OmniSystem) -> None:
        await pictures.kill(omni, stage, step, place)

    shared_system.run(work)


@pytest.mark.kills
@pytest.mark.parametrize("workers", ["standby", "replicas"])
def test_another_worker_goes_on_with_the_picture(
    workers: str, directory: Path, tmp_path: Path, fixture_processes: set[int]
) -> None:
    count = {"standby": 1} if workers == "standby" else {"replicas": 2}
    more = {f"stages.denoiser.{name}": number for name, number in count.items()}
    pictures = Pictures(directory, tmp_path, **more)

    async def main() -> None:
        async with pictures.open() as omni:
            for step, place in ((2, "computed"), (3, "begin")):
                await pictures.kill(omni, "denoiser", step, place)

    trio.run(main)
