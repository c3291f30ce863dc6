"""The conversation and the media of a request, collected from its chunks: validated copies, not decoded yet.

Chunks, in any order; ``data["index"]`` counts the request's inputs of one kind from 0:

======== ==============================================================================================================
messages ``data["messages"]``: a part of the conversation (see ``conversation``), in order; or a part of a raw prompt
         (see ``raw_prompt``), with a placeholder of the model's own for each medium, by kind in order of index
audio    ``tensors["audio"]``, ``data["sample_rate"]`` (see ``audio``); a recording may have several chunks
image    ``tensors["image"]``, uint8 (height, width, 3); or ``tensors["encoded_image"]``, uint8 (n,), a file's bytes
video    ``tensors["video"]``, uint8 (frames, height, width, 3), and ``data["fps"]``; or ``tensors["encoded_video"]``,
         uint8 (n,), a file's bytes. Frames may have sound: ``tensors["audio"]`` and ``data["sample_rate"]``
======== ==============================================================================================================

Media without a conversation are the user's question, in order of kind and index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from omni_actors.stages.base import Chunk, InvalidRequest
from omni_actors.stages.multimodal import conversation
from omni_actors.stages.multimodal.audio import Recording, Recordings, copy_samples
from omni_actors.stages.raw_prompt import RawPrompt
from omni_actors.stages.refusal import validated
from omni_actors.stages.sources import OpenSources
from ringbuf import Tensor

Pixels: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class _ImageData(msgspec.Struct, frozen=True):
    index: conversation.Index = 0


class _VideoData(msgspec.Struct, frozen=True):
    index: conversation.Index = 0
    fps: Annotated[float, Meta(gt=0, le=1000)] | None = None


class VideoInput(msgspec.Struct, frozen=True):
    """content: frames, uint8 (t, height, width, 3), at ``fps`` frames a second; or a file's bytes.

    audio: the sound of frames; a file contains its own.
    """

    content: Pixels | bytes
    fps: float | None
    audio: Recording | None


class Media(msgspec.Struct):
    """The media of a request, by kind and index. An image is uint8 (height, width, 3) or a file's bytes."""

    audio: dict[int, Recording] = {}
    image: dict[int, Pixels | bytes] = {}
    video: dict[int, VideoInput] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.audio or self.image or self.video)

    def of(self, kind: str) -> Mapping[int, Any]:
        """Return the media of one kind ("audio", "image" or "video") by index."""
        by_index: Mapping[int, Any] = getattr(self, kind)
        return by_index

    def require_placed(
        self, places: Iterable[tuple[str, int]], place: str = "message", param: str = "messages"
    ) -> None:
        """Raise InvalidRequest if a medium has no place. places: kind and index. place: what a place is called."""
        sent = {(kind, index) for kind in ("audio", "image", "video") for index in self.of(kind)}
        if unplaced := sorted(sent - set(places)):
            found = "{} {}".format(*unplaced[0])
            raise InvalidRequest(f"no {place} refers to {found}, which was sent", param=param)


class OmniPrompt:
    """Collects the input of one request. It is complete when every source has sent its last chunk.

    may_be_empty: whether a conversation without text and media is a prompt too.
    """

    def __init__(self, sources: Sequence[str], *, may_be_empty: bool = False) -> None:
        self.may_be_empty = may_be_empty
        self._open = OpenSources(sources)
        self._messages: list[conversation.Message] = []
        self._recordings = Recordings()
        self.media = Media()
        self.raw = RawPrompt()

    def feed(self, chunk: Chunk) -> bool:
        """Take a chunk. Return whether the input is complete. Raises InvalidRequest."""
        tensors = chunk.tensors
        if "video" in tensors or "encoded_video" in tensors:
            self._take_video(tensors, chunk.data)
        elif "image" in tensors or "encoded_image" in tensors:
            self._take_image(tensors, chunk.data)
        elif "audio" in tensors:
            self._recordings.feed(tensors["audio"], chunk.data)
        else:
            self.raw.feed(chunk)
            self._messages += validated(chunk.data, conversation.ConversationData).messages
            if any(message.has_tools for message in self._messages):
                raise InvalidRequest("messages: this model's conversations have no tools", param="messages")
            self.raw.require_alone(self._messages)
        self._open.update(chunk)
        if self._open:
            return False
        self._recordings.end_recording()
        self.media.audio |= {recording.index: recording for recording in self._recordings.take_complete()}
        return True

    def negative(self, text: str) -> OmniPrompt:
        """Return a prompt of the same kind, raw or a conversation, that is a client's negative prompt."""
        made = OmniPrompt((), may_be_empty=True)
        if self.raw:
            made.raw.text = text
        else:
            made._messages.append(conversation.Message("user", text))
        return made

    @property
    def messages(self) -> list[conversation.Message]:
        """The conversation; without one, a user message with all media."""
        if self._messages:
            return self._messages
        parts: list[conversation.MediaPart] = [
            *map(conversation.AudioPart, sorted(self.media.audio)),
            *map(conversation.ImagePart, sorted(self.media.image)),
            *map(conversation.VideoPart, sorted(self.media.video)),
        ]
        return [conversation.Message("user", list(parts))] if parts else []

    def _take_image(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        index = validated(data, _ImageData).index
        image = _content(tensors, "image", "(height, width, 3)")
        _put(self.media.image, "image", index, image)

    def _take_video(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        video = validated(data, _VideoData)
        content = _content(tensors, "video", "(frames, height, width, 3)")
        if not isinstance(content, bytes) and video.fps is None:
            raise InvalidRequest(f"video {video.index}: frames need fps, the number of frames a second", param="video")
        sound = None
        if "audio" in tensors:
            samples, sample_rate = copy_samples(tensors["audio"], data)
            sound = Recording(video.index, sample_rate, [samples])
        _put(self.media.video, "video", video.index, VideoInput(content, video.fps, sound))


def _content(tensors: Mapping[str, Tensor], kind: str, shape: str) -> Pixels | bytes:
    """Return a copy of the pixels or of the file's bytes. Raises InvalidRequest."""
    encoded = f"encoded_{kind}"
    tensor = tensors[encoded] if encoded in tensors else tensors[kind]
    dimensions = 1 if encoded in tensors else shape.count(",") + 1
    fits = tensor.dtype == "uint8" and len(tensor.shape) == dimensions and math.prod(tensor.shape) > 0
    if not fits or (encoded not in tensors and tensor.shape[-1] != 3):
        expected = "a file's bytes, uint8 (n,)," if encoded in tensors else f"uint8 {shape}"
        raise InvalidRequest(f"{kind}: {expected} was expected, not {tensor.dtype} {tensor.shape}", param=kind)
    return bytes(tensor.data) if encoded in tensors else tensor.numpy().copy()


def _put(known: dict[int, Any], kind: str, index: int, content: Any) -> None:
    if index in known:
        raise InvalidRequest(f"{kind} {index} was sent twice", param=kind)
    known[index] = content
