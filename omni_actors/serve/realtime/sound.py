"""The audio formats of the protocol: bytes of PCM16 or G.711 to and from samples."""

from __future__ import annotations

import io

import numpy as np
import soundfile
import soxr

from omni_actors.outputs import AudioChunk
from omni_actors.serve.media.audio import Floats, pcm16
from omni_actors.serve.realtime.config import PCM, PCMA, PCMU, AudioFormat

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
    data = pcm16(samples)
    if isinstance(format, PCM):
        return data.tobytes()
    file = io.BytesIO()
    soundfile.write(file, data, rate_of(format), format="RAW", subtype=_SUBTYPES[type(format)])
    return file.getvalue()


class SoundDecoder:
    """Decodes a stream of sound that is cut anywhere, and changes its sample rate.

    Args:
        format: of the stream.
        rate: of the samples, in Hz.
    """

    def __init__(self, format: AudioFormat, rate: int) -> None:
        self._format = format
        self._rest = b""
        """The begin of a frame whose end has not arrived."""
        self._resampler = soxr.ResampleStream(rate_of(format), rate, 1, dtype="float32", quality="LQ")

    def push(self, data: bytes) -> Floats:
        """Return the samples that the next part of the stream adds: float32 (n,), about [-1, 1]."""
        data = self._rest + data
        whole = len(data) // frame_bytes(self._format) * frame_bytes(self._format)
        self._rest = data[whole:]
        return np.asarray(self._resampler.resample_chunk(decode(data[:whole], self._format)), np.float32)

    def forget_rest(self) -> None:
        """Forget the begin of a frame: the stream goes on with a whole frame."""
        self._rest = b""


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
