"""The audio formats of the protocol: bytes of PCM16 or G.711 to and from samples."""

from __future__ import annotations

import io
from typing import Any, TypeAlias

import numpy as np
import soundfile
import soxr

from omni_actors.outputs import AudioChunk
from omni_actors.serve.realtime.config import PCM, PCMA, PCMU, AudioFormat

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

_SUBTYPES: dict[type, str] = {PCM: "PCM_16", PCMU: "ULAW", PCMA: "ALAW"}


def rate_of(format: AudioFormat) -> int:
    """Return the sample rate in Hz."""
    return format.rate if isinstance(format, PCM) else 8000


def frame_bytes(format: AudioFormat) -> int:
    """Return the bytes of one sample."""
    return 2 if isinstance(format, PCM) else 1


def bytes_per_s(format: AudioFormat) -> int:
    return rate_of(format) * frame_bytes(format)


def decode(data: bytes, format: AudioFormat) -> Floats:
    """Return the samples of whole frames: float32 (n,) in [-1, 1], at ``rate_of(format)``."""
    if not data:
        return np.empty(0, np.float32)
    samples: Floats
    samples, _ = soundfile.read(
        io.BytesIO(data),
        dtype="float32",
        samplerate=rate_of(format),
        channels=1,
        format="RAW",
        subtype=_SUBTYPES[type(format)],
        endian="LITTLE",
    )
    return samples


def encode(samples: Floats, format: AudioFormat) -> bytes:
    """Return the bytes of samples: float32 (n,), clipped to [-1, 1], at ``rate_of(format)``."""
    clipped = (np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2")
    if isinstance(format, PCM):
        return clipped.tobytes()
    file = io.BytesIO()
    soundfile.write(file, clipped, rate_of(format), format="RAW", subtype=_SUBTYPES[type(format)])
    return file.getvalue()


class SoundEncoder:
    """Encodes the sound of one answer, whose chunks have one sample rate."""

    def __init__(self, format: AudioFormat) -> None:
        self.format = format
        self._resampler: soxr.ResampleStream | None = None

    def push(self, chunk: AudioChunk) -> bytes:
        """Return the bytes that a chunk adds."""
        if self._resampler is None and chunk.sample_rate != rate_of(self.format):
            self._resampler = soxr.ResampleStream(chunk.sample_rate, rate_of(self.format), 1, dtype="float32")
        samples = chunk.samples if self._resampler is None else self._resampler.resample_chunk(chunk.samples)
        return encode(samples, self.format)

    def finish(self) -> bytes:
        """Return the rest of the bytes."""
        if self._resampler is None:
            return b""
        return encode(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True), self.format)
