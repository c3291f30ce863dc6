"""The request parameters that all engines share that make pictures by denoising."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from omni_actors.stages.bounds import Priority, Seed

Size = Annotated[
    str, Meta(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$", max_length=11, description="a size such as '1024x768'")
]
"""Width and height of a picture in pixels, "1024x768", as in OpenAI's API."""
Steps = Annotated[int, Meta(ge=1, le=1000)]
Guidance = Annotated[float, Meta(ge=0, le=100)]
Strength = Annotated[float, Meta(gt=0, le=1)]


class ImageParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of a denoiser. None means what the stage's options or the model define."""

    size: Size | None = None
    """Width and height of the picture in pixels, as in "1024x768"."""
    steps: Steps | None = None
    """Denoising steps."""
    guidance: Guidance | None = None
    """How strongly the picture follows the prompt: the scale of classifier-free guidance, where 1 means none."""
    strength: Strength | None = None
    """The share of the input picture that noise replaces; 1 means all of it."""
    previews: Annotated[int, Meta(ge=0, le=1000)] = 0
    """The number of steps from one preview to the next; 0 means no previews."""
    progress: Annotated[int, Meta(ge=0, le=1000)] = 0
    """The number of steps from one report of progress, without a picture, to the next; 0 means no reports."""
    seed: Seed | None = None
    """The seed of the noise. Drawn if it is not given."""
    priority: Priority = 0
    """A waiting request with a lower number comes first in the engine."""


def width_and_height(size: str) -> tuple[int, int]:
    """Return the width and the height that a ``Size`` names, in pixels."""
    width, height = size.split("x")
    return int(width), int(height)


def follows(interval: int, step: int) -> bool:
    """Return whether an output that comes after every ``interval`` steps comes after this one. 0 means never."""
    return bool(interval) and step % interval == 0
