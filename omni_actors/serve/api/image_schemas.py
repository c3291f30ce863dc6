"""The schemas of the image routes' bodies. ``schemas`` has the rules that hold for them too."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omni_actors.serve.api.schemas import ChoicesBody, Text

MAX_PICTURES = 10
"""OpenAI's own limit of ``n``."""
MAX_INPUT_PICTURES = 16
"""OpenAI's own limit of pictures to edit."""
MAX_PARTIAL_IMAGES = 3
"""OpenAI's own limit of previews of one picture."""


class ImageRequest(ChoicesBody, frozen=True, kw_only=True):
    """The body of /v1/images/generations."""

    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    n: Annotated[int, Meta(ge=1, le=MAX_PICTURES)] = 1
    """Pictures. With a seed, each has its own: seed, seed + 1, …"""
    size: str = "auto"
    """Width and height in pixels, as in "1024x768"; "auto" means the pipeline's default."""
    seed: int | None = None
    steps: int | None = None
    """Denoising steps."""
    guidance: float | None = None
    """How strongly a picture follows the prompt."""
    negative_prompt: str | None = None
    """What a picture must not show."""
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    """The quality of a picture as JPEG or WebP; 100 is the best."""
    response_format: Literal["b64_json"] = "b64_json"
    stream: bool = False
    partial_images: Annotated[int, Meta(ge=0, le=MAX_PARTIAL_IMAGES)] = 0
    """The most previews of each picture, in a stream."""
    background: Literal["auto", "opaque"] = "auto"
    quality: Literal["auto", "standard"] = "auto"
    moderation: Literal["auto", "low"] = "auto"


class ImageEditForm(ImageRequest, frozen=True, kw_only=True):
    """The fields of /v1/images/edits except the files. A form's values are strings."""

    strength: float | None = None
    """How much of the picture is replaced: above 0, up to 1, which replaces all of it."""


class ImageReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A picture that a JSON body names."""

    image_url: Text
    """A data: URL; an http(s) or file: URL where the server allows it."""


class ImageEditRequest(ImageEditForm, frozen=True, kw_only=True):
    """The body of /v1/images/edits as JSON."""

    images: Annotated[list[ImageReference], Meta(min_length=1, max_length=MAX_INPUT_PICTURES)]
