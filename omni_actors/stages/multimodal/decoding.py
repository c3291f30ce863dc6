"""Decoding the media of a conversation.

Images and frames are shrunk at once to the size that the model's own processor gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.audio import Floats, Recording, audio_refusal
from omni_actors.stages.multimodal.frames import FrameProcessor
from omni_actors.stages.multimodal.images import check_pixels, decode_image
from omni_actors.stages.multimodal.limits import MediaLimits
from omni_actors.stages.multimodal.prompt import Media, Pixels, VideoInput
from omni_actors.stages.multimodal.videos import Frames, Size, decode_sound, decode_video, sample_frames


class Decoded(msgspec.Struct):
    """The media in the order of their places in the conversation. An input with two places is here twice."""

    images: list[Pixels] = []
    """uint8 (height, width, 3) each."""
    videos: list[Frames] = []
    sounds: list[Floats] = []
    """float32 (n,) each, at the sample rate of the feature extractor."""
    video_of_sound: list[int | None] = []
    """For each of ``sounds``, the index in ``videos`` of its video. None: it is a recording."""

    @property
    def has_video_sound(self) -> bool:
        """Whether a video has its sound in ``sounds``."""
        return any(video is not None for video in self.video_of_sound)


class Decoder:
    """Decodes for the processors of one model, within the limits of a request."""

    def __init__(
        self,
        images: Qwen2VLImageProcessorPil,
        frames: FrameProcessor,
        *,
        frame_size: Mapping[str, int],
        sample_rate: int,
        longest_s: float,
        limits: MediaLimits,
    ) -> None:
        """images, frames: the model's processors. frame_size: "shortest_edge" and "longest_edge", the fewest and the
        most pixels of a frame. sample_rate: of sounds, in Hz. longest_s: the longest recording that the model accepts.
        """
        self.images, self.frames, self.frame_size = images, frames, frame_size
        self.sample_rate, self.longest_s, self.limits = sample_rate, longest_s, limits

    def decode(self, places: Sequence[tuple[str, int]], media: Media, use_audio_in_video: bool) -> Decoded:
        """Decode the media of one conversation.

        places: kind and index of the media, in order. media: all media of the request. use_audio_in_video: whether
        videos bring their sound.
        Raises InvalidRequest: a file cannot be decoded, a limit is exceeded, or only some videos have sound.
        """
        task = _Decoding(self, media, use_audio_in_video)
        for kind, index in places:
            task.add(kind, index)
        decoded = task.decoded
        if decoded.has_video_sound and len(set(decoded.video_of_sound) - {None}) < len(decoded.videos):
            message = "some videos have sound and some have none; the model takes the sound of all videos or of none"
            raise InvalidRequest(message, param="use_audio_in_video")
        return decoded


class _Decoding:
    """The decoding of one request, which counts what it uses of the limits."""

    def __init__(self, decoder: Decoder, media: Media, use_audio_in_video: bool) -> None:
        self._decoder, self._limits, self._media = decoder, decoder.limits, media
        self._use_audio_in_video = use_audio_in_video
        self._tokens = 0
        self._seconds = 0.0
        self.decoded = Decoded()

    def add(self, kind: str, index: int) -> None:
        match kind:
            case "audio":
                self._add_sound(self._media.audio[index], None)
            case "image":
                self._add_image(index, self._media.image[index])
            case _:
                self._add_video(index, self._media.video[index])

    def _add_image(self, index: int, image: Pixels | bytes) -> None:
        if isinstance(image, bytes):
            pixels = decode_image(image, index, self._limits.image_pixels)
        else:
            check_pixels(index, image.shape[1], image.shape[0], self._limits.image_pixels)
            pixels = image
        processor = self._decoder.images
        factor = processor.patch_size * processor.merge_size
        height, width = self._fitted("image", index, pixels.shape, factor, processor.size)
        self._count("image", height * width // factor**2)
        if height * width < pixels.shape[0] * pixels.shape[1]:  # the processor's first step, one image at a time
            pixels = np.asarray(Image.fromarray(pixels).resize((width, height), processor.resample))
        self.decoded.images.append(pixels)

    def _add_video(self, index: int, video: VideoInput) -> None:
        processor = self._decoder.frames
        factor = processor.patch_size * processor.merge_size

        def fit(height: int, width: int) -> Size:
            fitted = self._fitted("video", index, (height, width), factor, self._decoder.frame_size)
            steps = (self._limits.tokens - self._tokens) // (fitted[0] * fitted[1] // factor**2)
            return Size(*fitted, steps * processor.temporal_patch_size)

        if isinstance(video.content, bytes):
            frames = decode_video(video.content, index, self._limits, fit)
        else:
            assert video.fps is not None, "OmniPrompt refuses frames without fps"
            frames = sample_frames(video.content, video.fps, index, self._limits, fit)
        steps, rows, columns = processor.grid(*frames.pixels.shape[:3])
        self._count("video", steps * rows * columns // processor.merge_size**2)
        if self._use_audio_in_video:
            sound = video.audio
            if isinstance(video.content, bytes):
                sound = decode_sound(video.content, index, self._decoder.longest_s)
            if sound is not None:
                self._add_sound(sound, len(self.decoded.videos))
        self.decoded.videos.append(frames)

    def _add_sound(self, recording: Recording, video: int | None) -> None:
        self._seconds += recording.duration_s
        for seconds, limit in ((recording.duration_s, self._decoder.longest_s), (self._seconds, self._limits.audio_s)):
            if seconds > limit:
                message = f"the sound is too long: {seconds:.1f} s; the limit is {limit:g} s"
                raise audio_refusal(message, "audio_too_long")
        self.decoded.sounds.append(recording.resampled(self._decoder.sample_rate))
        self.decoded.video_of_sound.append(video)

    def _fitted(
        self, kind: str, index: int, shape: Sequence[int], factor: int, size: Mapping[str, int]
    ) -> tuple[int, int]:
        try:
            fitted: tuple[int, int] = smart_resize(
                shape[0], shape[1], factor, size["shortest_edge"], size["longest_edge"]
            )
        except ValueError as error:
            message = f"{kind} {index}: found {shape[1]} × {shape[0]} pixels; the limit is a ratio of 200"
            raise InvalidRequest(message, param=kind) from error
        return fitted

    def _count(self, kind: str, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens > self._limits.tokens:
            message = f"the media take at least {self._tokens} tokens; the limit is {self._limits.tokens}"
            raise InvalidRequest(message, param=kind, code="context_length_exceeded")
