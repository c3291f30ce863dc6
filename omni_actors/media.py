"""What a caller gives to be heard and seen, as the pieces of input that stages accept.

Rules
1. Nothing is decoded here: a file's bytes travel as they are, and the stage that looks at them opens them.
2. What the caller holds in memory is not copied, where it has the form that travels.
3. Pillow is not imported: an image of it is known by what it can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from omni_actors.errors import InvalidRequest
from omni_actors.generation import AudioChunk
from omni_actors.orchestrator.pieces import Input

__all__ = ["File", "MultiModalData", "VideoClip", "pieces", "question"]

Pixels: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

File: TypeAlias = bytes | bytearray | memoryview | Path
"""A file's bytes, or where they are: a ``Path``, so that no text of somebody else's is taken for one."""

MultiModalData: TypeAlias = Mapping[str, Any]
"""By kind, one or a list of:

audio  ``AudioChunk``
image  uint8 (height, width, 3); an image of Pillow; a ``File``
video  ``VideoClip``; a ``File``
"""

KINDS = ("audio", "image", "video")


class VideoClip(msgspec.Struct, frozen=True):
    """Frames, uint8 (n, height, width, 3), ``fps`` of them a second, and their sound, if any."""

    frames: Pixels
    fps: float
    audio: AudioChunk | None = None


def pieces(given: MultiModalData) -> dict[str, list[Input]]:
    """The input by kind; kinds of which there is none are left out.

    A ``Path`` is read now. Raises InvalidRequest.
    """
    if unknown := sorted(set(given) - set(KINDS)):
        accepted = ", ".join(map(repr, KINDS))
        raise _refusal(f"unknown kind of data {unknown[0]!r}; accepted: {accepted}")
    inputs = {}
    for kind, of_one in zip(KINDS, (_audio, _image, _video), strict=True):
        items = given.get(kind, ())
        items = items if isinstance(items, list | tuple) else [items]
        if items:
            inputs[kind] = [of_one(item, index) for index, item in enumerate(items)]
    return inputs


def question(prompt: str, inputs: Mapping[str, Sequence[Input]]) -> list[dict[str, Any]]:
    """A conversation of one message: everything there is to be heard and seen, then the question."""
    parts: list[dict[str, Any]] = [
        {"type": kind, "index": index} for kind in KINDS for index in range(len(inputs.get(kind, ())))
    ]
    content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
    return [{"role": "user", "content": content}]


def _audio(item: Any, index: int) -> Input:
    if not isinstance(item, AudioChunk):
        raise _refusal(f"audio {index}: an AudioChunk was expected, not {type(item).__name__}")
    return Input({"sample_rate": item.sample_rate, "index": index}, {"audio": _samples(item)})


def _image(item: Any, index: int) -> Input:
    if (encoded := _encoded(item, "image", index)) is not None:
        return Input({"index": index}, {"encoded_image": encoded})
    if all(hasattr(item, name) for name in ("mode", "convert", "getexif")):
        item = _of_pillow(item)
    return Input({"index": index}, {"image": _pixels(item, 3, f"image {index}", "(height, width, 3)")})


def _video(item: Any, index: int) -> Input:
    if (encoded := _encoded(item, "video", index)) is not None:
        return Input({"index": index}, {"encoded_video": encoded})
    if not isinstance(item, VideoClip):
        message = f"video {index}: a VideoClip, a file's bytes or a Path was expected, not {type(item).__name__}"
        raise _refusal(message)
    data: dict[str, Any] = {"index": index, "fps": float(item.fps)}
    tensors: dict[str, Any] = {"video": _pixels(item.frames, 4, f"video {index}", "(frames, height, width, 3)")}
    if item.audio is not None:
        data["sample_rate"], tensors["audio"] = item.audio.sample_rate, _samples(item.audio)
    return Input(data, tensors)


def _encoded(item: Any, kind: str, index: int) -> Pixels | None:
    """A file's bytes, uint8 (n,); None for what is no file."""
    if isinstance(item, Path):
        try:
            item = item.read_bytes()
        except OSError as error:
            raise _refusal(f"{kind} {index}: {error}") from error
    if not isinstance(item, bytes | bytearray | memoryview):
        return None
    encoded: Pixels = np.frombuffer(item, np.uint8)
    if not encoded.size:
        raise _refusal(f"{kind} {index}: there is nothing in it")
    return encoded


def _samples(chunk: AudioChunk) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ascontiguousarray(chunk.samples, dtype=np.float32)


def _pixels(item: Any, dimensions: int, name: str, shape: str) -> Pixels:
    found = f"{item.dtype} {item.shape}" if isinstance(item, np.ndarray) else type(item).__name__
    fits = isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim == dimensions
    if not fits or item.shape[-1] != 3 or not item.size:
        raise _refusal(f"{name}: uint8 {shape} or a file was expected, not {found}")
    return np.ascontiguousarray(item)


def _of_pillow(image: Any) -> Pixels:
    """Its pixels as they are (not turned as EXIF says, as libraries that take such images do), on white."""
    if image.mode.startswith("I;16"):  # Pillow's own conversion takes all above 255 for white
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    layer = np.asarray(image.convert("RGBA")).astype(np.uint16)
    alpha = layer[..., 3:]
    on_white: Pixels = ((layer[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    return on_white


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="multi_modal_data")
