"""The input audio buffer of a session, and recordings taken from it."""

from __future__ import annotations

import math

import msgspec

from omni_actors.outputs import AudioChunk
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.realtime.config import AudioFormat
from omni_actors.serve.realtime.sound import bytes_per_s, decode, frame_bytes, rate_of

SHORTEST_MS = 100
"""The shortest recording: OpenAI's own limit of a commit."""


class Recording(msgspec.Struct, frozen=True):
    """The sound of one turn of the user. data: its bytes, in ``format``."""

    data: bytes
    format: AudioFormat

    @property
    def duration_s(self) -> float:
        return len(self.data) / bytes_per_s(self.format)

    def clip(self) -> AudioChunk:
        """Return the samples, as the pipeline takes them."""
        return AudioChunk(decode(self.data, self.format), rate_of(self.format))


def recording_of(data: bytes, format: AudioFormat, most_s: float, place: str) -> Recording:
    """Return the recording that a client's item has.

    Args:
        data: the sound. The last frame may be cut, and is left out then.
        format: of the sound.
        most_s: the longest recording, in seconds.
        place: the client's name of the sound.

    Raises HTTPError: it is too short or too long.
    """
    recording = Recording(data[: len(data) - len(data) % frame_bytes(format)], format)
    found_ms = 1000 * recording.duration_s
    if not SHORTEST_MS <= found_ms <= 1000 * most_s:
        whole_ms = math.floor(found_ms) if found_ms < SHORTEST_MS else math.ceil(found_ms)
        message = f"{place}: {whole_ms} ms of sound; accepted: {SHORTEST_MS} to {1000 * most_s:.0f} ms"
        raise bad_request(message, place)
    return recording


class InputAudio:
    """The buffer. Positions count from the first sound of the session, in milliseconds.

    most_s: the longest recording, in seconds.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._data = bytearray()
        self._begins_ms = 0.0

    @property
    def nbytes(self) -> int:
        return len(self._data)

    @property
    def begins_ms(self) -> float:
        """The position of the begin of the buffer."""
        return self._begins_ms

    def content(self) -> bytes:
        """Return a copy of the content. Its last frame may be cut."""
        return bytes(self._data)

    def has_room(self, size: int, format: AudioFormat) -> bool:
        """Return whether so many bytes can be added."""
        return len(self._data) + size <= self._most_s * bytes_per_s(format)

    def append(self, data: bytes, format: AudioFormat) -> None:
        """Add sound. A frame may be cut anywhere. Raises HTTPError: the buffer is full."""
        if not self.has_room(len(data), format):
            message = f"audio: the buffer holds {self._most_s:g} s of sound; commit or clear it"
            raise bad_request(message, "audio", "input_audio_buffer_full")
        self._data += data

    def end_ms(self, format: AudioFormat) -> float:
        """Return the position of the end of the buffer."""
        return self._begins_ms + 1000 * len(self._data) / bytes_per_s(format)

    def clear(self, format: AudioFormat) -> None:
        """Drop the content."""
        self._begins_ms = self.end_ms(format)
        self._data.clear()

    def forget(self, before_ms: float, format: AudioFormat) -> None:
        """Drop the content before a position, in whole frames."""
        size = self._size_until(before_ms, format)
        del self._data[:size]
        self._begins_ms += 1000 * size / bytes_per_s(format)

    def _size_until(self, position_ms: float, format: AudioFormat) -> int:
        """Return the bytes of the whole frames before a position."""
        frames = round((position_ms - self._begins_ms) * rate_of(format) / 1000)
        return max(0, min(frames, len(self._data) // frame_bytes(format))) * frame_bytes(format)

    def recording(self, format: AudioFormat, until_ms: float | None = None) -> Recording:
        """Return a copy of the content; with ``until_ms``, of the sound before that position.

        Raises HTTPError: it is too short.
        """
        end_ms = self.end_ms(format) if until_ms is None else until_ms
        whole = self._size_until(end_ms, format)
        recording = Recording(bytes(self._data[:whole]), format)
        if 1000 * recording.duration_s < SHORTEST_MS:
            found_ms = math.floor(1000 * recording.duration_s)
            message = f"the input audio buffer has {found_ms} ms of sound; accepted: {SHORTEST_MS} ms or more"
            raise bad_request(message, None, "input_audio_buffer_commit_empty")
        return recording
