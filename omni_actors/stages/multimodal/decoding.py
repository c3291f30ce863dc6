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
from omni_actors.stages.multimodal.audio import SHORTEST_S, Floats, Recording, audio_refusal
from omni_actors.stages.multimodal.frames import FrameProcessor
from omni_actors.stages.multimodal.images import check_ratio, check_size, decode_image
from omni_actors.stages.multimodal.limits import Deadline, MediaLimits
from omni_actors.stages.multimodal.prompt import Media, Pixels, VideoInput
from omni_actors.stages.multimodal.videos import Frames, Size, decode_sound, decode_video, sample_frames
from omni_actors.stages.omni.options import MMProcessorKwargs
from omni_actors.stages.refusal import beyond_context


class Decoded(msgspec.Struct):
    """The media in the order of their places in the conversation. An input with two places is here twice."""

    image_size: Mapping[str, int]
    """The fewest and the most pixels of an image, as in ``Decoder``."""
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


class Decoder(msgspec.Struct, frozen=True):
    """Decodes for the processors of one model, within the limits of a request."""

    images: Qwen2VLImageProcessorPil
    frames: FrameProcessor
    image_size: Mapping[str, int]
    """"shortest_edge" and "longest_edge": the fewest and the most pixels of an image."""
    frame_size: Mapping[str, int]
    """The same of a frame."""
    sample_rate: int
    """The sample rate of sounds, in Hz."""
    longest_s: float
    """The longest recording that the model accepts, in seconds."""
    limits: MediaLimits

    def changed(self, kwargs: MMProcessorKwargs) -> Decoder:
        """Return the decoder of a request with its own arguments. Raises InvalidRequest."""
        image_size, frame_size = (_resized(size, kwargs) for size in (self.image_size, self.frame_size))
        fps = kwargs.fps or self.limits.video_fps
        limits = msgspec.structs.replace(self.limits, video_fps=fps)
        return msgspec.structs.replace(self, image_size=image_size, frame_size=frame_size, limits=limits)

    def decode(self, places: Sequence[tuple[str, int]], media: Media, use_audio_in_video: bool) -> Decoded:
        """Decode the media of one conversation.

        places: kind and index of the media, in order. media: all media of the request. use_audio_in_video: whether
        videos bring their sound.
        Raises InvalidRequest: a file cannot be decoded, a limit is exceeded, or only some videos have sound.
        """
        task = _Decoding(self, use_audio_in_video)
        for kind, index in places:
            if kind == "audio":
                task.add_sound(media.audio[index], None)
            elif kind == "image":
                task.add_image(index, media.image[index])
            else:
                task.add_video(index, media.video[index])
        decoded = task.decoded
        if decoded.has_video_sound and len(set(decoded.video_of_sound) - {None}) < len(decoded.videos):
            message = "some videos have sound and some have none; the model takes the sound of all videos or of none"
            raise InvalidRequest(message, param="use_audio_in_video")
        return decoded


class _Decoding:
    """The decoding of one request, which counts what it uses of the limits."""

    def __init__(self, decoder: Decoder, use_audio_in_video: bool) -> None:
        self._decoder, self._limits = decoder, decoder.limits
        self._use_audio_in_video = use_audio_in_video
        self._deadline = Deadline(decoder.limits.decode_s)
        self._tokens = 0
        self._seconds = 0.0
        self.decoded = Decoded(decoder.image_size)

    def add_image(self, index: int, image: Pixels | bytes) -> None:
        self._deadline.check("image", index)
        if isinstance(image, bytes):
            pixels = decode_image(image, index, self._limits.image_pixels, self._deadline)
        else:
            check_size(index, image.shape[1], image.shape[0], self._limits.image_pixels)
            pixels = image
        processor = self._decoder.images
        factor = processor.patch_size * processor.merge_size
        height, width = _fitted("image", index, pixels.shape, factor, self._decoder.image_size)
        self._count("image", height * width // factor**2)
        if height * width < pixels.shape[0] * pixels.shape[1]:  # the processor's first step, one image at a time
            pixels = np.asarray(Image.fromarray(pixels).resize((width, height), processor.resample))
        self.decoded.images.append(pixels)

    def add_video(self, index: int, video: VideoInput) -> None:
        processor = self._decoder.frames
        factor = processor.patch_size * processor.merge_size

        def fit(height: int, width: int) -> Size:
            fitted = _fitted("video", index, (height, width), factor, self._decoder.frame_size)
            steps = (self._limits.tokens - self._tokens) // (fitted[0] * fitted[1] // factor**2)
            return Size(*fitted, steps * processor.temporal_patch_size)

        if isinstance(video.content, bytes):
            frames = decode_video(video.content, index, self._limits, fit, self._deadline)
        else:
            assert video.fps is not None, "OmniPrompt refuses frames without fps"
            frames = sample_frames(video.content, video.fps, index, self._limits, fit, self._deadline)
        steps, rows, columns = processor.grid(*frames.pixels.shape[:3])
        self._count("video", steps * rows * columns // processor.merge_size**2)
        if self._use_audio_in_video:
            sound = video.audio
            if isinstance(video.content, bytes):
                sound = decode_sound(video.content, index, self._decoder.longest_s, self._deadline)
            if sound is not None and sound.duration_s >= SHORTEST_S:
                self.add_sound(sound, len(self.decoded.videos))
        self.decoded.videos.append(frames)

    def add_sound(self, recording: Recording, video: int | None) -> None:
        self._seconds += recording.duration_s
        for seconds, limit in ((recording.duration_s, self._decoder.longest_s), (self._seconds, self._limits.audio_s)):
            if seconds > limit:
                message = f"the sound is too long: {seconds:.1f} s; the limit is {limit:g} s"
                raise audio_refusal(message, "audio_too_long")
        self.decoded.sounds.append(recording.resampled(self._decoder.sample_rate))
        self.decoded.video_of_sound.append(video)

    def _count(self, kind: str, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens > self._limits.tokens:
            message = f"the media take at least {self._tokens} tokens; the limit is {self._limits.tokens}"
            raise beyond_context(message, kind)


def _resized(size: Mapping[str, int], kwargs: MMProcessorKwargs) -> Mapping[str, int]:
    """Return the bounds of a picture's pixels, by default ``size``. Raises InvalidRequest."""
    fewest, most = kwargs.min_pixels or size["shortest_edge"], kwargs.max_pixels or size["longest_edge"]
    if fewest > most:
        message = f"mm_processor_kwargs: min_pixels is {fewest}, which is more than max_pixels, {most}"
        raise InvalidRequest(message, param="mm_processor_kwargs")
    return {"shortest_edge": fewest, "longest_edge": most}


def _fitted(kind: str, index: int, shape: Sequence[int], factor: int, size: Mapping[str, int]) -> tuple[int, int]:
    """Return the height and width that an image or a frame of this shape is resized to. Raises InvalidRequest."""
    check_ratio(kind, index, shape[1], shape[0])  # beyond it, transformers refuses too
    height, width = smart_resize(shape[0], shape[1], factor, size["shortest_edge"], size["longest_edge"])
    return height, width
