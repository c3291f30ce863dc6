"""Whisper's log-mel features of 8 seconds of sound, as the turn detection model needs them.

They equal those of ``transformers.WhisperFeatureExtractor(chunk_length=8)`` with ``do_normalize=True``, which a test
compares; the parent process imports no transformers. Source: Radford et al., "Robust Speech Recognition via Large-Scale
Weak Supervision", 2022, section 2.2; the mel scale is that of Slaney's Auditory Toolbox.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
SAMPLES = 128_000
"""8 seconds at 16 kHz."""
_RATE, _FFT, _HOP, _MELS = 16_000, 400, 160, 80
_AT_A_TIME = 8
"""How many frames are multiplied by the filters at a time: so few that OpenBLAS does it in the calling thread. A larger
product would wake its other threads, each of which then waits actively for more, for 15 to 25 ms."""


def log_mel(sound: Floats) -> Floats:
    """Return the features of a sound: float32 (80, 800). sound: float32 (128000,), 16 kHz."""
    normal = (sound - sound.mean()) / np.sqrt(sound.var() + 1e-7)
    frames = sliding_window_view(np.pad(normal, _FFT // 2, mode="reflect"), _FFT)[:-1:_HOP]
    window, filters = _tables()
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    mels = np.concatenate([frames @ filters for frames in np.split(power, len(power) // _AT_A_TIME)])
    features = np.log10(np.maximum(mels, 1e-10)).T
    features = np.maximum(features, features.max() - 8)
    return np.ascontiguousarray((features + 4) / 4, np.float32)


@functools.cache
def _tables() -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]:
    """Return a periodic Hann window (400,), and the mel filters (201, 80): triangles of equal area."""
    edges = _hertz(np.linspace(0, _mel_of_nyquist(), _MELS + 2))
    frequencies = np.linspace(0, _RATE / 2, _FFT // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    triangles = np.maximum(0, np.minimum(rising, falling))
    return np.hanning(_FFT + 1)[:-1], triangles * 2 / (edges[2:] - edges[:-2])


_LINEAR_MELS = 15.0
"""Below this mel, which is 1,000 Hz, the scale is linear; above, it is logarithmic."""
_STEP = np.log(6.4) / 27


def _hertz(mels: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.where(mels < _LINEAR_MELS, mels * 200 / 3, 1000 * np.exp(_STEP * (mels - _LINEAR_MELS)))


def _mel_of_nyquist() -> float:
    return _LINEAR_MELS + float(np.log(_RATE / 2 / 1000) / _STEP)
