"""Recordings on their way into a model.

A chunk of one: ``tensors`` audio, float32 (n,), full scale ±1; ``data`` sample_rate, int in Hz, and index, int: which
recording of the request this is a piece of. Pieces come in order, and an index never falls.
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
"""Seconds; there is no word in less."""
_RATES = range(1000, 384001)
_LOUDEST = 2.0**31
"""Samples of 32 bits that were never scaled have this; beyond it, feature extractors overflow."""


class Recording(msgspec.Struct):
    index: int
    sample_rate: int
    pieces: list[Floats]

    @property
    def duration_s(self) -> float:
        return sum(map(len, self.pieces)) / self.sample_rate

    def at(self, sample_rate: int) -> Floats:
        """All of it, resampled where it has another rate: float32 (n,)."""
        import soxr

        audio = self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces)
        if self.sample_rate == sample_rate:
            return audio
        resampled: Floats = soxr.resample(audio, self.sample_rate, sample_rate)
        return resampled


class Recordings:
    """Collects the recordings of one request, in the order of their indices. Its methods raise ``InvalidRequest``."""

    def __init__(self) -> None:
        self._arriving: Recording | None = None
        self._latest = -1
        """Its index, or that of the one before."""
        self._complete: list[Recording] = []
        self.duration_s = 0.0
        """Of all that are complete."""

    def feed(self, tensor: Tensor, data: Mapping[str, Any]) -> None:
        """Check a piece and keep a copy."""
        audio, sample_rate = checked(tensor, data)
        index = data.get("index", 0)
        if self._arriving and self._arriving.index != index:
            self.end()
        if self._arriving is None:
            if not isinstance(index, int) or index <= self._latest:
                raise refusal(f"recording {index!r} came after recording {self._latest}")
            self._arriving, self._latest = Recording(index, sample_rate, []), index
        if self._arriving.sample_rate != sample_rate:
            raise refusal(f"recording {index} changes its sample rate")
        self._arriving.pieces.append(audio)

    def end(self) -> None:
        """No more of the one that is arriving."""
        recording, self._arriving = self._arriving, None
        if recording is None:
            return
        if recording.duration_s < SHORTEST_S:
            raise refusal(f"recording {recording.index} is too short: {recording.duration_s:.3f} s", "too_short")
        self._complete.append(recording)
        self.duration_s += recording.duration_s

    def take(self) -> list[Recording]:
        """Hand over those that are complete."""
        complete, self._complete = self._complete, []
        return complete


def checked(tensor: Tensor, data: Mapping[str, Any]) -> tuple[Floats, int]:
    """A copy of the samples, and their rate. Raises ``InvalidRequest``."""
    if tensor.dtype != "float32" or len(tensor.shape) != 1:
        raise refusal(f"mono float32 samples were expected, not {tensor.dtype} {tensor.shape}")
    audio: Floats = tensor.numpy().copy()  # first of all: an exception would keep a view alive
    if not (np.abs(audio) <= _LOUDEST).all():
        raise refusal(f"some samples are not finite, or beyond ±{_LOUDEST:g}")
    sample_rate = data.get("sample_rate")
    if not isinstance(sample_rate, int) or sample_rate not in _RATES:
        raise refusal(f"a sample rate of {_RATES[0]} to {_RATES[-1]} Hz was expected, not {sample_rate!r}")
    return audio, sample_rate


def refusal(message: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(message, param="audio", code=code)
