"""Decoding video files to frames and sound, and sampling the frames.

Rules
1. The model gets frames at a constant rate, at most ``MediaLimits.video_fps``: frame k is the one that is visible at
   k / rate seconds, for a file of any rate, constant or not. So the timing is exact and matches the sound.
2. Limits apply before memory is used: size, duration and number of frames are checked in the header and again while
   decoding, each frame is shrunk when it is decoded, and decoding has a deadline. It is checked behind each packet,
   because packets may take time and give no frame, and before each sample, because a frame may stay for many.
3. Containers that refer to other files or addresses (playlists) are not opened.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import av
import numpy as np
import torch

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.audio import EXPECTED_RATE, RATES, SHORTEST_S, WILD_SAMPLES, Recording, are_usable
from omni_actors.stages.multimodal.files import refuse_unreadable
from omni_actors.stages.multimodal.frames import resize
from omni_actors.stages.multimodal.limits import Deadline, MediaLimits
from omni_actors.stages.multimodal.prompt import Pixels

CONTAINERS = ("mov", "mp4", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "ogg", "gif")
MIN_FRAMES = 4
"""The number of frames that a short video is sampled to, at a higher rate, if it has so many."""
_USUAL_RATE = 48_000
"""Hz. Sound of a higher rate may have as many samples as sound of this one: silence of any length is a small file."""
_SLACK_S = 0.002
"""Tolerance for frame times, which some containers round to a millisecond."""


class Frames(NamedTuple):
    """pixels: uint8 (n, height, width, 3). fps: frames a second."""

    pixels: torch.Tensor
    fps: float


class Size(NamedTuple):
    """The size that frames are resized to, and how many of them fit into the prompt."""

    height: int
    width: int
    frames: int


Fit = Callable[[int, int], Size]
"""Returns the target size for a height and a width. Raises InvalidRequest."""


def sample_frames(content: Pixels, fps: float, index: int, limits: MediaLimits, fit: Fit, deadline: Deadline) -> Frames:
    """Sample a video that was sent as frames.

    content: uint8 (t, height, width, 3). fps: its frames a second. index: the number of the video in the request, for
    errors. fit: see ``Fit``. deadline: of the request.
    Raises InvalidRequest: a limit is exceeded.
    """
    count, height, width = content.shape[:3]
    sampler = _FrameSampler(index, limits, fit, deadline, own_fps=fps, duration=count / fps)
    sampler.check(height, width, count / fps)
    for number, frame in enumerate(content, 1):
        sampler.keep_until(number / fps, frame)
    return sampler.frames()


def decode_video(data: bytes, index: int, limits: MediaLimits, fit: Fit, deadline: Deadline) -> Frames:
    """Decode and sample the frames of a video file.

    data: the file's bytes. index: the number of the video in the request, for errors. fit: see ``Fit``. deadline: of
    the request.
    Raises InvalidRequest: the file cannot be decoded, or a limit is exceeded.
    """
    with _opened(data, index) as container:
        if not container.streams.video:
            raise _refusal(index, "it has no frames", "invalid_video")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = torch.get_num_threads()
        own_fps = max(0.0, float(stream.average_rate or 0)) or limits.video_fps
        duration = _duration(container, stream)
        sampler = _FrameSampler(index, limits, fit, deadline, own_fps=own_fps, duration=duration)
        sampler.check(stream.codec_context.height, stream.codec_context.width, duration or 0.0)
        first_time = at = None
        visible: Any = None
        for frame in _decoded(container, stream, index, deadline):
            stamp = frame.time if frame.time is not None else (at or 0.0) + 1 / own_fps
            first_time = stamp if first_time is None else first_time
            at = max(at or 0.0, stamp - first_time)
            if visible is not None:
                sampler.keep_until(at, visible)
            visible = frame
            sampler.check(frame.height, frame.width, at)
        if visible is None or at is None:
            raise _refusal(index, "it has no frames", "invalid_video")
        sampler.keep_until(at + 1 / own_fps, visible)
        return sampler.frames()


def decode_sound(data: bytes, index: int, max_s: float, deadline: Deadline) -> Recording | None:
    """Decode the sound of a video file, mixed to mono. None: it has no sound.

    max_s: the longest sound that is accepted, in seconds. deadline: of the request.
    Raises InvalidRequest: the file cannot be decoded, the sound is too long or too slow to decode, or its samples or
    their rate are not usable.
    """
    with _opened(data, index) as container:
        if not container.streams.audio:
            return None
        resampler = av.AudioResampler(format="fltp")
        pieces: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        sample_rate, total = 0, 0
        for frame in chain(_decoded(container, container.streams.audio[0], index, deadline), (None,)):
            for plain in resampler.resample(frame):
                if plain.sample_rate not in RATES:  # of a higher one, the limit in seconds would allow gigabytes
                    raise _refusal(index, f"its sound: {EXPECTED_RATE}, not {plain.sample_rate}", "invalid_video")
                channels = plain.to_ndarray()
                if not are_usable(channels):
                    raise _refusal(index, f"some samples of its sound {WILD_SAMPLES}", "invalid_video")
                samples = channels.mean(0, dtype=np.float32)
                sample_rate, total = plain.sample_rate, total + len(samples)
                limit_s = max_s * min(1.0, _USUAL_RATE / sample_rate)
                if total > limit_s * sample_rate:
                    reason = f"its sound is too long; at {sample_rate} Hz, the limit is {limit_s:g} s"
                    raise _refusal(index, reason, "video_too_long")
                pieces.append(samples)
    return Recording(index, sample_rate, pieces) if total > SHORTEST_S * sample_rate else None


def _refusal(index: int, reason: str, code: str) -> InvalidRequest:
    return InvalidRequest(f"video {index}: {reason}", param="video", code=code)


class _FrameSampler:
    """Collects the sampled frames of one video. The next one is due at len(frames) / fps seconds."""

    def __init__(
        self,
        index: int,
        limits: MediaLimits,
        fit: Fit,
        deadline: Deadline,
        *,
        own_fps: float,
        duration: float | None,
    ) -> None:
        """own_fps: the video's frames a second. duration: in seconds, or None if it is not known."""
        self._index, self._limits, self._fit, self._deadline = index, limits, fit, deadline
        self._fps = min(own_fps, max(limits.video_fps, MIN_FRAMES / duration if duration else 0.0))
        self._slack = min(_SLACK_S, 0.1 / own_fps)
        self._size: Size | None = None
        self._kept: list[torch.Tensor] = []

    def check(self, height: int, width: int, seconds: float) -> None:
        """Raise InvalidRequest if the video is too large, too long, or too slow to decode."""
        if width * height > self._limits.video_pixels:
            size = f"its frames have {width} × {height} pixels; the limit is {self._limits.video_pixels}"
            raise _refusal(self._index, size, "video_too_large")
        if seconds > self._limits.video_s:
            raise _refusal(self._index, f"it is too long; the limit is {self._limits.video_s:g} s", "video_too_long")
        self._deadline.check("video", self._index)

    def keep_until(self, end: float, visible: Pixels | av.VideoFrame) -> None:
        """Keep the frame that is visible until ``end`` seconds, once for each sample that is due by then."""
        shrunk: torch.Tensor | None = None
        while len(self._kept) / self._fps < end - self._slack:
            self._deadline.check("video", self._index)
            if shrunk is None:
                shrunk = self._shrunk(_pixels(visible))
            self._keep(shrunk)

    def _shrunk(self, frame: Pixels) -> torch.Tensor:
        # The first frame determines the size of all, even if the file changes its size later.
        self._size = self._size or self._fit(*frame.shape[:2])
        pixels = torch.from_numpy(np.ascontiguousarray(frame))[None]
        return resize(pixels, self._size.height, self._size.width)

    def _keep(self, shrunk: torch.Tensor) -> None:
        if self._size is not None and len(self._kept) == self._size.frames:
            many = f"it has more than {self._size.frames} frames of its size, which is the limit of the prompt's tokens"
            raise _refusal(self._index, many, "context_length_exceeded")
        if len(self._kept) == self._limits.video_frames:
            many = f"it has too many frames at {self._fps:g} frames a second; the limit is {self._limits.video_frames}"
            raise _refusal(self._index, many, "video_too_long")
        self._kept.append(shrunk)

    def frames(self) -> Frames:
        return Frames(torch.cat(self._kept), self._fps)


def _decoded(container: Any, stream: Any, index: int, deadline: Deadline) -> Iterator[Any]:
    """Decode a stream. Raises InvalidRequest: the time is over."""
    for packet in container.demux(stream):
        yield from packet.decode()
        deadline.check("video", index)


def _duration(container: Any, stream: Any) -> float | None:
    """Return the duration from the header, in seconds."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration else None


def _pixels(frame: Pixels | av.VideoFrame) -> Pixels:
    """Return a frame's pixels, uint8 (height, width, 3), upright: rotated by the file's display matrix."""
    if isinstance(frame, np.ndarray):
        return frame
    pixels = frame.to_ndarray(format="rgb24")
    return np.rot90(pixels, math.floor(frame.rotation / 90 + 0.5) % 4)


@contextmanager
def _opened(data: bytes, index: int) -> Iterator[Any]:
    options = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": ""}
    with refuse_unreadable("video", index, CONTAINERS):
        try:
            with av.open(io.BytesIO(data), options=options) as container:
                yield container
        except av.error.MemoryError as error:
            # A number in the file demands more than FFmpeg allocates at once. As a MemoryError it would end the worker.
            raise ValueError("FFmpeg refuses to allocate what the file demands") from error
