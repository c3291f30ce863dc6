"""What a conversation shows, decoded: in its order, and no larger than a model's own processor makes it anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal import audio
from omni_actors.stages.multimodal.audio import Floats, Recording
from omni_actors.stages.multimodal.frames import FrameProcessor
from omni_actors.stages.multimodal.images import check_pixels, decode_image
from omni_actors.stages.multimodal.limits import MediaLimits
from omni_actors.stages.multimodal.prompt import Media, Pixels, VideoInput
from omni_actors.stages.multimodal.videos import Frames, Size, decode_sound, decode_video, sample_frames


class Decoded(msgspec.Struct):
    """Each in the order in which the conversation shows it; what it shows twice is here twice."""

    images: list[Pixels] = []
    videos: list[Frames] = []
    sounds: list[Floats] = []
    """At the feature extractor's sample rate."""
    sound_of: list[int | None] = []
    """Of each sound, the place in ``videos`` of the video that it belongs to."""

    @property
    def heard(self) -> bool:
        """Whether a video comes with its sound."""
        return any(video is not None for video in self.sound_of)


class Decoder:
    """Bound to one model's processors and the limits of a request."""

    def __init__(
        self,
        images: Qwen2VLImageProcessorPil,
        frames: FrameProcessor,
        frame_size: Mapping[str, int],
        sample_rate: int,
        longest_s: float,
        limits: MediaLimits,
    ) -> None:
        """frame_size: the fewest and the most pixels of a frame. longest_s: of one recording that the model takes."""
        self.images, self.frames, self.frame_size = images, frames, frame_size
        self.sample_rate, self.longest_s, self.limits = sample_rate, longest_s, limits

    def decode(self, places: Sequence[tuple[str, int]], media: Media, use_audio_in_video: bool) -> Decoded:
        """places: kind and index of what the conversation shows. Raises ``InvalidRequest``."""
        task = _Decoding(self, media, use_audio_in_video)
        for kind, index in places:
            task.add(kind, index)
        decoded = task.decoded
        if decoded.heard and len(set(decoded.sound_of) - {None}) < len(decoded.videos):
            message = "some of the videos have sound and some have none; a model hears all that it sees, or none"
            raise InvalidRequest(message, param="use_audio_in_video")
        return decoded


class _Decoding:
    """One request's: how much it has used of the limits so far."""

    def __init__(self, decoder: Decoder, media: Media, use_audio_in_video: bool) -> None:
        self._for, self._limits, self._media = decoder, decoder.limits, media
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
        processor = self._for.images
        factor = processor.patch_size * processor.merge_size
        height, width = self._fitted("image", index, pixels.shape, factor, processor.size)
        self._count("image", height * width // factor**2)
        if height * width < pixels.shape[0] * pixels.shape[1]:  # the processor's own first step, one image at a time
            pixels = np.asarray(Image.fromarray(pixels).resize((width, height), processor.resample))
        self.decoded.images.append(pixels)

    def _add_video(self, index: int, video: VideoInput) -> None:
        processor = self._for.frames
        factor = processor.patch_size * processor.merge_size

        def fit(height: int, width: int) -> Size:
            fitted = self._fitted("video", index, (height, width), factor, self._for.frame_size)
            steps = (self._limits.tokens - self._tokens) // (fitted[0] * fitted[1] // factor**2)
            return Size(*fitted, steps * processor.temporal_patch_size)

        if isinstance(video.content, bytes):
            frames = decode_video(video.content, index, self._limits, fit)
        else:
            assert video.fps is not None, "OmniPrompt has refused frames without"
            frames = sample_frames(video.content, video.fps, index, self._limits, fit)
        steps, rows, columns = processor.grid(*frames.pixels.shape[:3])
        self._count("video", steps * rows * columns // processor.merge_size**2)
        if self._use_audio_in_video:
            sound = video.audio
            if isinstance(video.content, bytes):
                sound = decode_sound(video.content, index, self._for.longest_s)
            if sound is not None:
                self._add_sound(sound, len(self.decoded.videos))
        self.decoded.videos.append(frames)

    def _add_sound(self, recording: Recording, video: int | None) -> None:
        self._seconds += recording.duration_s
        for seconds, limit in (
            (recording.duration_s, self._for.longest_s),
            (self._seconds, self._limits.audio_s),
        ):
            if seconds > limit:
                message = f"{seconds:.1f} s of sound are too much; the limit is {limit:g} s"
                raise audio.refusal(message, "audio_too_long")
        self.decoded.sounds.append(recording.at(self._for.sample_rate))
        self.decoded.sound_of.append(video)

    def _fitted(
        self, kind: str, index: int, shape: Sequence[int], factor: int, size: Mapping[str, int]
    ) -> tuple[int, int]:
        try:
            fitted: tuple[int, int] = smart_resize(
                shape[0], shape[1], factor, size["shortest_edge"], size["longest_edge"]
            )
        except ValueError as error:
            message = f"{kind} {index}: {shape[1]} × {shape[0]} pixels; one side may be 200 times the other"
            raise InvalidRequest(message, param=kind) from error
        return fitted

    def _count(self, kind: str, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens > self._limits.tokens:
            message = f"what the prompt shows takes {self._tokens} tokens at least; the limit is {self._limits.tokens}"
            raise InvalidRequest(message, param=kind, code="context_length_exceeded")
