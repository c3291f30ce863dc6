"""Previews that cannot be decoded cost a request its previews only; and a call that scales to an area of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from omni_actors.stages.base import InvalidRequest, StageEngine
from omni_actors.stages.diffusers.pictures import Previews
from tests.support.engine_driver import Driver
from tiny_models import diffusers_pipelines as tiny

pytestmark = [
    pytest.mark.voice,  # it needs the libraries of an extra; the weights are random
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:__array__:DeprecationWarning"),  # of diffusers' own
]
PIXELS = 64 * 64
"""``max_pixels`` of the engines."""


def animate_diff() -> Any:
    """Its latents are those of a video, its VAE is that of a picture."""
    image = tiny.stable_diffusion()
    channels = tuple(image.unet.config.block_out_channels)
    adapter = diffusers.MotionAdapter(
        block_out_channels=channels,
        motion_layers_per_block=1,
        motion_norm_num_groups=min(channels),
        motion_num_attention_heads=2,
        motion_max_seq_length=16,
        use_motion_mid_block=False,
    )
    parts = {name: getattr(image, name) for name in ("vae", "text_encoder", "tokenizer", "unet", "scheduler")}
    return diffusers.AnimateDiffPipeline(**parts, motion_adapter=adapter)


def flux_kontext() -> Any:
    """Its call scales width and height to ``max_area`` pixels, a megapixel by default."""
    flux = tiny.flux()
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,) * 4,  # as deep as the real one: a pixel of the latents is 8 × 8 of the picture
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=2,
        shift_factor=0.06,
    )
    return diffusers.FluxKontextPipeline(**{**flux.components, "vae": vae})


@pytest.fixture(scope="module")
def engine_of(
    tmp_path_factory: pytest.TempPathFactory, open_stage: Callable[..., StageEngine]
) -> Iterator[Callable[[Callable[[], Any]], StageEngine]]:
    made: dict[Any, StageEngine] = {}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def get(make: Callable[[], Any]) -> StageEngine:
            if make not in made:
                torch.manual_seed(0)
                directory: Path = tmp_path_factory.mktemp(make.__name__)
                make().save_pretrained(directory)
                made[make] = stack.enter_context(closing(open_stage("diffusers", directory, max_pixels=PIXELS)))
            return made[make]

        yield get


def ask(driver: Driver, number: int, **params: Any) -> None:
    driver.start(number, seed=number, steps=3, **params)
    driver.feed(number, {"messages": [{"role": "user", "content": "a cat"}]}, last=True)


def shapes(outputs: list[Any]) -> list[Any]:
    """Return the shape of each output's picture, or None."""
    return [output.tensors["image"].shape[:2] if output.tensors else None for output in outputs]


VIDEO: dict[str, Any] = {"size": "32x16", "pipeline_kwargs": {"num_frames": 2}}


def test_a_pipeline_without_a_preview_sends_progress_in_its_place(
    engine_of: Callable[..., StageEngine], drive: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = drive(engine_of(animate_diff))
    capfd.readouterr()
    ask(driver, 1, **VIDEO)
    ask(driver, 2, **VIDEO, previews=1)
    ask(driver, 3, **VIDEO, previews=1)
    outputs = driver.run()
    for number in (2, 3):
        assert [output.data["step"] for output in outputs[number]] == [1, 2, 3, 3]
        assert shapes(outputs[number]) == [None, None, (16, 32), (16, 32)]
    alone = [np.array(each.tensors["image"]) for each in outputs[1]]
    ask(driver, 1, **VIDEO, previews=1)
    for expected, output in zip(alone, driver.run()[1][2:], strict=True):
        assert np.array_equal(output.tensors["image"], expected)
    printed = capfd.readouterr().err
    assert printed.count("AnimateDiffPipeline: latents (1, 4, 2, 8, 16) have no preview") == 1
    assert printed.count("Traceback") == 1


def test_what_fails_one_requests_preview_leaves_those_of_others(
    engine_of: Callable[..., StageEngine], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, failing = Previews.decode, [True, False, False]

    def fail_first(*given: Any) -> Any:
        if failing.pop(0):
            raise ValueError("latents of another form")
        return decode(*given)

    monkeypatch.setattr(Previews, "decode", fail_first)
    driver = drive(engine_of(flux_kontext))
    ask(driver, 1, size="64x32", previews=1)
    assert shapes(driver.run()[1]) == [None, None, (32, 64)]
    ask(driver, 2, size="64x32", previews=1)
    assert shapes(driver.run()[2]) == [(32, 64)] * 3


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("no memory"),
        torch.AcceleratorError("the device is lost"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_lack_of_memory_and_a_lost_device_end_the_worker(
    error: Exception, engine_of: Callable[..., StageEngine], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Previews, "decode", fail)
    driver = drive(engine_of(flux_kontext))
    ask(driver, 1, size="64x32", previews=1)
    with pytest.raises(type(error)):
        driver.run()
    driver.abort(1)


@pytest.mark.parametrize("size", ["64x64", "64x32", "16x256", "112x32", None])
def test_a_call_that_scales_to_an_area_makes_the_size_that_was_asked_for(
    size: str | None, engine_of: Callable[..., StageEngine], drive: Any
) -> None:
    """Without a size, the limit binds. Previews have the size of the picture."""
    driver = drive(engine_of(flux_kontext))
    ask(driver, 1, **({} if size is None else {"size": size}), previews=1)
    width, height = map(int, (size or "64x64").split("x"))
    assert shapes(driver.run()[1]) == [(height, width)] * 3


def test_a_size_that_such_a_call_would_round_is_refused(engine_of: Callable[..., StageEngine], drive: Any) -> None:
    driver = drive(engine_of(flux_kontext))
    for size, reason in (("56x64", "multiples of 16"), ("80x64", "the limit is 4096")):
        with pytest.raises(InvalidRequest, match=reason) as refused:
            ask(driver, 1, size=size)
        assert refused.value.param == "size"
        driver.live.discard(1)
