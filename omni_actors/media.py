"""From the caller's audio, images, videos and questions to pieces of input.

Rules
1. Nothing is decoded here but Pillow's images: the bytes of a file pass unchanged to the stage that opens it.
2. An array that already has the form of a piece is not copied.
3. Pillow is not imported: a Pillow image is recognised by its attributes.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from omni_actors.errors import InvalidRequest
from omni_actors.orchestrator.pieces import Input, Inputs, Segments
from omni_actors.outputs import AudioChunk

__all__ = ["File", "MultiModalData", "VideoClip", "conversation", "pieces"]

Pixels: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

File: TypeAlias = bytes | bytearray | memoryview | Path
"""The bytes of a file, or its ``Path``. A str is not accepted, so that untrusted text never names a file."""

MultiModalData: TypeAlias = Mapping[str, Any]
"""Kind of data to one item or a list of items:

audio  ``AudioChunk``; or an asynchronous iterator of ``AudioChunk``, the parts of one recording, as the last item
image  uint8 (height, width, 3), a Pillow image, or a ``File``
video  ``VideoClip``, or a ``File``

Arrays, and bytes that can be changed, are not copied. Change none until its request has ended: a request that waits,
or is repeated after the death of a worker, sends what is there then.
"""

KINDS = ("audio", "image", "video")
MAX_IMAGE_PIXELS = 2**27
"""The most pixels of a Pillow image, whose file may be decoded here. Engines have their own limits."""


class VideoClip(msgspec.Struct, frozen=True, eq=False):
    """A video in memory.

    Attributes:
        frames: uint8 (n, height, width, 3), RGB.
        fps: Frames per second.
        audio: The video's sound; None if it has none.
    """

    frames: Pixels
    fps: float
    audio: AudioChunk | None = None


def pieces(given: MultiModalData, image: Any = None) -> dict[str, Sequence[Input] | Segments]:
    """Return the pieces of input by kind, without the kinds that have no item.

    image: images that a request gives apart from the other media.
    A ``Path`` is read now. Raises InvalidRequest for an unknown kind, an item of a wrong type or shape, and a file that
    cannot be read.
    """
    found = _pieces(given)
    if image is not None:
        if "image" in found:
            raise InvalidRequest(
                "image: multi_modal_data has the kind 'image' too; accepted: one of both", param="image"
            )
        try:
            found |= _pieces({"image": image})
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="image") from error
    return {kind: found[kind] for kind in KINDS if kind in found}


def by_kind(given: MultiModalData | None) -> MultiModalData:
    """Return media as they are; without any, an empty mapping. Raises InvalidRequest for anything else."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _refusal(f"multi_modal_data: expected a mapping from kinds of data, found {given!r:.200}")
    return given


def _pieces(given: MultiModalData) -> dict[str, Sequence[Input] | Segments]:
    given = by_kind(given)
    if unknown := sorted(map(str, set(given) - set(KINDS))):
        accepted = ", ".join(map(repr, KINDS))
        raise _refusal(f"unknown kind of data {unknown[0]!r}; accepted: {accepted}")
    inputs: dict[str, Sequence[Input] | Segments] = {}
    for kind, to_input in zip(KINDS, (_audio, _image, _video), strict=True):
        items = given.get(kind, ())
        items = items if isinstance(items, list | tuple) else [items]
        *first, live = items if kind == "audio" and items and isinstance(items[-1], AsyncIterable) else (*items, None)
        found = [to_input(item, index) for index, item in enumerate(first)]
        if live is not None:
            inputs[kind] = Segments(source=live, to_piece=partial(_audio, index=len(found)), first=found)
        elif found:
            inputs[kind] = found
    return inputs


def conversation(prompt: Any, inputs: Inputs) -> list[Any]:
    """Return the messages of ``prompt``. A question becomes one message: all of ``inputs``, then the question.

    Raises InvalidRequest: ``prompt`` is neither a str nor a sequence of messages.
    """
    if isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt):
        return list(prompt)
    if not isinstance(prompt, str):
        raise InvalidRequest(f"prompt: expected text or a list of messages, found {prompt!r:.200}", param="prompt")
    parts: list[dict[str, Any]] = [
        {"type": kind, "index": index} for kind in KINDS for index in range(_count(inputs.get(kind, ())))
    ]
    content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
    return [{"role": "user", "content": content}]


def _count(items: Sequence[Input] | Segments) -> int:
    return len(items.first) + 1 if isinstance(items, Segments) else len(items)


def _audio(item: Any, index: int) -> Input:
    samples = _samples(item, f"audio {index}")
    return Input({"sample_rate": _rate(item), "index": index}, {"audio": samples})


def _image(item: Any, index: int) -> Input:
    if (encoded := _encoded(item, "image", index)) is not None:
        return Input({"index": index}, {"encoded_image": encoded})
    if all(hasattr(item, name) for name in ("mode", "convert", "getexif")):
        if item.width * item.height > MAX_IMAGE_PIXELS:
            message = f"image {index}: {item.width} × {item.height} pixels; the limit is {MAX_IMAGE_PIXELS}"
            raise _refusal(message)
        item = _pillow_pixels(item, f"image {index}")
    return Input({"index": index}, {"image": _pixels(item, 3, f"image {index}", "(height, width, 3)")})


def _video(item: Any, index: int) -> Input:
    if (encoded := _encoded(item, "video", index)) is not None:
        return Input({"index": index}, {"encoded_video": encoded})
    if not isinstance(item, VideoClip):
        message = f"video {index}: a VideoClip, a file's bytes or a Path was expected, not {type(item).__name__}"
        raise _refusal(message)
    try:
        data: dict[str, Any] = {"index": index, "fps": float(item.fps)}
    except (TypeError, ValueError, OverflowError) as error:
        raise _refusal(f"video {index}: fps: expected a number, found {item.fps!r:.200}") from error
    tensors: dict[str, Any] = {"video": _pixels(item.frames, 4, f"video {index}", "(frames, height, width, 3)")}
    if item.audio is not None:
        tensors["audio"] = _samples(item.audio, f"video {index}: audio")
        data["sample_rate"] = _rate(item.audio)
    return Input(data, tensors)


def _encoded(item: Any, kind: str, index: int) -> Pixels | None:
    """Return the bytes of a ``File``, uint8 (n,); None for anything else."""
    if isinstance(item, Path):
        try:
            item = item.read_bytes()
        except OSError as error:
            raise _refusal(f"{kind} {index}: {error}") from error
    if not isinstance(item, bytes | bytearray | memoryview):
        return None
    try:
        encoded: Pixels = np.frombuffer(item, np.uint8)
    except (BufferError, ValueError) as error:  # a memoryview that has gaps, or was released
        raise _refusal(f"{kind} {index}: the bytes of a file were expected: {error}") from error
    if not encoded.size:
        raise _refusal(f"{kind} {index}: the file is empty")
    return encoded


def _samples(chunk: Any, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    if not isinstance(chunk, AudioChunk):
        raise _refusal(f"{name}: an AudioChunk was expected, not {type(chunk).__name__}")
    try:
        samples = np.ascontiguousarray(chunk.samples)
        floats = samples.astype(np.float32, copy=False)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor that requires grad
        raise _refusal(f"{name}: samples: float32 (n,) was expected: {error}") from error
    if samples.dtype.kind in "iu":  # their amplitude is another one
        message = f"{name}: samples: float32 (n,) was expected, found {samples.dtype}; divide 16-bit samples by 32768"
        raise _refusal(message)
    return floats


def _rate(chunk: AudioChunk) -> Any:
    """Return the sample rate: as an int, if it is an integer of numpy. What it may be is known to the stage."""
    rate: Any = chunk.sample_rate
    return int(rate) if isinstance(rate, np.integer) else rate


def _pixels(item: Any, dimensions: int, name: str, shape: str) -> Pixels:
    found = f"{item.dtype} {item.shape}" if isinstance(item, np.ndarray) else type(item).__name__
    fits = isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim == dimensions
    if not fits or item.shape[-1] != 3 or not item.size:
        raise _refusal(f"{name}: uint8 {shape} or a file was expected, not {found}")
    return np.ascontiguousarray(item)


def _pillow_pixels(image: Any, name: str) -> Pixels:
    """Return the stored pixels of a Pillow image on a white background. EXIF rotation is not applied.

    Pillow decodes the file of an image only now. Its decoders raise all kinds of exceptions for a damaged one.
    """
    try:
        return _on_white(image)
    except MemoryError:
        raise
    except Exception as error:
        raise _refusal(f"{name}: Pillow cannot decode it: {error}") from error


def _on_white(image: Any) -> Pixels:
    if image.mode.startswith("I;16"):  # Pillow's own conversion makes all values above 255 white
        values = np.asarray(image)
        grey = (values >> 8).astype(np.uint8)
        if (transparent := image.info.get("transparency")) is not None:  # a PNG file may have one such value
            grey[values == transparent] = 255
        return np.repeat(grey[..., None], 3, axis=-1)
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    layer = np.asarray(image.convert("RGBA")).astype(np.uint16)
    alpha = layer[..., 3:]
    on_white: Pixels = ((layer[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    return on_white


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="multi_modal_data")
