"""Limits on the media of one request. An input beyond a limit is refused before it costs much."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from omni_actors.stages.bounds import Positive, PositiveSeconds


class MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one request."""

    tokens: Positive = 32768
    """Tokens of the whole prompt, including those for sound, images and videos."""
    audio_s: PositiveSeconds = 600.0
    """Seconds of all recordings together, including the sound of videos if it is used."""
    image_pixels: Positive = 64_000_000
    """Width × height of one image, from its header, before it is decoded."""
    video_pixels: Positive = 4096 * 2304
    """Width × height of one video's frames."""
    video_s: PositiveSeconds = 600.0
    """Seconds of one video."""
    video_frames: Positive = 768
    """Frames of one video, after sampling."""
    video_fps: Annotated[float, Meta(gt=0, le=60)] = 2.0
    """Sampled frames for each second of a video with a higher rate."""
    decode_s: PositiveSeconds = 20.0
    """Wall time for decoding one video file."""
