"""Options and request parameters of the BAGEL engines."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omni_actors.stages import bounds
from omni_actors.stages.adapters.options import Lora
from omni_actors.stages.autoregressive.options import TextOptions, TextParams
from omni_actors.stages.diffusion.options import Guidance, ImageParams, Size

Renorm = Literal["global", "channel", "text_channel"]
Time = Annotated[float, Meta(ge=0, le=1)]
Shift = Annotated[float, Meta(gt=0, le=100)]

GUIDANCE = 4.0
IMAGE_GUIDANCE_OF_EDIT = 2.0
"""Without a picture in the request, there is no image guidance by default."""


class ContextOptions(TextOptions, frozen=True, forbid_unknown_fields=True):
    """The options of ``bagel_context``."""

    size: Size | None = None
    """The size of a picture that no request names; by default 1024x1024, or the largest that the model draws."""


class DenoiserOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``bagel_denoiser``."""

    max_batch: bounds.Positive = 8
    """Requests of one step. One less than twice as many share the steps, and more requests wait."""
    dtype: bounds.Dtype = "float32"
    steps: Annotated[int, Meta(ge=1, le=1000)] = 49
    """Denoising steps of a request that does not name them. (The authors count the 50 times between them.)"""
    idle_loras: bounds.Count = 8
    """LoRA adapters whose weights stay in memory while no request uses them; pinned ones are not counted."""


class OneStageOptions(ContextOptions, frozen=True, forbid_unknown_fields=True):
    """The options of ``bagel``, which has both parts in one worker."""

    steps: Annotated[int, Meta(ge=1, le=1000)] = 49
    """As in ``DenoiserOptions``."""


class ContextParams(TextParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``bagel_context``. Those of ``TextParams`` are for the text that the model writes."""

    size: Size | None = None
    """Width and height of the picture, multiples of 16 pixels. By default that of the last picture of the request, as
    the model resizes it."""
    guidance: Guidance | None = None
    """The scale of text guidance: how much the last text of the request counts; 1 means no guidance at all."""
    image_guidance: Guidance | None = None
    """The scale of image guidance: how much the pictures of the request count; 1 means none."""
    think: bool = False
    """Whether the model writes a text before it draws. A system message should ask for it."""


class DenoiserParams(ImageParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``bagel_denoiser``. None means what the authors use for the kind of request."""

    image_guidance: Guidance | None = None
    """As in ``ContextParams``."""
    guidance_from: Time | None = None
    """Guidance applies to times above this and up to ``guidance_to``; time runs from 1 (noise) to 0."""
    guidance_to: Time = 1.0
    renorm: Renorm | None = None
    """How guidance is scaled back to the norm of the prediction without it: over the whole picture, for each token, or
    for each token after text guidance alone."""
    renorm_min: Time = 0.0
    """The least factor of that scaling."""
    shift: Shift = 3.0
    """How much the steps crowd towards the noise."""
    lora: Lora | None = None
    """The LoRA adapter of this request. Requests with different adapters are computed one after the other in a step."""


class OneStageParams(ContextParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``bagel``: those of both parts."""

    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    previews: Annotated[int, Meta(ge=0, le=1000)] = 0
    progress: Annotated[int, Meta(ge=0, le=1000)] = 0
    guidance_from: Time | None = None
    guidance_to: Time = 1.0
    renorm: Renorm | None = None
    renorm_min: Time = 0.0
    shift: Shift = 3.0


def guidances(params: ContextParams | DenoiserParams, *, edits: bool) -> tuple[float, float]:
    """Return the scales of text and of image guidance. edits: whether the request has a picture.

    Image guidance applies to requests with text guidance only, as in the authors' code.
    """
    text = GUIDANCE if params.guidance is None else params.guidance
    default = IMAGE_GUIDANCE_OF_EDIT if edits else 1.0
    image = default if params.image_guidance is None else params.image_guidance
    return text, image if text > 1 else 1.0
