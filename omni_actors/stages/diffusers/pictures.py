"""From a pipeline's latents and results to pictures: uint8 (height, width, 3)."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.refusal import ends_worker

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
PACKED = ["latents", "height", "width", "vae_scale_factor"]
"""The arguments of the function with which FLUX and its kin bring latents into the form of a picture."""


class Pictures(Sequence[Pixels]):
    """What a pipeline's call returned: one picture, or the frames of a video, each converted when it is read.

    result: of a call with ``output_type="np"``. Raises InvalidRequest: these are no pictures, or not finite.
    """

    def __init__(self, result: Any) -> None:
        if any(getattr(result, "nsfw_content_detected", None) or ()):
            raise InvalidRequest("the pipeline's safety checker withholds the picture", code="content_filtered")
        made = np.asarray(next(iter(result.values()))[0])
        self.is_video = made.ndim == 4
        if made.ndim not in (3, 4) or made.shape[-1] != 3 or not np.issubdtype(made.dtype, np.floating):
            raise InvalidRequest(f"the pipeline made no picture: {made.dtype} {made.shape}", code="unprocessable_input")
        if not np.isfinite(made).all():
            raise InvalidRequest("the picture is not finite: the model overflowed", code="output_not_finite")
        self._values = made if self.is_video else made[None]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return _pixels(self._values[index])


class Previews:
    """Decodes the latents of a step with the pipeline's VAE, as the pipeline decodes those of the last one.

    Rules
    1. Where a safety checker would be passed by, or the form of the latents is known to be another, there are none.
    2. The form may prove to be another one when a picture is decoded. That costs the request its previews only.
    """

    def __init__(self, pipeline: Any) -> None:
        self._unpack = getattr(pipeline, "_unpack_latents", None)
        is_packed = self._unpack is not None and list(inspect.signature(self._unpack).parameters) == PACKED
        vae = getattr(pipeline, "vae", None)
        self._channels = _setting(vae, "z_dim") or _setting(vae, "latent_channels")
        shows_all = getattr(pipeline, "safety_checker", None) is None
        self.possible = self._channels is not None and shows_all and (self._unpack is None or is_packed)
        """Whether rule 1 allows them."""
        self._has_failed = False
        """Whether rule 2 has applied, which is printed once."""

    def try_decode(self, pipeline: Any, latents: torch.Tensor, arguments: Mapping[str, Any]) -> Pixels | None:
        """Return what ``decode`` returns, or None if it fails for another reason than the worker's own state.

        Raises MemoryError and the like (``refusal.ends_worker``).
        """
        try:
            return self.decode(pipeline, latents, arguments)
        except Exception as error:
            if ends_worker(error):
                raise
            if not self._has_failed:
                traceback.print_exception(error)
                name, shape = type(pipeline).__name__, tuple(latents.shape)
                print(f"{name}: latents {shape} have no preview; their requests go on", file=sys.stderr, flush=True)
            self._has_failed = True
            return None

    def decode(self, pipeline: Any, latents: torch.Tensor, arguments: Mapping[str, Any]) -> Pixels:
        """Return the picture of ``latents``, (1, …); of a video the first frame. arguments: of the pipeline's call.

        Raises any exception: the latents have another form.
        """
        vae = pipeline.vae
        if self._unpack is not None:
            side = getattr(pipeline, "default_sample_size", 0) * pipeline.vae_scale_factor
            if "max_area" in arguments:
                side = round(arguments["max_area"] ** 0.5)  # to which the call scales its square
            height, width = (arguments.get(name) or side for name in ("height", "width"))
            latents = self._unpack(latents, height, width, pipeline.vae_scale_factor)
        if latents.shape[1] != self._channels:
            raise ValueError(f"latents of {self._channels} channels were expected, not {tuple(latents.shape)}")
        latents = latents[:, :, :1] if latents.ndim == 5 else latents
        latents = latents.to(vae.device, vae.dtype)
        shape = (1, -1) + (1,) * (latents.ndim - 2)
        mean, deviation = (_setting(vae, name) for name in ("latents_mean", "latents_std"))
        scaled = latents / (_setting(vae, "scaling_factor") or 1)
        if mean is not None and deviation is not None:
            scaled = scaled * latents.new_tensor(deviation).view(shape) + latents.new_tensor(mean).view(shape)
        decoded = vae.decode(scaled + (_setting(vae, "shift_factor") or 0), return_dict=False)[0]
        picture = decoded[0, :, 0] if decoded.ndim == 5 else decoded[0]
        values = (picture.float() / 2 + 0.5).nan_to_num().clamp(0, 1)
        return _pixels(values.permute(1, 2, 0).cpu().numpy())


def _setting(module: Any, name: str) -> Any:
    return getattr(getattr(module, "config", None), name, None)


def _pixels(values: np.ndarray[Any, Any]) -> Pixels:
    """Return pixels for values in [0, 1], rounded as diffusers rounds them."""
    return (values * 255).round().astype(np.uint8)
