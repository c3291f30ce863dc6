"""The denoiser computes what diffusers' pipelines compute.

A request that is alone is compared to the bit: this machine does the same operations in the same order twice. In a
mixed batch the shapes differ, and so does the rounding.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from tests.stages.qwen_image.denoiser_requests import Request, final, states
from tests.support.closeness import assert_close
from tests.support.engine_driver import Driver
from tiny_models import qwen_image as tiny

pytestmark = pytest.mark.voice  # it needs the libraries of the extras; the weights are random

LEVELS = {"euler_karras": "use_karras_sigmas", "euler_exponential": "use_exponential_sigmas"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("qwen_image"))


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Callable[..., Any]:
    """Return a function from the name of a class of diffusers to a pipeline without a text encoder."""

    @functools.cache
    def get(name: str = "QwenImagePipeline", dtype: torch.dtype = torch.float32) -> Any:
        parts: dict[str, Any] = {"text_encoder": None, "tokenizer": None}
        parts |= {"processor": None} if "Edit" in name else {}
        opened = getattr(diffusers, name).from_pretrained(checkpoint, dtype=dtype, **parts)
        opened.set_progress_bar_config(disable=True)
        return opened

    return get


@pytest.fixture(scope="module")
def opened(checkpoint: Path, open_stage: Callable[..., Any]) -> Iterator[Callable[..., Driver]]:
    """Return a function from options to a driver of an engine of ``checkpoint``, which it opens once."""

    @functools.cache
    def get(**options: Any) -> Driver:
        return Driver(stack.enter_context(closing(open_stage("qwen_image_denoiser", checkpoint, **options))))

    with ExitStack() as stack:
        yield get


@pytest.fixture(autouse=True)
def one_thread(opened: Callable[..., Driver]) -> None:
    """Both sides compute with the engine's number of threads: opening the engine sets it."""
    opened()


def test_text_to_image_is_diffusers_to_the_bit(opened: Any, pipeline: Any) -> None:
    grid = itertools.product((0, 7), ("64x64", "96x64", "32x48"), (2, 3, 5), (1.0, 4.0), (None, states(4, 1)))
    for n, (seed, size, steps, guidance, negative) in enumerate(grid):
        if n % 5:  # each value meets each other one; all 72 would take long
            continue
        request = Request(states(7), negative, seed=seed, size=size, steps=steps, guidance=guidance)
        found = request.alone(opened())
        np.testing.assert_array_equal(found, request.reference(pipeline()), err_msg=str(request.params))


def test_half_precision_is_diffusers_to_the_bit(opened: Any, pipeline: Any) -> None:
    half = Request(states(7), states(4, 1))
    found = half.alone(opened(dtype="bfloat16"))
    half.prompt, half.negative = states(7).bfloat16(), states(4, 1).bfloat16()
    np.testing.assert_array_equal(found, half.reference(pipeline("QwenImagePipeline", torch.bfloat16)))


@pytest.mark.parametrize("name", LEVELS)
def test_other_noise_levels_are_diffusers_to_the_bit(opened: Any, pipeline: Any, name: str) -> None:
    request = Request(states(7), states(4, 1), scheduler=name)
    model, plain = pipeline(), pipeline().scheduler
    model.scheduler = type(plain).from_config(plain.config, **{LEVELS[name]: True})
    try:
        expected = request.reference(model)
    finally:
        model.scheduler = plain
    found = request.alone(opened())
    np.testing.assert_array_equal(found, expected)
    request.params["scheduler"] = "euler"
    assert not np.allclose(found, request.alone(opened()), atol=1e-2)


@pytest.mark.parametrize("strength", [0.3, 0.6, 1.0])
def test_image_to_image_is_diffusers_to_the_bit(opened: Any, pipeline: Any, strength: float) -> None:
    model, size = pipeline("QwenImageImg2ImgPipeline"), (48, 64)
    pixels = model.image_processor.preprocess(picture(0), *size).unsqueeze(2)
    with torch.no_grad():
        start = model._encode_vae_image(pixels, torch.Generator().manual_seed(3))[0, :, 0]
    request = Request(states(7), states(4, 1), (start,), size="64x48", steps=5, seed=3, strength=strength)
    expected = request.reference(model, image=picture(0), strength=strength)
    np.testing.assert_array_equal(request.alone(opened()), expected)


@pytest.mark.parametrize("pictures", [1, 2])
def test_edits_are_diffusers_to_the_bit(
    checkpoint: Path, open_stage: Any, pipeline: Any, monkeypatch: Any, tmp_path: Path, pictures: int
) -> None:
    """With small pictures, where diffusers scales them to a megapixel."""
    name = "QwenImageEditPipeline" if pictures == 1 else "QwenImageEditPlusPipeline"
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (48, 32, None))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "calculate_dimensions", lambda area, ratio: (48, 32))
    model, images = pipeline(name), [picture(n) for n in range(pictures)]
    processor = model.image_processor
    with torch.no_grad():
        scaled = [processor.resize(image, 32, 48) if pictures == 1 else image for image in images]
        pixels = [processor.preprocess(image, 32, 48).unsqueeze(2) for image in scaled]
        latents = tuple(model._encode_vae_image(each, None)[0, :, 0] for each in pixels)
    for part in ("transformer", "scheduler", "vae"):
        (tmp_path / part).symlink_to(checkpoint / part)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    request = Request(states(7), states(4, 1), latents)
    with closing(open_stage("qwen_image_denoiser", tmp_path)) as engine:
        driver = Driver(engine)
        expected = request.reference(model, image=images[0] if pictures == 1 else images)
        np.testing.assert_array_equal(request.alone(driver), expected)
        request.params["size"] = None
        assert request.alone(driver).shape == (tiny.CHANNELS, 8, 12), "without a size, that of the picture"


def test_mixed_batches_give_what_each_request_gives_alone(opened: Any) -> None:
    driver = opened(max_batch=16)
    requests = [
        Request(states(7), states(4, 1), seed=1, steps=9),
        Request(states(12, 2), seed=2, steps=4),
        Request(states(3, 3), states(9, 4), seed=3, steps=6, guidance=2.5),
        Request(states(7, 5), seed=4, steps=5, size="96x64"),
        Request(states(5, 6), states(5, 7), seed=5, steps=7, size="96x64", scheduler="euler_karras"),
        Request(states(8, 8), seed=6, steps=3, size="32x32"),
    ]
    expected = [request.alone(driver) for request in requests]
    outputs: dict[int, list[Any]] = {}
    for number, request in enumerate(requests):  # each joins one step after the one before
        request.submit(driver, number)
        for output in driver.step():
            outputs.setdefault(output.request_id, []).append(output)
    for number, more in driver.run().items():
        outputs.setdefault(number, []).extend(more)
    for number, alone in enumerate(expected):
        assert_close(final(outputs[number]), alone)


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 60, 3), np.uint8)
    return Image.fromarray(pixels)
