"""SIGKILL of each stage that makes pictures, at every denoising step: the client gets the same picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.support.killed_pictures import FAMILIES, STEPS, WORKERS, KilledPictures, save, spots

pytestmark = [pytest.mark.voice, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::FutureWarning")]

AT_ONCE = [
    (1, "computed", "denoiser"),
    (2, "begin", "text_encoder"),
    (2, "sent", "vae"),
    (2, "sent", "denoiser"),
    (STEPS, "computed", "denoiser"),
]


@pytest.mark.slow
def test_one_picture_outlives_the_deaths_of_three_stages(tmp_path: Path) -> None:
    killed = KilledPictures(FAMILIES["qwen_image"], save("qwen_image", tmp_path / "model"), tmp_path)

    async def main() -> None:
        async with killed.open() as omni:
            await killed.kill(omni, *AT_ONCE)

    trio.run(main)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_stage_killed_at_every_step(
    family: str, workers: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    killed = KilledPictures(FAMILIES[family], save(family, tmp_path / "model"), tmp_path, workers)

    async def main() -> None:
        async with killed.open() as omni:
            for spot in spots(FAMILIES[family], workers):
                await killed.kill(omni, spot)

    trio.run(main)
    record_property("kills", killed.kills)
    record_property("replayed", killed.replayed)
    record_property("most steps done twice", killed.most_repeated)
