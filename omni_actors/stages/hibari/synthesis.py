"""hibari's spectral features to a waveform, in chunks of frames. The result equals a synthesis of the whole sentence.

The spectrum of a frame (1200 samples, hop 300, Hann window, 24 kHz) is a sum of three branches. The source is
``hibari/dsp.py`` of hibari-tts 0.2.1 (Apache-2.0), whose function ``synth`` is the reference:

    exp(lh) e^{i π tanh(theta)} · STFT(pulses(f0))  +  exp(ln) · noise  +  exp(lr) e^{i phi}

What a chunk needs from its neighbours:
- The phase of the pulse train is an integral of f0 from the start of the sentence. The first chunk has f0 of the whole
  sentence, and the integral is carried in float64 from block to block.
- An analysis frame extends two hops to either side, so the pulses are made two hops ahead. Beyond the ends of the
  sentence they are mirrored.
- The noise is drawn for the whole sentence at once, because its order depends on the number of frames.
- An output sample is final when the four frames that overlap it are known. The last three hops are carried.
  So behind frames that are skipped, three of them are computed.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy import fft

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Spectrum: TypeAlias = "np.ndarray[Any, np.dtype[np.complex64]]"

SAMPLE_RATE = 24000
HOP = 300
WINDOW = 1200
BINS = WINDOW // 2 + 1
_OVERLAP = WINDOW // HOP
_REACH = WINDOW // 2

_VOICED_HZ = np.float32(40.0)
"""A sample with a lower f0 is unvoiced: it has no pulses."""
_HIGHEST_HZ = np.float32(11000.0)
"""The highest frequency of a harmonic."""
_LOUDEST = np.float32(7.0)
"""Upper bound of log magnitudes."""

_HANN = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)
_ANALYSIS = _HANN / (WINDOW / 4)  # a cosine of amplitude 1 then peaks at 1
_ENERGY = (_HANN * _HANN).reshape(_OVERLAP, HOP)
_TO_NEXT = (((np.arange(HOP) + 0.5) / HOP - 0.5) % 1.0).astype(np.float32)
_TO_PREVIOUS = (1.0 - _TO_NEXT).astype(np.float32)


class SentenceSynthesis:
    """Synthesizes one sentence. f0: of all its frames, float32 (frames,), in Hz. rng: the source of the noise."""

    def __init__(self, f0: Floats, rng: np.random.Generator) -> None:
        self.frames = len(f0)
        self.done = 0
        """Number of frames added so far."""
        self._f0 = np.pad(f0, 1, mode="edge")
        self._rng = rng
        self._pulses = np.empty(self.frames * HOP, np.float32)
        self._pulse_frames = 0
        self._phase = 0.0
        self._unfinished = np.zeros((_OVERLAP - 1, HOP), np.float32)
        self._skipped: list[Floats] = []
        """The arguments of ``add`` for the last frames, if they were skipped."""

    def add(self, lh: Floats, theta: Floats, ln: Floats, lr: Floats, phi: Floats) -> Floats:
        """Add the next f frames, each argument float32 (601, f). Return the samples that are final: float32 (n,).

        The sum of n over the sentence is frames * 300; output is 600 samples late until the last frame.
        """
        if self._skipped:
            skipped, self._skipped = self._skipped, []
            self.done -= skipped[0].shape[1]
            self.add(*skipped)
        start, end = self.done, self.done + lh.shape[1]
        spectrum = self._source(start, end)
        spectrum *= _polar(lh, np.tanh(theta) * np.float32(np.pi))
        spectrum += self._noise[:, start:end] * _magnitude(ln)
        spectrum += _polar(lr, phi)
        pieces = fft.irfft(spectrum.T, n=WINDOW, axis=1)
        pieces *= _HANN
        pieces = pieces.reshape(end - start, _OVERLAP, HOP)
        rows = np.zeros((end - start + _OVERLAP - 1, HOP), np.float32)
        rows[: _OVERLAP - 1] = self._unfinished
        for k in range(_OVERLAP):
            rows[k : k + end - start] += pieces[:, k]
        self.done = end
        self._unfinished = rows[end - start :].copy()
        first, stop = self._final(start, end)
        return (rows[first - start : stop - start] * self._normal(first, stop)).reshape(-1)

    def skip(self, *features: Floats) -> int:
        """Add frames as ``add`` does, but return only the number of samples that are final: they are not needed."""
        start, self.done = self.done, self.done + features[0].shape[1]
        kept = zip(self._skipped or [feature[:, :0] for feature in features], features, strict=True)
        self._skipped = [np.concatenate(parts, axis=1)[:, 1 - _OVERLAP :] for parts in kept]
        first, stop = self._final(start, self.done)
        return (stop - first) * HOP

    @cached_property
    def _noise(self) -> Spectrum:
        return self._rng.standard_normal((BINS, 2 * self.frames), dtype=np.float32).view(np.complex64)

    def _final(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and the last row, exclusive, that become final with frames [start, end).

        Row r is final when frame r is added. The first two rows lie before the start of the sentence.
        """
        margin = _REACH // HOP
        first, stop = max(start, margin), (end if end < self.frames else end + margin)
        return first, max(stop, first)

    def _source(self, start: int, end: int) -> Spectrum:
        """Return the spectrum of the pulse train at frames [start, end): complex64 (601, end - start)."""
        self._make_pulses(min(end + _REACH // HOP, self.frames))
        total = len(self._pulses)
        at = np.abs(np.arange(start * HOP - _REACH, (end - 1) * HOP + _REACH)) % max(2 * (total - 1), 1)
        wave = self._pulses[np.where(at < total, at, 2 * (total - 1) - at)]  # mirrored at both ends of the sentence
        windows = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[::HOP] * _ANALYSIS
        return np.ascontiguousarray(fft.rfft(windows, axis=1).T)

    def _make_pulses(self, end: int) -> None:
        """Extend the pulse train to frame ``end``: all harmonics of f0 up to 11 kHz, with amplitude 1.

        Closed form (Dirichlet kernel): the sum of cos(h t) for h = 1..H is sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2.
        """
        start = self._pulse_frames
        if end <= start:
            return
        f0, half = self._f0[start : end + 2, None], HOP // 2
        curve = np.empty((end - start, HOP), np.float32)  # f0, linear between the centres of the frames
        curve[:, :half] = f0[:-2] * _TO_PREVIOUS[:half] + f0[1:-1] * _TO_NEXT[:half]
        curve[:, half:] = f0[1:-1] * _TO_PREVIOUS[half:] + f0[2:] * _TO_NEXT[half:]
        hz = curve.reshape(-1)
        voiced = hz > _VOICED_HZ
        np.maximum(hz, _VOICED_HZ, out=hz)
        cycles = np.cumsum(np.concatenate(([self._phase], hz)), dtype=np.float64)[1:]
        self._phase = float(cycles[-1])
        t = (np.modf(cycles * (1.0 / SAMPLE_RATE))[0] * (2 * np.pi)).astype(np.float32)
        order = np.floor(_HIGHEST_HZ / hz) + np.float32(0.5)
        below = np.sin(t * np.float32(0.5)) * np.float32(2)
        limit = np.abs(below) <= 2e-3  # at t = 0 the quotient tends to H + 1/2
        pulses = np.where(limit, order, np.sin(order * t) / np.where(limit, np.float32(1), below)) - np.float32(0.5)
        self._pulses[start * HOP : end * HOP] = np.where(voiced, pulses, np.float32(0))
        self._pulse_frames = end

    def _normal(self, first: int, stop: int) -> Floats:
        """Return 1 / (sum of the squared windows) for rows [first, stop): float32 (stop - first, 300)."""
        total = np.zeros((stop - first, HOP), np.float32)
        for k in range(_OVERLAP):
            low, high = max(first, k), min(stop, self.frames + k)  # rows with a frame k hops before
            total[max(low - first, 0) : max(high - first, 0)] += _ENERGY[k]
        return np.reciprocal(np.maximum(total, np.float32(1e-11)))


def _magnitude(log: Floats) -> Floats:
    return np.exp(np.minimum(log, _LOUDEST), dtype=np.float32)


def _polar(log_magnitude: Floats, angle: Floats) -> Spectrum:
    out = np.empty(angle.shape, np.complex64)
    np.cos(angle, out=out.real)
    np.sin(angle, out=out.imag)
    out *= _magnitude(log_magnitude)
    return out
