"""Sound at the edge: files to samples, samples to files and streams.

Rules
1. Inside, sound is float32, mono, full scale ±1; outside, samples are int16, little-endian.
2. Headerless PCM is at ``PCM_RATE``, as OpenAI's API has it; a WAV is at the pipeline's own rate.
3. A file's size says little about its sound's (a FLAC of silence), and its header may lie: decoding counts samples,
   grows one array as they come, and stops at the limit. Few files are decoded at a time.
"""

from __future__ import annotations

import io
import struct
from typing import Any, TypeAlias

import numpy as np
import soundfile
import soxr
import trio

from omni_actors.generation import AudioChunk
from omni_actors.serve.http.errors import HTTPError, bad_request

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

PCM_RATE = 24000
MAX_AUDIO_S = 600
MAX_SAMPLES = MAX_AUDIO_S * 48000
"""Of all the sound in one request."""
_BLOCK = 1 << 18
_DECODERS = trio.CapacityLimiter(2)
"""A decoder may hold a request's whole sound, also after its client has left: trio's own 40 threads are too many."""
_UNKNOWN = 0xFFFFFFFF


async def decode(files: list[tuple[bytes, str]]) -> list[AudioChunk]:
    """Read audio files, each with the parameter that it came in. Raises HTTPError."""
    if not files:
        return []
    return await trio.to_thread.run_sync(_decode_all, files, abandon_on_cancel=True, limiter=_DECODERS)


def _decode_all(files: list[tuple[bytes, str]]) -> list[AudioChunk]:
    clips: list[AudioChunk] = []
    left = MAX_SAMPLES
    for data, param in files:
        clip = _decode(data, param, left)
        left -= len(clip.samples)
        clips.append(clip)
    return clips


def _decode(data: bytes, param: str, limit: int) -> AudioChunk:
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            samples, total = np.empty(0, np.float32), 0
            limit = min(limit, MAX_AUDIO_S * file.samplerate)
            # The first look costs one block, however many channels the file claims.
            for block in file.blocks(max(1, _BLOCK // file.channels), dtype="float32", always_2d=True):
                begin, total = total, total + len(block)
                if total > limit:
                    raise _too_long(param)
                samples.resize(total, refcheck=False)  # in place: nothing else refers to it
                block.mean(axis=1, dtype=np.float32, out=samples[begin:])
            rate = file.samplerate
    except soundfile.LibsndfileError as error:
        message = f"{param}: this is not audio that can be read: {error.error_string}"
        raise bad_request(message, param, "invalid_audio") from error
    if not total:
        raise bad_request(f"{param}: there is no sound in it", param, "invalid_audio")
    return AudioChunk(samples, rate)


def _too_long(param: str) -> HTTPError:
    message = f"{param}: too long; a request may bring {MAX_AUDIO_S} s of sound"
    return bad_request(message, param, "audio_too_long")


class AudioEncoder:
    """One answer's sound, piece by piece. format: "wav" (a header of unknown length goes first) or "pcm"."""

    def __init__(self, format: str) -> None:
        self._wav = format == "wav"
        self._rate: int | None = None
        self._resampler: soxr.ResampleStream | None = None

    def push(self, chunk: AudioChunk) -> bytes:
        header = b""
        if self._rate is None:
            self._rate = chunk.sample_rate
            if self._wav:
                header = wav_header(self._rate)
            elif self._rate != PCM_RATE:
                self._resampler = soxr.ResampleStream(self._rate, PCM_RATE, 1, dtype="float32")
        samples = chunk.samples
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        return header + pcm16(samples)

    def finish(self) -> bytes:
        """What the resampler held; of a WAV without any sound, its header, so that it is a file."""
        if self._wav and self._rate is None:
            return wav_header(PCM_RATE, 0)
        if self._resampler is None:
            return b""
        return pcm16(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))


def pcm16(samples: Floats) -> bytes:
    """int16, little-endian."""
    return (np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2").tobytes()


def wav_header(rate: int, size: int = _UNKNOWN) -> bytes:
    """Of mono int16 sound. size: bytes of samples; without it, of a stream: readers then read to the end."""
    riff = _UNKNOWN if size == _UNKNOWN else 36 + size
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", size
    )


def complete_file(pieces: list[bytes], format: str) -> bytes:
    """All that an AudioEncoder gave, as one file: a WAV whose header knows its length."""
    data = b"".join(pieces)
    if format != "wav" or not data:
        return data
    rate = struct.unpack_from("<I", data, 24)[0]
    return wav_header(rate, len(data) - 44) + data[44:]
