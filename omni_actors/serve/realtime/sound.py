"""The audio formats of the protocol: bytes of PCM16 or G.711 to and from samples."""

from __future__ import annotations

import functools
import io

import numpy as np
import soundfile
import soxr

from omni_actors.outputs import AudioChunk
from omni_actors.serve.media.audio import Floats, pcm16
from omni_actors.serve.realtime.config import PCM, PCMA, PCMU, AudioFormat

_SUBTYPES: dict[type, str] = {PCMU: "ULAW", PCMA: "ALAW"}
"""libsndfile's names of the laws of G.711."""


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
    if isinstance(format, PCM):
        return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)
    samples: Floats = _samples_of_codes(_SUBTYPES[type(format)])[np.frombuffer(data, np.uint8)]
    return samples


@functools.cache
def _samples_of_codes(law: str) -> Floats:
    """Return the samples of the 256 codes of a law of G.711, by libsndfile's name of it."""
    samples: Floats
    samples, _ = soundfile.read(
        io.BytesIO(bytes(range(256))), dtype="float32", samplerate=8000, channels=1, format="RAW", subtype=law
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


_TAPS = 47


class _LowPass:
    """A windowed-sinc filter of a stream. It delays the stream by 23 samples.

    band: the share of the spectrum that is kept. Its edge is soft: 0 dB a tenth below it, and -40 dB a tenth above it.
    """

    def __init__(self, band: float) -> None:
        taps = np.hamming(_TAPS) * np.sinc(0.95 * band * (np.arange(_TAPS) - _TAPS // 2))
        self._taps = (taps / taps.sum()).astype(np.float32)
        self._tail = np.zeros(_TAPS - 1, np.float32)
        """The latest samples that were taken."""

    def push(self, samples: Floats) -> Floats:
        """Return as many samples as it is given: float32 (n,)."""
        sound = np.concatenate([self._tail, samples])
        self._tail = sound[len(samples) :]
        return np.convolve(sound, self._taps, "valid") if len(samples) else samples


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
        # A cubic spline ("QQ") delays sound by less than 1 ms, and the filter of "LQ" by up to 20 ms (PCM) and 61 ms
        # (G.711). The spline leaves images above 4 kHz, which move no decision of the detectors (bench.turns). Where
        # the rate gets lower it would fold high tones into the speech, so they are filtered out before: 1 ms.
        self._resampler = soxr.ResampleStream(rate_of(format), rate, 1, dtype="float32", quality="QQ")
        self._low_pass = _LowPass(rate / rate_of(format)) if rate < rate_of(format) else None

    def push(self, data: bytes) -> Floats:
        """Return the samples that the next part of the stream adds: float32 (n,), about [-1, 1]."""
        data = self._rest + data
        whole = len(data) // frame_bytes(self._format) * frame_bytes(self._format)
        self._rest = data[whole:]
        samples = decode(data[:whole], self._format)
        if self._low_pass is not None:
            samples = self._low_pass.push(samples)
        return np.asarray(self._resampler.resample_chunk(samples), np.float32)

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
