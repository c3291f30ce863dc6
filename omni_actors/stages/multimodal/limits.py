"""Limits on the media of one request. An input beyond a limit is refused before it costs much."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta

from omni_actors.stages.base import InvalidRequest
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
    """Wall time for decoding the media of one request."""


class Deadline:
    """The end of the time for decoding the media of one request. seconds: from now on."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """The seconds until then, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def check(self, kind: str, index: int) -> None:
        """Raise InvalidRequest if the time is over. kind, index: the input that is being decoded, such as "image" 0."""
        if time.monotonic() > self._end:
            raise self.error(kind, index)

    def error(self, kind: str, index: int) -> InvalidRequest:
        """Return what ``check`` raises."""
        message = f"{kind} {index}: decoding the request's media takes more than {self._seconds:g} s, the limit"
        return InvalidRequest(message, param=kind, code=f"{kind}_too_slow")
