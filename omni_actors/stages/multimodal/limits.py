"""How much of each kind of input a request may bring. What goes past it is refused before it costs much."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: Positive = 32768
    """Of the whole prompt, those that stand for sound, images and videos included."""
    audio_s: Seconds = 600.0
    """Of all recordings together, the sound of videos included where it is heard."""
    image_pixels: Positive = 64_000_000
    """Width × height of one image, as its header says, before it is decoded."""
    video_pixels: Positive = 4096 * 2304
    """Width × height of one video's frames."""
    video_s: Seconds = 600.0
    """Of one video."""
    video_frames: Positive = 768
    """Of one video, after sampling."""
    video_fps: Annotated[float, Meta(gt=0, le=60)] = 2.0
    """Frames kept of each second of a video that has more."""
    decode_s: Seconds = 20.0
    """Wall time that decoding one video file may take."""
