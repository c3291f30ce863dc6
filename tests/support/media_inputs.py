"""Requests as the engine loop delivers them, and generated media files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

from omni_actors.stages.base import CLIENT, Chunk
from omni_actors.stages.multimodal.prompt import OmniPrompt
from ringbuf import decode_bundle, encode_bundle

Piece = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Data and tensors of a chunk."""
RATE = 16_000


def feed(prompt: OmniPrompt, *pieces: Piece) -> bool:
    """Feed a whole request from memory that is freed after each chunk: a view that outlives it is a BufferError."""
    complete = False
    for seq, (data, tensors) in enumerate(pieces):
        memory = bytearray(b"".join(encode_bundle(None, tensors)))
        try:
            with memoryview(memory) as view:
                last = seq == len(pieces) - 1
                complete = prompt.feed(
                    Chunk(source=CLIENT, seq=seq, last=last, tensors=decode_bundle(view).tensors, data=data)
                )
        finally:
            memory.clear()
    return complete


def prompt_of(*pieces: Piece) -> OmniPrompt:
    prompt = OmniPrompt((CLIENT,))
    assert feed(prompt, *pieces)
    return prompt


def sound(seconds: float, index: int = 0, rate: int = RATE) -> Piece:
    samples = np.random.default_rng(index).normal(0, 0.1, round(seconds * rate)).astype(np.float32)
    return {"sample_rate": rate, "index": index}, {"audio": samples}


def image(height: int, width: int, index: int = 0) -> Piece:
    return {"index": index}, {"image": noise(height, width, 3, seed=index)}


def video(count: int, height: int, width: int, fps: float = 2.0, index: int = 0) -> Piece:
    return {"index": index, "fps": fps}, {"video": noise(count, height, width, 3, seed=index)}


def messages(*contents: str | Sequence[Any], role: str = "user") -> Piece:
    return {"messages": [{"role": role, "content": content} for content in contents]}, {}


def show(kind: str, index: int = 0) -> dict[str, Any]:
    return {"type": kind, "index": index}


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def noise(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def bytes_of(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


def image_file(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def video_file(
    count: int = 60,
    *,
    fps: int = 30,
    format: str = "matroska",
    codec: str = "ffv1",
    size: tuple[int, int] = (48, 64),
    times: Iterable[int] = (),
    audio: np.ndarray[Any, np.dtype[np.float32]] | None = None,
    audio_codec: str = "pcm_s16le",
    pixels: np.ndarray[Any, np.dtype[np.uint8]] | None = None,
) -> bytes:
    """Frame i is grey of brightness 4 × i, or ``pixels``. times: of the frames, in ms. audio: (channels, n) at RATE."""
    file = io.BytesIO()
    times = list(times)
    with av.open(file, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.height, stream.width = size
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        track: Any = None
        if audio is not None:
            track = container.add_stream(audio_codec, rate=RATE, layout="stereo" if len(audio) == 2 else "mono")
        for number in range(len(times) or count):
            grey = np.full((*size, 3), min(4 * number, 255), np.uint8)
            frame = av.VideoFrame.from_ndarray(grey if pixels is None else pixels, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if audio is not None:
            samples = av.AudioFrame.from_ndarray(np.ascontiguousarray(audio), format="fltp", layout=track.layout)
            samples.sample_rate = RATE
            container.mux(track.encode(samples))
            container.mux(track.encode())
    return file.getvalue()
