"""From a request to the arguments of a pipeline's call, by the names in the call's signature.

Rules
1. What a request asks for and the call cannot do is refused, with the name of the request's field: never left out.
2. Every number that a client chooses has bounds: pixels, steps and frames by the options, others by ``LARGEST``.
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

LARGEST = 10_000
"""The largest absolute value of a number in ``pipeline_kwargs``."""
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
NOT_SETTABLE = re.compile(r"height|width|per_prompt|batch_size|callback|output_type|return_dict|latents|embeds")
"""Arguments that are not for ``pipeline_kwargs``, besides those of ``OURS`` and all texts but prompts."""


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
        if params.size is not None:
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

    def _size(self, size: str) -> dict[str, int]:
        width, height = width_and_height(size)
        self._need("height", "size")
        self._need("width", "size")
        self._bounded("size", width * height, self._options.max_pixels)
        if width % self._multiple or height % self._multiple:
            message = f"size: {size}: width and height must be multiples of {self._multiple}"
            raise InvalidRequest(message, param="size")
        return {"width": width, "height": height}

    def _checked(self, name: str, value: Any) -> Any:
        """Return a value of ``pipeline_kwargs``. Raises InvalidRequest."""
        field = f"pipeline_kwargs.{name}"
        if name in OURS and name not in SCALES:
            raise InvalidRequest(f"{field}: set {OURS[name]!r} in its place", param="pipeline_kwargs")
        declared = self._taken.get(name)
        allowed = _scalars(declared.annotation) if declared is not None else set()
        if float in allowed:
            allowed.add(int)
        if "prompt" not in name:  # another text may name a file
            allowed.discard(str)
        if not allowed or NOT_SETTABLE.search(name):
            message = f"{field}: {self._name} takes no such number, boolean or text"
            raise InvalidRequest(message, param="pipeline_kwargs")
        if type(value) not in allowed:
            accepted = " or ".join(sorted(each.__name__ for each in allowed))
            raise InvalidRequest(f"{field}: expected {accepted}, found {value!r:.100}", param="pipeline_kwargs")
        if isinstance(value, str):
            self._bounded(field, len(value), PROMPT_CHARACTERS)
        elif not isinstance(value, bool):
            limits = {"frames": self._options.max_frames, "steps": self._options.max_steps}
            self._bounded(field, value, next((most for word, most in limits.items() if word in name), LARGEST))
        return value

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
