"""The numbers of ``pipeline_kwargs``: each has bounds, or is refused. The signatures are those of diffusers."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import pytest

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.diffusers.arguments import BOUNDS, Arguments
from omni_actors.stages.diffusers.options import DiffusersOptions, DiffusersParams

pytestmark = pytest.mark.voice  # it needs the libraries of an extra
OPTIONS = DiffusersOptions(max_steps=40, max_frames=20)


def arguments_of(pipeline: str) -> Arguments:
    """Return what makes the arguments of a pipeline that has no modules."""
    made = object.__new__(getattr(diffusers, pipeline))
    return Arguments(made, OPTIONS)


def made(pipeline: str, name: str, value: Any) -> Any:
    """Return what becomes of one argument in ``pipeline_kwargs``."""
    return arguments_of(pipeline).make(DiffusersParams(pipeline_kwargs={name: value}), "a cat", [])[name]


@pytest.mark.parametrize(
    ("pipeline", "name", "least", "most"),
    [
        ("WanPipeline", "num_frames", 1, 20),
        ("SanaVideoPipeline", "frames", 1, 20),
        ("LattePipeline", "video_length", 1, 20),
        ("LattePipeline", "decode_chunk_size", 1, 16),
        ("WanPipeline", "max_sequence_length", 1, 512),
        ("PixArtAlphaPipeline", "max_sequence_length", 1, 512),
        ("LTX2Pipeline", "max_sequence_length", 1, 1024),  # its own default
        ("PRXPipeline", "tokenizer_max_length", 1, 512),
        ("KandinskyCombinedPipeline", "prior_num_inference_steps", 1, 40),
        ("LatentConsistencyModelPipeline", "original_inference_steps", 1, 40),
        ("StableDiffusionXLPipeline", "clip_skip", 0, 32),
        ("StableDiffusionXLPipeline", "eta", 0, 1),
        ("StableDiffusionXLPipeline", "denoising_end", 0, 1),
        ("StableDiffusion3Pipeline", "mu", -10, 10),
        ("FluxPipeline", "guidance_scale", 0, 100),
        ("FluxPipeline", "true_cfg_scale", 0, 100),
        ("WanPipeline", "guidance_scale_2", 0, 100),
        ("LTXPipeline", "frame_rate", 8, 120),
    ],
)
def test_a_number_of_a_pipeline_has_bounds(pipeline: str, name: str, least: int, most: int) -> None:
    assert (made(pipeline, name, least), made(pipeline, name, most)) == (least, most)
    for wrong in (least - 1, most + 1, 10_000, -10_000, 10**30):
        with pytest.raises(InvalidRequest, match=f"{name}: expected a number from {least} to {most}") as refused:
            made(pipeline, name, wrong)
        assert refused.value.param == "pipeline_kwargs"


@pytest.mark.parametrize(
    ("pipeline", "name"),
    [
        ("QwenImage21Pipeline", "output_resolution"),
        ("QwenImageLayeredPipeline", "resolution"),
        ("FluxKontextPipeline", "max_area"),
        ("OmniGenPipeline", "max_input_image_size"),
        ("WanPipeline", "height"),
    ],
)
def test_a_number_of_pixels_is_the_size(pipeline: str, name: str) -> None:
    for value in (1, 64, 10_000):
        with pytest.raises(InvalidRequest, match=f"{name}: set 'size' in its place") as refused:
            made(pipeline, name, value)
        assert refused.value.param == "pipeline_kwargs"


@pytest.mark.parametrize("pipeline", ["FluxKontextPipeline", "FluxKontextInpaintPipeline"])
def test_an_area_to_which_a_call_scales_is_that_of_the_size(pipeline: str) -> None:
    """Without a size it is the call's own, or ``max_pixels`` if that is less."""
    for size, limit, area in (("64x32", 2048**2, 2048), (None, 2048**2, 1024**2), (None, 512**2, 512**2)):
        making = Arguments(object.__new__(getattr(diffusers, pipeline)), DiffusersOptions(max_pixels=limit))
        assert making.make(DiffusersParams(size=size), "a cat", [])["max_area"] == area
    assert "max_area" not in arguments_of("FluxPipeline").make(DiffusersParams(size="64x32"), "a cat", [])


@pytest.mark.parametrize(
    ("pipeline", "name"),
    [
        ("QwenImageLayeredPipeline", "layers"),
        ("HeliosPipeline", "num_latent_frames_per_chunk"),
        ("SkyReelsV2DiffusionForcingPipeline", "base_num_frames"),
        ("LTX2Pipeline", "prompt_max_new_tokens"),
        ("LTX2Pipeline", "max_seconds"),
        ("StableDiffusionPipeline", "num_images_per_prompt"),
        ("StableDiffusionPipeline", "return_dict"),
    ],
)
def test_what_has_no_bounds_is_refused(pipeline: str, name: str) -> None:
    for value in (1, True):
        with pytest.raises(InvalidRequest, match=f"{name}: {pipeline} has no such argument") as refused:
            made(pipeline, name, value)
        assert refused.value.param == "pipeline_kwargs"


def test_booleans_and_texts_of_prompts_need_no_bounds_of_numbers() -> None:
    assert made("PixArtAlphaPipeline", "use_resolution_binning", False) is False
    assert made("FluxKontextPipeline", "_auto_resize", False) is False
    assert made("FluxPipeline", "prompt_2", "a dog") == "a dog"


def test_a_number_that_is_not_finite_is_refused() -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidRequest, match="eta: expected a number from 0 to 1"):
            made("StableDiffusionPipeline", "eta", value)


def test_every_bound_is_small() -> None:
    assert all(least < most <= 1000 for least, most in BOUNDS.values())
