"""Video files to frames and sound; and which frames of a video are kept.

Rules
1. A model sees frames at an even rate, at most ``MediaLimits.video_fps``: frame k is the one that shows at k / rate
   seconds, whatever the file's own rate, even or not. So its timing is exact, and the sound stays beside it.
2. Less is decoded than the limits allow: size, duration and number are checked in the header and again on the way,
   frames are shrunk as they come, and decoding has a time limit.
3. Containers that name other files or addresses (playlists) are not opened.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import av
import numpy as np
import torch

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.audio import SHORTEST_S, Recording
from omni_actors.stages.multimodal.files import reading
from omni_actors.stages.multimodal.frames import resize
from omni_actors.stages.multimodal.limits import MediaLimits
from omni_actors.stages.multimodal.prompt import Pixels

CONTAINERS = ("mov", "mp4", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "ogg", "gif")
FEWEST = 4
"""Frames that are kept of a video too short to have them at the usual rate, where it has them."""
_SLACK_S = 0.002
"""Some containers round a frame's time to a millisecond."""


class Frames(NamedTuple):
    """uint8 (n, height, width, 3), ``fps`` of them a second."""

    pixels: torch.Tensor
    fps: float


class Size(NamedTuple):
    """What frames are to become, and for how many of them a prompt has room."""

    height: int
    width: int
    frames: int


Fit = Callable[[int, int], Size]
"""From height and width. Raises InvalidRequest."""


def sample_frames(content: Pixels, fps: float, index: int, limits: MediaLimits, fit: Fit) -> Frames:
    """Frames that came as such: uint8 (t, height, width, 3), ``fps`` a second. Raises ``InvalidRequest``."""
    count, height, width = content.shape[:3]
    collected = _Collected(index, limits, fit, fps, count / fps)
    collected.check(height, width, count / fps)
    for number, frame in enumerate(content, 1):
        collected.until(number / fps, partial(_as_it_is, frame))
    return collected.frames()


def decode_video(data: bytes, index: int, limits: MediaLimits, fit: Fit) -> Frames:
    """The frames of a video file. Raises ``InvalidRequest``."""
    with _opened(data, index) as container:
        if not container.streams.video:
            raise refusal(index, "there is no picture in it", "invalid_video")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = torch.get_num_threads()
        own = max(0.0, float(stream.average_rate or 0)) or limits.video_fps
        duration = _duration(container, stream)
        collected = _Collected(index, limits, fit, own, duration)
        collected.check(stream.codec_context.height, stream.codec_context.width, duration or 0.0)
        begin = at = None
        shown: Any = None
        for frame in container.decode(stream):
            stamp = frame.time if frame.time is not None else (at or 0.0) + 1 / own
            begin = stamp if begin is None else begin
            at = max(at or 0.0, stamp - begin)
            if shown is not None:
                collected.until(at, partial(_upright, shown))
            shown = frame
            collected.check(frame.height, frame.width, at)
        if shown is None or at is None:
            raise refusal(index, "there is no picture in it", "invalid_video")
        collected.until(at + 1 / own, partial(_upright, shown))
        return collected.frames()


def decode_sound(data: bytes, index: int, max_s: float) -> Recording | None:
    """The sound of a video file; None where it has none. Raises ``InvalidRequest``."""
    with _opened(data, index) as container:
        if not container.streams.audio:
            return None
        resampler = av.AudioResampler(format="fltp")
        pieces: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        sample_rate, total = 0, 0
        for frame in chain(container.decode(audio=0), (None,)):
            for plain in resampler.resample(frame):
                samples = plain.to_ndarray().mean(0, dtype=np.float32)
                sample_rate, total = plain.sample_rate, total + len(samples)
                if total > max_s * sample_rate:
                    raise refusal(index, f"its sound is too long; the limit is {max_s:g} s", "video_too_long")
                pieces.append(samples)
    return Recording(index, sample_rate, pieces) if total > SHORTEST_S * sample_rate else None


def refusal(index: int, reason: str, code: str) -> InvalidRequest:
    return InvalidRequest(f"video {index}: {reason}", param="video", code=code)


class _Collected:
    """The frames kept so far of one video; the next is due at ``len / fps`` seconds."""

    def __init__(self, index: int, limits: MediaLimits, fit: Fit, own_fps: float, duration: float | None) -> None:
        """duration: of the video, in seconds, where it is known."""
        self._index, self._limits, self._fit = index, limits, fit
        self._fps = min(own_fps, max(limits.video_fps, FEWEST / duration if duration else 0.0))
        self._slack = min(_SLACK_S, 0.1 / own_fps)
        self._deadline = time.monotonic() + limits.decode_s
        self._size: Size | None = None
        self._kept: list[torch.Tensor] = []

    def check(self, height: int, width: int, seconds: float) -> None:
        """Raises ``InvalidRequest`` where the video is too large, too long, or too slow to decode."""
        if width * height > self._limits.video_pixels:
            size = f"its frames have {width} × {height} pixels; the limit is {self._limits.video_pixels}"
            raise refusal(self._index, size, "video_too_large")
        if seconds > self._limits.video_s:
            raise refusal(self._index, f"it is too long; the limit is {self._limits.video_s:g} s", "video_too_long")
        if time.monotonic() > self._deadline:
            slow = f"decoding it takes more than {self._limits.decode_s:g} s"
            raise refusal(self._index, slow, "video_too_slow")

    def until(self, end: float, shown: Callable[[], Pixels]) -> None:
        """Keep the frame that shows until ``end``, in seconds, as often as one is due by then."""
        while len(self._kept) / self._fps < end - self._slack:
            self._keep(shown())

    def _keep(self, frame: Pixels) -> None:
        # The first one says what all become, also where a file changes its size on the way.
        if self._size is None:
            self._size = self._fit(*frame.shape[:2])
        if len(self._kept) == self._size.frames:
            message = f"more than {self._size.frames} frames of its size are beyond the limit of a prompt's tokens"
            raise refusal(self._index, message, "context_length_exceeded")
        if len(self._kept) == self._limits.video_frames:
            message = f"{self._fps:g} frames a second of it are too many; the limit is {self._limits.video_frames}"
            raise refusal(self._index, message, "video_too_long")
        pixels = torch.from_numpy(np.ascontiguousarray(frame))[None]
        self._kept.append(resize(pixels, self._size.height, self._size.width))

    def frames(self) -> Frames:
        return Frames(torch.cat(self._kept), self._fps)


def _duration(container: Any, stream: Any) -> float | None:
    """Seconds, as the header has it."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration else None


def _as_it_is(pixels: Pixels) -> Pixels:
    return pixels


def _upright(frame: av.VideoFrame) -> Pixels:
    """uint8 (height, width, 3), turned as the file says."""
    pixels = frame.to_ndarray(format="rgb24")
    return np.rot90(pixels, math.floor(frame.rotation / 90 + 0.5) % 4)


@contextmanager
def _opened(data: bytes, index: int) -> Iterator[Any]:
    options = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": ""}
    with reading("video", index, CONTAINERS), av.open(io.BytesIO(data), options=options) as container:
        yield container
