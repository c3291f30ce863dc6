"""From a request to the arguments of a pipeline's call, by the names in the call's signature.

Rules
1. What a request asks for and the call cannot do is refused, with the name of the request's field: never left out.
2. Every number that a client chooses has bounds: pixels, steps and frames by the options, others in ``BOUNDS``. A
   number that has none is refused, because it may cost any amount of memory or time.
3. One call makes one picture, or one video.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from PIL.Image import Image

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.diffusers.options import PROMPT_CHARACTERS, DiffusersOptions, DiffusersParams
from omni_actors.stages.diffusion.options import width_and_height

OURS = {
    "num_inference_steps": "steps",
    "height": "size",
    "width": "size",
    "negative_prompt": "negative_prompt",
    "strength": "strength",
    "guidance_scale": "guidance",
    "true_cfg_scale": "guidance",
    "image": "image",
    "prompt": "messages",
}
"""Argument of a pipeline to the field of a request."""
SCALES = ("guidance_scale", "true_cfg_scale")
"""Arguments of ``OURS`` that ``pipeline_kwargs`` may set too: a pipeline may have both scales."""
PIXELS = ("max_area", "max_input_image_size", "output_resolution", "resolution")
"""Arguments that count pixels, or are the side of a square. A request has ``size`` in their place."""
NOT_SETTABLE = re.compile(r"return_dict|latents|embeds")
"""Booleans and texts that are not for ``pipeline_kwargs``, besides those of ``OURS`` and all texts but prompts."""
FRAMES = ("num_frames", "frames", "video_length")
STEPS = (
    "prior_num_inference_steps",
    "decoder_num_inference_steps",
    "super_res_num_inference_steps",
    "original_inference_steps",
)
SEQUENCES = ("max_sequence_length", "tokenizer_max_length")
SEQUENCE = 512
"""The most tokens to which a request may let a prompt be padded, if the call's own default is not larger."""
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("guidance_scale", "true_cfg_scale", "guidance_scale_2", "distilled_guidance_scale"), (0, 100)),
    **dict.fromkeys(("prior_guidance_scale", "decoder_guidance_scale", "audio_guidance_scale"), (0, 100)),
    **dict.fromkeys(("image_guidance_scale", "img_guidance_scale", "skip_layer_guidance_scale"), (0, 100)),
    **dict.fromkeys(("pag_scale", "pag_adaptive_scale", "stg_scale", "modality_scale"), (0, 100)),
    **dict.fromkeys(("eta", "guidance_rescale", "cfg_truncation", "cfg_trunc_ratio"), (0, 1)),
    **dict.fromkeys(("denoising_start", "denoising_end"), (0, 1)),
    **dict.fromkeys(("skip_layer_guidance_start", "skip_layer_guidance_stop"), (0, 1)),
    **dict.fromkeys(("decode_timestep", "decode_noise_scale", "image_cond_noise_scale"), (0, 1)),
    **dict.fromkeys(("aesthetic_score", "negative_aesthetic_score"), (0, 10)),
    **dict.fromkeys(("fps", "frame_rate", "target_fps"), (8, 120)),  # fewer per second: more sound for the frames
    "clip_skip": (0, 32),
    "decode_chunk_size": (1, 16),  # frames that are decoded at a time
    "mu": (-10, 10),
    "noise_level": (0, 1000),
    "num_temporal_reasoning_steps": (0, 100),
}
"""The least and the largest value of a number in ``pipeline_kwargs``, by its argument."""


class Arguments:
    """Makes the arguments of one pipeline's calls."""

    def __init__(self, pipeline: Any, options: DiffusersOptions) -> None:
        self._name, self._options = type(pipeline).__name__, options
        self._taken = inspect.signature(type(pipeline).__call__).parameters
        self._multiple = _multiple(pipeline)

    def takes(self, name: str) -> bool:
        """Return whether the call has an argument of this name."""
        return name in self._taken

    def make(self, params: DiffusersParams, prompt: str, images: Sequence[Image]) -> dict[str, Any]:
        """Return the arguments for a request. Raises InvalidRequest (rules 1 and 2)."""
        more = {name: self._checked(name, value) for name, value in params.pipeline_kwargs.items()}
        arguments: dict[str, Any] = {"prompt": prompt, **more}
        if images:
            self._need("image", "image")
            arguments["image"] = images[0] if len(images) == 1 else list(images)
        arguments |= self._size(params.size)
        if params.steps is not None:
            self._bounded("steps", params.steps, self._options.max_steps)
            arguments[self._need("num_inference_steps", "steps")] = params.steps
        if params.strength is not None:
            arguments[self._need("strength", "strength")] = params.strength
        return arguments | self._guidance(params)

    def _guidance(self, params: DiffusersParams) -> dict[str, Any]:
        """Guidance by a second forward may be ``true_cfg_scale``, beside a scale that the model was distilled for."""
        distilled, true_scale = self._taken.get("guidance_scale"), self._taken.get("true_cfg_scale")
        by_true_scale = true_scale is not None and (
            params.negative_prompt is not None or distilled is None or distilled.default is None
        )
        arguments: dict[str, Any] = {}
        if params.guidance is not None:
            name = self._need("true_cfg_scale" if by_true_scale else "guidance_scale", "guidance")
            arguments[name] = params.guidance
        if params.negative_prompt is not None:
            arguments[self._need("negative_prompt", "negative_prompt")] = params.negative_prompt
            if true_scale is not None:
                scales = (params.guidance, params.pipeline_kwargs.get("true_cfg_scale"), true_scale.default)
                self._need_guidance(next(scale for scale in scales if scale is not None))
        return arguments

    def _need_guidance(self, scale: float) -> None:
        if scale <= 1:
            message = f"guidance: {self._name} uses a negative prompt with a guidance above 1 only"
            raise InvalidRequest(message, param="guidance")

    def _size(self, size: str | None) -> dict[str, int]:
        """Return the arguments for a size. Raises InvalidRequest. size: None means the call's own.

        A call with ``max_area`` scales width and height to so many pixels.
        """
        area = self._taken.get("max_area")
        if size is None:
            return {} if area is None else {"max_area": min(area.default, self._options.max_pixels)}
        width, height = width_and_height(size)
        self._need("height", "size")
        self._need("width", "size")
        self._bounded("size", width * height, self._options.max_pixels)
        if width % self._multiple or height % self._multiple:
            message = f"size: {size}: width and height must be multiples of {self._multiple}"
            raise InvalidRequest(message, param="size")
        scaled = {} if area is None else {"max_area": width * height}
        return {"width": width, "height": height, **scaled}

    def _checked(self, name: str, value: Any) -> Any:
        """Return a value of ``pipeline_kwargs``. Raises InvalidRequest."""
        field = f"pipeline_kwargs.{name}"
        if (name in OURS and name not in SCALES) or name in PIXELS:
            raise InvalidRequest(f"{field}: set {OURS.get(name, 'size')!r} in its place", param="pipeline_kwargs")
        bounds = self._bounds(name)
        allowed = self._types(name, numbers=bounds is not None)
        if not allowed:
            message = f"{field}: {self._name} has no such argument, or a request may not set it"
            raise InvalidRequest(message, param="pipeline_kwargs")
        if type(value) not in allowed:
            accepted = " or ".join(sorted(each.__name__ for each in allowed))
            raise InvalidRequest(f"{field}: expected {accepted}, found {value!r:.100}", param="pipeline_kwargs")
        if isinstance(value, str):
            self._bounded(field, len(value), PROMPT_CHARACTERS)
        elif bounds is not None and not isinstance(value, bool) and not bounds[0] <= value <= bounds[1]:  # NaN too
            message = f"{field}: expected a number from {bounds[0]} to {bounds[1]}, found {value}"
            raise InvalidRequest(message, param="pipeline_kwargs")
        return value

    def _types(self, name: str, *, numbers: bool) -> set[type]:
        """Return the types of what a request may set an argument to. numbers: whether the argument has bounds."""
        declared = self._taken.get(name)
        if declared is None or NOT_SETTABLE.search(name):
            return set()
        allowed = _scalars(declared.annotation)
        if float in allowed:
            allowed.add(int)
        if not numbers:
            allowed -= {int, float}
        if "prompt" not in name:  # another text may name a file
            allowed.discard(str)
        return allowed

    def _bounds(self, name: str) -> tuple[float, float] | None:
        """Return the least and the largest value of a number; None if a request may not set it."""
        if name in FRAMES:
            return 1, self._options.max_frames
        if name in STEPS:
            return 1, self._options.max_steps
        if name in SEQUENCES:
            default = self._taken[name].default if name in self._taken else None
            return 1, max(SEQUENCE, default if isinstance(default, int) else 0)
        return BOUNDS.get(name)

    def _need(self, name: str, field: str) -> str:
        """Return ``name`` if the call has it. Raises InvalidRequest: the request's ``field`` has no use here."""
        if name not in self._taken:
            raise InvalidRequest(f"{field}: {self._name} takes no {name}", param=field)
        return name

    def _bounded(self, field: str, found: float, most: int) -> None:
        if not math.isfinite(found) or abs(found) > most:
            message = f"{field}: found {found}; the limit is {most}"
            raise InvalidRequest(message, param=field.partition(".")[0])


def blamed(error: InvalidRequest) -> InvalidRequest:
    """Return the refusal of a request by its pipeline, with the field that the pipeline's words name, if they do."""
    if error.param is None:
        error.param = next((field for name, field in OURS.items() if name in str(error)), None)
    return error


def _multiple(pipeline: Any) -> int:
    """Return what width and height must be multiples of, as far as the pipeline's processor says."""
    for name in ("video_processor", "image_processor"):
        config = getattr(getattr(pipeline, name, None), "config", None)
        if isinstance(factor := getattr(config, "vae_scale_factor", None), int):
            return factor
    return 1


def _scalars(annotation: Any) -> set[type]:
    """Return which of int, float, bool and str an annotation allows."""
    if annotation in (int, float, bool, str):
        return {annotation}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*map(_scalars, typing.get_args(annotation)))
    return set()
