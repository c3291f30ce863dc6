"""Convert audio between files and samples.

Rules
1. Inside the pipeline, audio is float32, mono, full scale ±1. Outside, it is int16, little-endian, clipped.
2. WAV and FLAC keep the pipeline's sample rate. PCM, MP3 and Opus are at ``PCM_RATE``, as in OpenAI's API.
3. The size of a file does not limit its audio (a FLAC of silence), and its header may be wrong. So decoding counts
   samples, appends to one array, and stops at the limit. Few files are decoded at the same time.
"""

from __future__ import annotations

import io
from typing import Any, Literal, TypeAlias

import numpy as np
import soundfile
import soxr
import trio

from omni_actors.outputs import AudioChunk
from omni_actors.serve.http.errors import bad_request

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
AudioFormat = Literal["wav", "mp3", "flac", "opus", "pcm"]

PCM_RATE = 24000
MAX_AUDIO_S = 600
MAX_SAMPLES = MAX_AUDIO_S * 48000
"""The limit of all audio in one request."""
_BLOCK = 1 << 18
_DECODERS = trio.CapacityLimiter(2)
"""A decoder may keep a request's whole audio, even after its client has left. Trio's default of 40 is too many."""
_CONTAINERS: dict[AudioFormat, dict[str, Any]] = {
    "wav": {"format": "WAV", "subtype": "PCM_16"},
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
    "mp3": {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": "CONSTANT", "compression_level": 0.5},
    "opus": {"format": "OGG", "subtype": "OPUS"},
}
"""libsndfile's arguments. A streamed MP3 needs a constant bit rate: without it, players misjudge the file's length."""
_UNKNOWN_SIZE = b"\xff\xff\xff\xff"
_ENCODED_SAMPLES = 12000
"""Samples between two checkpoints of an encoder. They take a few milliseconds."""


async def decode(files: list[tuple[bytes, str]]) -> list[AudioChunk]:
    """Decode audio files, each given with the parameter that contains it.

    Raises HTTPError about the parameter. Cancellation: the thread finishes its work in the background.
    """
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
            # The first read costs one block, however many channels the file claims to have.
            for block in file.blocks(max(1, _BLOCK // file.channels), dtype="float32", always_2d=True):
                begin, total = total, total + len(block)
                if total > limit:
                    message = f"{param}: too long; a request may have {MAX_AUDIO_S} s of audio"
                    raise bad_request(message, param, "audio_too_long")
                samples.resize(total, refcheck=False)  # in place: there is no other reference
                block.mean(axis=1, dtype=np.float32, out=samples[begin:])
            rate = file.samplerate
    except soundfile.LibsndfileError as error:
        message = f"{param}: not a readable audio file: {error.error_string}"
        raise bad_request(message, param, "invalid_audio") from error
    if not total:
        raise bad_request(f"{param}: the audio file is empty", param, "invalid_audio")
    return AudioChunk(samples, rate)


class AudioEncoder:
    """Encodes the audio of one response, chunk by chunk.

    Args:
        format: "pcm" is int16 without a header.
        streamed: whether ``push`` returns data as soon as it exists; the header of a streamed file does not contain the
            file's length. Otherwise ``finish`` returns the complete file. FLAC cannot be streamed, because common
            readers need the length.
    """

    def __init__(self, format: AudioFormat, *, streamed: bool) -> None:
        self._format, self._streamed = format, streamed
        self._sink = _Sink()
        self._file: soundfile.SoundFile | None = None
        self._resampler: soxr.ResampleStream | None = None
        self._is_started = False

    async def push(self, chunk: AudioChunk) -> bytes:
        """Encode a chunk, and return the data to send now. Chunks of a response have one sample rate."""
        if not self._is_started:
            self._start(chunk.sample_rate)
        samples = chunk.samples
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        await self._encode(samples)
        return self._take_streamed() if self._streamed else b""

    async def finish(self) -> bytes:
        """End the file, and return the rest of the data. A file without audio has a header, if its format has one."""
        if not self._is_started:
            self._start(PCM_RATE)
        if self._resampler is not None:
            await self._encode(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        if self._file is not None:
            self._file.close()
        return self._sink.take()

    def _start(self, rate: int) -> None:
        self._is_started = True
        if self._format not in ("wav", "flac") and rate != PCM_RATE:
            self._resampler = soxr.ResampleStream(rate, PCM_RATE, 1, dtype="float32")
            rate = PCM_RATE
        if self._format != "pcm":
            self._file = soundfile.SoundFile(self._sink, "w", rate, 1, **_CONTAINERS[self._format])

    def _take_streamed(self) -> bytes:
        is_head = self._sink.taken == 0
        data = self._sink.take()
        if self._format == "wav" and is_head and data:  # with an unknown size, readers read to the end
            return data[:4] + _UNKNOWN_SIZE + data[8:40] + _UNKNOWN_SIZE + data[44:]
        return data

    async def _encode(self, samples: Floats) -> None:
        for begin in range(0, len(samples), _ENCODED_SAMPLES):
            await trio.lowlevel.checkpoint()
            clipped = np.clip(samples[begin : begin + _ENCODED_SAMPLES], -1.0, 1.0)
            data = (clipped * 32767.0).round().astype("<i2")
            if self._file is None:
                self._sink.write(data.tobytes())
            else:
                self._file.write(data)


class _Sink:
    """A file for libsndfile whose data can be taken while it grows. Writes to data that was taken have no effect."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.taken = self._position = 0

    def write(self, data: bytes) -> int:
        begin = self._position - self.taken
        if begin >= 0:
            self._data[begin : begin + len(data)] = data
        self._position += len(data)
        return len(data)

    def read(self, size: int) -> bytes:
        return b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self.taken + len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def take(self) -> bytes:
        """Remove and return all data."""
        data = bytes(self._data)
        self.taken += len(data)
        self._data.clear()
        return data
