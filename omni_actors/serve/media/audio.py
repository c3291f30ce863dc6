"""Convert audio between files and samples.

Rules
1. Inside the pipeline, audio is float32, mono, full scale ±1. Outside, it is int16, little-endian, clipped.
2. WAV and FLAC keep the pipeline's sample rate. PCM, MP3, AAC and Opus are at ``PCM_RATE``, as in OpenAI's API.
3. The size of a file does not limit its audio (a FLAC of silence), and its header may be wrong. So decoding counts
   samples, appends to one array, and stops at the limit. Few files are decoded at the same time. What is decoded
   counts in the budget of all requests' audio (``access.admission``).
4. libsndfile decodes WAV, FLAC and Ogg in this process, by their first bytes, and opens nothing else: its other readers
   write to stdout and stderr, into the server's log, for each damaged frame (MP3, SDS, AIFF). FFmpeg decodes all other
   files, and the codings in which libsndfile cannot seek (GSM, G.721, …), in a process with limits of its own
   (``media.containers``).
5. FFmpeg encodes. A streamed file is written without seeking, and each packet is sent when it is complete.
"""

from __future__ import annotations

import io
from typing import Any, Literal, NamedTuple, TypeAlias

import av
import numpy as np
import soundfile
import soxr
import trio

from omni_actors.outputs import AudioChunk
from omni_actors.serve.access.admission import AdmissionTicket
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.media.containers import CONTAINERS, FRAMES, MAX_AUDIO_S, MAX_SAMPLES, decode_container, too_long

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm"]

PCM_RATE = 24000
_BLOCK = 1 << 18
_DECODERS = trio.CapacityLimiter(2)
"""A decoder may keep a request's whole audio, even after its client has left. Trio's default of 40 is too many."""
_ENCODED_SAMPLES = 6000
"""Samples between two checkpoints of an encoder. They take a few milliseconds."""


class _Coding(NamedTuple):
    """FFmpeg's names of a container and a codec, the bits a second, and options of the container."""

    container: str
    codec: str
    bit_rate: int | None = None
    options: dict[str, str] = {}  # noqa: RUF012  # it is never changed


_CODINGS: dict[AudioFormat, _Coding] = {
    "wav": _Coding("wav", "pcm_s16le"),
    "flac": _Coding("flac", "flac"),
    "mp3": _Coding("mp3", "libmp3lame", 64_000, {"id3v2_version": "0"}),
    "opus": _Coding("ogg", "libopus", 64_000, {"page_duration": "100000"}),  # in microseconds
    "aac": _Coding("adts", "aac", 64_000),
}
_OPTIONS = {"flush_packets": "1", "fflags": "+bitexact"}
"""Options of all containers: write each packet at once, and no name of the encoder."""


def pcm16(samples: Floats) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Return samples as int16 (n,), little-endian. samples: float32 (n,), clipped to [-1, 1]."""
    return (np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2")


async def decode(files: list[tuple[bytes, str]], ticket: AdmissionTicket) -> list[AudioChunk]:
    """Decode audio files, each given with the parameter that contains it. The ticket counts the samples' bytes.

    Raises HTTPError about the parameter, or 429. Cancellation: a thread finishes its work in the background, and a
    process is ended.
    """
    clips: list[AudioChunk] = []
    left_s, left = float(MAX_AUDIO_S), MAX_SAMPLES
    for data, param in files:
        found = await trio.to_thread.run_sync(
            _decode, data, param, left_s, left, abandon_on_cancel=True, limiter=_DECODERS
        )
        if isinstance(found, str):
            limiter = FRAMES if _begins_with_frames(data) else CONTAINERS
            found = await decode_container(data, param, max_s=left_s, max_samples=left, reason=found, limiter=limiter)
        ticket.add_audio(found.samples.nbytes)
        left_s -= found.duration_s
        left -= len(found.samples)
        clips.append(found)
    return clips


def _begins_with_frames(data: bytes) -> bool:
    """Return whether a file begins as MP3 or AAC without a container does."""
    return data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")


def _is_for_libsndfile(data: bytes) -> bool:
    """Return whether a file begins as WAV, FLAC or Ogg does."""
    return data[:4] in (b"fLaC", b"OggS") or (data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE")


def _decode(data: bytes, param: str, max_s: float, max_samples: int) -> AudioChunk | str:
    """Decode a file. Returns the reason if libsndfile cannot or must not read it (rule 4). Raises HTTPError."""
    if _begins_with_frames(data):
        return "it is not valid MP3 or AAC"
    if not _is_for_libsndfile(data):
        return "FFmpeg cannot read it"
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.subtype.startswith("MPEG"):
                return "it is not valid MP3"
            if not file.seekable():  # codings (GSM, G.721, …) of which libsndfile does not tell the length
                return f"FFmpeg cannot read its coding, {file.subtype}"
            samples, total = np.empty(0, np.float32), 0
            limit = min(max_samples, int(max_s * file.samplerate))
            size = max(1, _BLOCK // file.channels)  # the first read costs one block, however many channels it claims
            # A file may claim more than it has. ``blocks`` would fill that up with memory of earlier requests.
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                begin, total = total, total + len(block)
                if total > limit:
                    raise too_long(param)
                samples.resize(total, refcheck=False)  # in place: there is no other reference
                block.mean(axis=1, dtype=np.float32, out=samples[begin:])
            rate = file.samplerate
    except soundfile.LibsndfileError as error:
        return str(error.error_string)
    if not total:
        raise bad_request(f"{param}: the audio file is empty", param, "invalid_audio")
    return AudioChunk(samples, rate)


class AudioEncoder:
    """Encodes the audio of one response, chunk by chunk.

    Args:
        format: "pcm" is int16 without a header.
        streamed: whether ``push`` returns data as soon as it exists; the header of a streamed file does not contain the
            file's length. Otherwise ``finish`` returns the complete file. FLAC cannot be streamed, because common
            readers (libsndfile) need the length.
    """

    def __init__(self, format: AudioFormat, *, streamed: bool) -> None:
        self._format, self._streamed = format, streamed
        self._sink: _Sink | io.BytesIO = _Sink() if streamed or format == "pcm" else io.BytesIO()
        self._container: Any = None
        self._stream: Any = None
        self._rate = PCM_RATE
        self._resampler: soxr.ResampleStream | None = None
        self._is_started = False
        self._encoded = 0
        """Samples so far."""

    async def push(self, chunk: AudioChunk) -> bytes:
        """Encode a chunk, and return the data to send now. Chunks of a response have one sample rate."""
        if not self._is_started:
            self._start(chunk.sample_rate)
        samples = chunk.samples
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        await self._encode(samples)
        return self._take() if self._streamed else b""

    async def finish(self) -> bytes:
        """End the file, and return the rest of the data. A file without audio has a header, if its format has one."""
        if not self._is_started:
            self._start(PCM_RATE)
        if self._resampler is not None:
            await self._encode(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        if self._container is not None:
            if self._encoded:
                self._container.mux(self._stream.encode(None))
            self._container.close()
        return self._take()

    def _start(self, rate: int) -> None:
        self._is_started = True
        if self._format not in ("wav", "flac") and rate != PCM_RATE:
            self._resampler = soxr.ResampleStream(rate, PCM_RATE, 1, dtype="float32")
            rate = PCM_RATE
        self._rate = rate
        if self._format == "pcm":
            return
        coding = _CODINGS[self._format]
        self._container = av.open(self._sink, "w", format=coding.container, options={**_OPTIONS, **coding.options})
        self._stream = self._container.add_stream(coding.codec, rate=rate, layout="mono")
        if coding.bit_rate is not None:
            self._stream.bit_rate = coding.bit_rate
        self._container.start_encoding()

    def _take(self) -> bytes:
        return self._sink.take() if isinstance(self._sink, _Sink) else self._sink.getvalue()

    async def _encode(self, samples: Floats) -> None:
        for begin in range(0, len(samples), _ENCODED_SAMPLES):
            await trio.lowlevel.checkpoint()
            data = pcm16(samples[begin : begin + _ENCODED_SAMPLES])
            if self._container is None:
                self._sink.write(data.tobytes())
                continue
            frame = av.AudioFrame.from_ndarray(data[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts = self._rate, self._encoded
            self._encoded += len(data)
            self._container.mux(self._stream.encode(frame))


class _Sink:
    """A file without positions, whose data can be taken while it grows."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        """Remove and return all data."""
        data = bytes(self._data)
        self._data.clear()
        return data
