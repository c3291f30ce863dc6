"""Recordings of a request, collected from its chunks.

A chunk has a piece of one recording: ``tensors["audio"]``, float32 (n,), full scale ±1; ``data["sample_rate"]``, an int
in Hz; and ``data["index"]``, an int, the number of the recording in the request (default 0). The pieces of a recording
arrive in order and without those of another in between; indices increase.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from omni_actors.stages.base import InvalidRequest
from ringbuf import Tensor

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

SHORTEST_S = 0.1
"""Seconds. A shorter recording has no word in it."""
RATES = range(1000, 384001)
"""Sample rates that recordings may have, in Hz."""
EXPECTED_RATE = f"a sample rate of {RATES[0]} to {RATES[-1]} Hz was expected"
"""What is wrong with another sample rate, in words."""
_LOUDEST = 2.0**31
"""The magnitude of 32-bit integer samples that were not scaled. Beyond it, feature extractors overflow."""
WILD_SAMPLES = f"are not finite, or beyond ±{_LOUDEST:g}"
"""What is wrong with samples that are not ``are_usable``, in words."""


class Recording(msgspec.Struct):
    """One recording of a request, as the pieces that have arrived so far.

    index: its number in the request. sample_rate: in Hz. pieces: float32 (n,) each. taken: samples before them.
    """

    index: int
    sample_rate: int
    pieces: list[Floats]
    taken: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds of all pieces together, also of those that were taken."""
        return (self.taken + sum(map(len, self.pieces))) / self.sample_rate

    def take_pieces(self) -> list[Floats]:
        """Return the pieces that have arrived since the last call, and keep them no longer."""
        pieces, self.pieces = self.pieces, []
        self.taken += sum(map(len, pieces))
        return pieces

    def resampled(self, sample_rate: int) -> Floats:
        """Return the whole recording at ``sample_rate`` Hz: float32 (n,)."""
        import soxr

        audio = self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces)
        if self.sample_rate == sample_rate:
            return audio
        resampled: Floats = soxr.resample(audio, self.sample_rate, sample_rate)
        return resampled


class Recordings:
    """Collects the recordings of one request, in the order of their indices."""

    def __init__(self) -> None:
        self._arriving: Recording | None = None
        self._latest = -1
        """The index of the arriving recording, or of the previous one."""
        self._complete: list[Recording] = []
        self.duration_s = 0.0
        """Seconds of all complete recordings."""

    def feed(self, tensor: Tensor, data: Mapping[str, Any]) -> None:
        """Validate a piece and keep a copy. Raises InvalidRequest."""
        audio, sample_rate = copy_samples(tensor, data)
        index = data.get("index", 0)
        if self._arriving and self._arriving.index != index:
            self.end_recording()
        if self._arriving is None:
            if not isinstance(index, int) or index <= self._latest:
                raise audio_refusal(f"recording {index!r} came after recording {self._latest}")
            self._arriving, self._latest = Recording(index, sample_rate, []), index
        if self._arriving.sample_rate != sample_rate:
            raise audio_refusal(f"recording {index} changes its sample rate")
        self._arriving.pieces.append(audio)

    def end_recording(self) -> None:
        """Complete the recording that is arriving, if there is one. Raises InvalidRequest: it is too short."""
        recording, self._arriving = self._arriving, None
        if recording is None:
            return
        if recording.duration_s < SHORTEST_S:
            raise audio_refusal(f"recording {recording.index} is too short: {recording.duration_s:.3f} s", "too_short")
        self._complete.append(recording)
        self.duration_s += recording.duration_s

    @property
    def arriving(self) -> Recording | None:
        """The recording that is not complete yet, if there is one."""
        return self._arriving

    def take_complete(self) -> list[Recording]:
        """Return the complete recordings, and keep them no longer."""
        complete, self._complete = self._complete, []
        return complete


def copy_samples(tensor: Tensor, data: Mapping[str, Any]) -> tuple[Floats, int]:
    """Validate the samples of a chunk. Return a copy, float32 (n,), and the rate in Hz. Raises InvalidRequest."""
    if tensor.dtype != "float32" or len(tensor.shape) != 1:
        raise audio_refusal(f"mono float32 samples were expected, not {tensor.dtype} {tensor.shape}")
    audio: Floats = tensor.numpy().copy()  # before any other check: an exception would keep a view alive
    if not are_usable(audio):
        raise audio_refusal(f"some samples {WILD_SAMPLES}")
    sample_rate = data.get("sample_rate")
    if not isinstance(sample_rate, int) or sample_rate not in RATES:
        raise audio_refusal(f"{EXPECTED_RATE}, not {sample_rate!r}")
    return audio, sample_rate


def are_usable(samples: np.ndarray[Any, Any]) -> bool:
    """Return whether feature extractors bear all of these samples. NaN and infinity they do not."""
    return bool((np.abs(samples) <= _LOUDEST).all())


def audio_refusal(message: str, code: str = "invalid_value") -> InvalidRequest:
    """Return the error for a recording that cannot be used."""
    return InvalidRequest(message, param="audio", code=code)
