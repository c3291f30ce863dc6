"""Qwen-Image as a pipeline of processes beside diffusers' own pipelines.

A request that is alone is compared to the bit, latents and pixels: both sides run on this machine, with one thread, and
do the same operations in the same order. In a mixed batch, shapes differ, and so does the rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

from omni_actors import OmniSystem
from tests.support.hostile_pictures import check_refused
from tests.support.shared_system import SharedSystem, open_shared_system

pytestmark = [pytest.mark.voice, pytest.mark.slow, pytest.mark.timeout(300)]

WATCHDOG_S = 100.0
AREA = 64 * 64
CLOSE = 1e-4
"""Of the largest latent, in a mixed batch."""
SMALL = {"stages.image_encoder.options.image_area": AREA}
LATENTS = {"stages.denoiser.emits": "latents"}
"""The client gets the latents too."""


def opening(directory: Path, **overrides: Any) -> AbstractAsyncContextManager[OmniSystem]:
    """Open the shipped pipeline on a checkpoint, by its directory, with one thread in each worker."""
    threads = {f"stages.{stage}.threads": 1 for stage in ("text_encoder", "image_encoder", "denoiser", "vae")}
    return OmniSystem.open(directory, overrides={**threads, **LATENTS, **SMALL, **overrides})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import qwen_image as tiny

    return tiny.save(tmp_path_factory.mktemp("qwen_image"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    """Return a function: name of a class of diffusers -> its pipeline on the same weights."""
    from tests.support.qwen_image_reference import open_pipeline

    torch.set_num_threads(1)
    opened: dict[str, Any] = {}
    return lambda name="QwenImagePipeline": opened.setdefault(name, open_pipeline(checkpoint, name))


@pytest.fixture(scope="module")
def shared_system(checkpoint: Path, fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: opening(checkpoint), fixture_processes) as shared_system:
        yield shared_system


def test_progress_passes_the_decoder(shared_system: SharedSystem) -> None:
    async def work(omni: OmniSystem) -> None:
        asked = {"size": "32x32", "steps": 3, "seed": 0, "progress": 1}
        outputs = [each async for each in omni.generate("a fox", modalities=("image",), **asked)]
        assert [each.data["step"] for each in outputs] == [1, 2, 3]
        assert [each.delta is None for each in outputs] == [True, True, False]

    shared_system.run(work)


async def draw(omni: OmniSystem, prompt: str, **asked: Any) -> tuple[Any, Any]:
    """Return the latents and the pixels of a picture."""
    latents = pixels = None
    with trio.fail_after(WATCHDOG_S):
        async for output in omni.generate(prompt, modalities=("image", "latents"), **asked):
            if output.modality == "latents":
                latents = output.tensors["latents"].numpy()
            elif output.delta is not None:
                pixels = output.delta.pixels
    return latents, pixels


def of_diffusers(pipeline: Any, prompt: str, asked: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    """Return what diffusers draws for the same request."""
    from tests.support.qwen_image_reference import drawn

    size = asked.get("size")
    return drawn(
        pipeline,
        prompt,
        seed=asked["seed"],
        size=tuple(map(int, size.split("x"))) if size else None,
        steps=asked["steps"],
        true_cfg_scale=asked.get("guidance", 4.0),
        negative_prompt=asked.get("negative_prompt"),
        **more,
    )


def assert_equal(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


REQUESTS = [
    {"seed": seed, "size": size, "steps": steps, **guided}
    for seed, size, steps, guided in itertools.product(
        (0, 2**40),
        ("32x32", "48x32", "64x64"),
        (2, 5),
        ({}, {"guidance": 1.0, "negative_prompt": "grey"}, {"guidance": 3.5, "negative_prompt": "grey"}),
    )
]


def test_a_request_that_is_alone_gives_diffusers_picture_to_the_bit(
    shared_system: SharedSystem, reference: Any
) -> None:
    async def work(omni: OmniSystem) -> None:
        for number, asked in enumerate(REQUESTS):
            prompt = f"a red fox number {number}"
            assert_equal(await draw(omni, prompt, **asked), of_diffusers(reference(), prompt, asked))

    shared_system.run(work)


def test_a_picture_to_start_from_gives_diffusers_picture_to_the_bit(
    shared_system: SharedSystem, reference: Any
) -> None:
    from tests.support.qwen_image_reference import photo

    async def work(omni: OmniSystem) -> None:
        for strength, size in ((0.6, "48x32"), (1.0, "64x64"), (0.3, "32x32")):
            image = photo(1)
            asked = {"seed": 5, "size": size, "steps": 6, "guidance": 3.0, "negative_prompt": "grey"}
            found = await draw(omni, "a cat", **asked, strength=strength, multi_modal_data={"image": image})
            pipeline = reference("QwenImageImg2ImgPipeline")
            assert_equal(found, of_diffusers(pipeline, "a cat", asked, image=image, strength=strength))

    shared_system.run(work)


def test_pictures_of_a_mixed_batch_are_diffusers_pictures(shared_system: SharedSystem, reference: Any) -> None:
    from tests.support.qwen_image_reference import similarity

    mixed = [REQUESTS[number] | {"steps": 4 + number} for number in (0, 2, 5, 12, 19, 24, 31, 35)]

    async def work(omni: OmniSystem) -> None:
        found: dict[int, tuple[Any, Any]] = {}

        async def draw_one(number: int, asked: dict[str, Any]) -> None:
            found[number] = await draw(omni, f"prompt {'long ' * number}", **asked)

        async with trio.open_nursery() as nursery:
            for number, asked in enumerate(mixed):
                nursery.start_soon(draw_one, number, asked)
        for number, asked in enumerate(mixed):
            latents, pixels = of_diffusers(reference(), f"prompt {'long ' * number}", asked)
            np.testing.assert_allclose(found[number][0], latents, rtol=0, atol=CLOSE * np.abs(latents).max())
            assert similarity(found[number][1], pixels) >= 0.999

    shared_system.run(work)


def test_a_bad_request_is_refused_by_the_field_and_nothing_is_allocated(shared_system: SharedSystem) -> None:
    asked = {"prompt": "a", "steps": 2, "size": "32x32", "seed": 0, "guidance": 2.0, "modalities": ("image",)}
    starts_from_nothing = ("strength", 0.5)

    async def work(omni: OmniSystem) -> None:
        await check_refused(omni, asked, ("steps", 101), ("negative_prompt", "word " * 8000), starts_from_nothing)

    shared_system.run(work)


@pytest.mark.parametrize("plus", [False, True], ids=["one picture", "two pictures"])
def test_an_edit_gives_diffusers_picture_to_the_bit(
    plus: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixture_processes: set[int]
) -> None:
    from tests.support.qwen_image_reference import open_pipeline, photo, scale_to
    from tiny_models import qwen_image as tiny

    torch.set_num_threads(1)
    directory = tiny.save_edit(tmp_path / "edit", plus=plus)
    pipeline = open_pipeline(directory, "QwenImageEditPlusPipeline" if plus else "QwenImageEditPipeline")
    scale_to(monkeypatch, {1024 * 1024: AREA, 384 * 384: AREA})
    images = [photo(1, 80, 50), photo(2, 50, 80)][: 1 + plus]

    async def work(omni: OmniSystem) -> None:
        for size in (None, "48x32"):
            asked = {"seed": 5, "steps": 3, "guidance": 3.0, "negative_prompt": "grey"} | (
                {"size": size} if size else {}
            )
            found = await draw(omni, "make it red", **asked, multi_modal_data={"image": images})
            given = images if plus else images[0]
            assert_equal(found, of_diffusers(pipeline, "make it red", asked, image=given))

    small = {"stages.text_encoder.options.image_area": AREA}
    with open_shared_system(lambda: opening(directory, **small), fixture_processes) as edits:
        edits.run(work)
