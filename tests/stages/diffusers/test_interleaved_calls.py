"""Pipelines whose calls change more than their scheduler: a picture does not depend on the calls beside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.guiders import AdaptiveProjectedMixGuidance

from omni_actors.stages.base import StageEngine
from tests.support.engine_driver import Driver
from tiny_models import diffusers_pipelines as tiny
from tiny_models import qwen_image

pytestmark = [
    pytest.mark.voice,  # it needs the libraries of an extra; the weights are random
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:__array__:DeprecationWarning"),  # of diffusers' own
]


def perturbed_attention() -> Any:
    """It replaces attention processors of its U-Net until the call ends."""
    components = tiny.stable_diffusion().components
    return diffusers.StableDiffusionPAGPipeline(**components, requires_safety_checker=False, pag_applied_layers=["mid"])


def guider() -> Any:
    """Its guider keeps a running average of the steps."""
    tokenizer = qwen_image.TOKENIZER
    config = transformers.T5Config(
        d_model=32,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        vocab_size=256,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return diffusers.HunyuanImagePipeline(
        transformer=diffusers.HunyuanImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=4,
            attention_head_dim=8,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=(1, 1),
            guidance_embeds=False,
            text_embed_dim=32,
            text_embed_2_dim=32,
            rope_axes_dim=(4, 4),
        ),
        vae=diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 64, 64, 64),
            layers_per_block=1,
            scaling_factor=0.5,
            spatial_compression_ratio=8,
            sample_size=128,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=qwen_image.text_encoder(),
        text_encoder_2=transformers.T5EncoderModel(config),
        tokenizer=tokenizer,
        tokenizer_2=transformers.ByT5Tokenizer(),
        guider=AdaptiveProjectedMixGuidance(),
        ocr_guider=AdaptiveProjectedMixGuidance(),
    )


def combined() -> Any:
    """It is made of two pipelines, of which the second one denoises with a scheduler of its own."""
    tokenizer, small = tiny._clip_tokenizer(), {"hidden_size": 32, "projection_dim": 32, "intermediate_size": 37}
    prior = diffusers.PriorTransformer(num_attention_heads=2, attention_head_dim=12, embedding_dim=32, num_layers=1)
    prior.clip_std = torch.nn.Parameter(torch.ones_like(prior.clip_std))
    return diffusers.KandinskyV22CombinedPipeline(
        unet=diffusers.UNet2DConditionModel(
            in_channels=4,
            out_channels=8,
            addition_embed_type="image",
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            block_out_channels=(32, 64),
            layers_per_block=1,
            encoder_hid_dim=32,
            encoder_hid_dim_type="image_proj",
            cross_attention_dim=32,
            attention_head_dim=4,
            resnet_time_scale_shift="scale_shift",
        ),
        movq=diffusers.VQModel(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
            up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=8,
            norm_type="spatial",
            num_vq_embeddings=12,
            vq_embed_dim=4,
        ),
        scheduler=diffusers.DDPMScheduler(variance_type="learned_range", clip_sample=False),
        prior_prior=prior,
        prior_image_encoder=transformers.CLIPVisionModelWithProjection(
            transformers.CLIPVisionConfig(
                **small, image_size=28, num_attention_heads=4, num_hidden_layers=2, patch_size=14
            )
        ),
        prior_text_encoder=transformers.CLIPTextModelWithProjection(
            transformers.CLIPTextConfig(**small, num_attention_heads=4, num_hidden_layers=2, vocab_size=len(tokenizer))
        ),
        prior_tokenizer=tokenizer,
        prior_scheduler=diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0
        ),
        prior_image_processor=transformers.CLIPImageProcessor(),
    )


class Call(NamedTuple):
    prompt: str
    seed: int
    steps: int
    more: dict[str, Any]


PRIOR = {"pipeline_kwargs": {"prior_num_inference_steps": 3}}
PIPELINES: dict[Callable[[], Any], list[Call]] = {
    perturbed_attention: [
        Call("a cat", 1, 8, {}),
        Call("a dog", 2, 8, {"pipeline_kwargs": {"pag_scale": 0.0}}),
        Call("a ship", 3, 3, {}),
    ],
    guider: [Call("a cat", 1, 10, {}), Call("a dog", 2, 10, {"size": "128x64"}), Call("a ship", 3, 6, {})],
    combined: [Call("a cat", 1, 8, {"guidance": 4.0, **PRIOR}), Call("a dog", 2, 5, {"guidance": 1.5, **PRIOR})],
}


@pytest.fixture(
    params=[
        pytest.param(make, id=make.__name__, marks=() if make is perturbed_attention else pytest.mark.slow)
        for make in PIPELINES
    ]
)
def opened(
    request: pytest.FixtureRequest, open_stage: Callable[..., StageEngine], tmp_path: Path
) -> Iterator[tuple[StageEngine, list[Call]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        request.param().save_pretrained(tmp_path)
        with closing(open_stage("diffusers", tmp_path)) as engine:
            yield engine, PIPELINES[request.param]


def begin(driver: Driver, number: int, call: Call) -> None:
    driver.start(number, seed=call.seed, steps=call.steps, **{"size": "64x64", **call.more})
    driver.feed(number, {"messages": [{"role": "user", "content": call.prompt}]}, last=True)


def pictures(driver: Driver, calls: list[Call]) -> list[np.ndarray[Any, Any]]:
    for number, call in enumerate(calls):
        begin(driver, number, call)
    outputs = driver.run()
    return [outputs[number][-1].tensors["image"] for number in range(len(calls))]


def test_pictures_are_those_of_each_call_alone(opened: tuple[StageEngine, list[Call]], drive: Any) -> None:
    engine, calls = opened
    driver = drive(engine)
    alone = [pictures(driver, [call])[0] for call in calls]
    for order in (calls, calls[::-1]):
        together = dict(zip([call.prompt for call in order], pictures(driver, order), strict=True))
        for call, expected in zip(calls, alone, strict=True):
            np.testing.assert_array_equal(together[call.prompt], expected)
    begin(driver, 9, calls[0])
    driver.step()
    driver.step()
    driver.abort(9)
    for call, expected in zip(calls, alone, strict=True):
        np.testing.assert_array_equal(pictures(driver, [call])[0], expected)
