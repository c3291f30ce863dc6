"""The options and request parameters of the ``qwen_image`` engines."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from omni_actors.stages import bounds
from omni_actors.stages.adapters.options import Lora
from omni_actors.stages.diffusion.options import Guidance, ImageParams, Size, Steps, Strength

Scheduler: TypeAlias = Literal["euler", "euler_karras", "euler_exponential"]
"""Flow-matching Euler steps, with the noise levels that the model's configuration defines, or with those of Karras et
al. (2022), or exponential ones between the same ends."""


class DenoiserOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``qwen_image_denoiser``."""

    max_batch: bounds.Positive = 8
    """Rows of one step. A request has one, and a second one (its companion) if it has a negative prompt. Requests with
    fewer than twice as many rows share the steps, and more requests wait."""
    max_pixels: bounds.Positive = 2048 * 2048
    """The largest width times height of a picture. A request that asks for more is refused."""
    max_steps: bounds.Positive = 100
    """The most denoising steps of a request."""
    max_prompt: bounds.Positive = 1024
    """The most rows of a prompt's hidden states."""
    max_images: bounds.Positive = 3
    """The most input pictures of a request."""
    size: Size = "1024x1024"
    """The size of a picture whose request names none."""
    steps: Steps = 50
    """The steps of a request that names none."""
    guidance: Guidance = 4.0
    """The guidance of a request that names none. It takes effect with a negative prompt."""
    strength: Strength = 0.6
    """The strength of a request that begins with a picture and names none."""
    scheduler: Scheduler = "euler"
    """The scheduler of a request that names none."""
    dtype: bounds.Dtype = "float32"
    idle_loras: bounds.Count = 8
    """LoRA adapters whose weights stay in memory while no request uses them; pinned ones are not counted."""


class DenoiserParams(ImageParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``qwen_image_denoiser``."""

    scheduler: Scheduler | None = None
    """Which noise levels the steps go through; None means what the stage's options define."""
    lora: Lora | None = None
    """The LoRA adapter of the transformer to denoise with."""


class TextEncoderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``qwen_image_text_encoder``."""

    max_prompt: bounds.Positive = 1024
    """The most rows of a prompt's hidden states. A longer prompt is refused."""
    max_images: bounds.Positive = 3
    """The most pictures of a request, for a model that looks at them."""
    image_pixels: bounds.Positive = 64_000_000
    """Width times height of a picture, from its header, before it is decoded."""
    image_area: bounds.Positive | None = None
    """Pixels to which a picture is scaled; its aspect ratio stays. None: as the model was trained."""
    dtype: bounds.Dtype = "float32"


class TextEncoderParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``qwen_image_text_encoder``."""

    negative_prompt: Annotated[str, Meta(max_length=1_000_000)] | None = None
    """What the picture should not show. It takes effect with a guidance above 1."""
    guidance: Guidance | None = None
    """As in ``ImageParams``."""


class PictureEncoderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``qwen_image_vae_encoder``."""

    max_pixels: bounds.Positive = 2048 * 2048
    """The largest width times height to which a picture is scaled."""
    image_area: bounds.Positive = 1024 * 1024
    """Pixels to which a picture is scaled, unless the request has a ``size``; its aspect ratio stays."""
    max_images: bounds.Positive = 3
    """The most pictures of a request."""
    image_pixels: bounds.Positive = 64_000_000
    """Width times height of a picture, from its header, before it is decoded."""
    tiling: bool = False
    """Whether a large picture is encoded in overlapping tiles. They need less memory and give other values."""
    dtype: bounds.Dtype = "float32"


class PictureEncoderParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``qwen_image_vae_encoder``."""

    size: Size | None = None
    """As in ``ImageParams``."""
    seed: bounds.Seed | None = None
    """As in ``ImageParams``. A picture to start from is sampled with it."""


class PictureDecoderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``qwen_image_vae_decoder``."""

    max_pixels: bounds.Positive = 2048 * 2048
    """The largest width times height of a picture."""
    tiling: bool = False
    """Whether a large picture is decoded in overlapping tiles. They need less memory and give other values."""
    dtype: bounds.Dtype = "float32"
