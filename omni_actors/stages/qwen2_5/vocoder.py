"""Streaming form of Qwen2.5-Omni's vocoder (BigVGAN, Lee et al., 2023): a mel spectrogram to samples, in chunks.

The vocoder consists of convolutions that look to both sides, so a sample depends on the frames within a bounded reach
(39 frames at the real sizes). Each chunk is decoded with that many frames of context on either side, whose samples are
dropped. The chunk's samples are then those of a decode of the whole spectrogram, apart from rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

ACTIVATION = 6
"""The reach, in samples, of an activation: it works at twice the rate, between two filters of 12 taps."""


class Vocoder:
    """A BigVGAN of transformers, with its measures."""

    def __init__(self, model: Qwen2_5OmniToken2WavBigVGANModel) -> None:
        config: Any = model.config
        self.model: Any = model
        self.samples: int = math.prod(config.upsample_rates)
        """Samples per frame."""
        self.reach = _reach(config)
        """The frames to either side that a sample depends on, at most."""


class VocoderStream:
    """Decodes one request's spectrogram chunk by chunk. silent: the first frames, whose samples are not needed."""

    def __init__(self, vocoder: Vocoder, silent: int = 0) -> None:
        self._vocoder, self._silent = vocoder, silent
        self._mel: Tensor | None = None
        """(frames, mel), from frame number ``_first`` on."""
        self._first = self._done = 0

    def push(self, mel: Tensor) -> None:
        """Add frames, float32 (frames, mel)."""
        self._mel = mel if self._mel is None else torch.cat([self._mel, mel])

    @torch.inference_mode()
    def pop(self, frames: int, *, last: bool) -> Tensor | None:
        """Return the samples, float32 (n,), of the next ``frames`` frames, or of fewer at the end.

        n is 0 if they are not needed.
        None: a frame within their reach has not arrived. last: no frames will follow.
        """
        if self._mel is None:
            return None
        vocoder, end = self._vocoder, self._first + len(self._mel)
        stop = min(self._done + frames, end)
        if stop == self._done or (not last and stop + vocoder.reach > end):
            return None
        samples = self._samples(stop) if stop > self._silent else torch.empty(0)
        self._done = stop
        first = max(0, stop - vocoder.reach)
        self._mel, self._first = self._mel[first - self._first :].clone(), first
        return samples

    def _samples(self, stop: int) -> Tensor:
        """Return the samples of the frames from ``_done`` to ``stop``."""
        assert self._mel is not None
        vocoder = self._vocoder
        wave: Tensor = vocoder.model(self._mel[: stop + vocoder.reach - self._first].T[None]).reshape(-1)
        return wave[(self._done - self._first) * vocoder.samples : (stop - self._first) * vocoder.samples]


def _reach(config: Any) -> int:
    """Return how many frames to either side a sample depends on, at most."""
    frames, rate = 3.0, 1  # the first convolution's 7 taps
    for stride, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        frames += math.ceil(kernel / stride) / rate
        rate *= stride
        frames += max(map(_block_reach, config.resblock_kernel_sizes, config.resblock_dilation_sizes)) / rate
    return math.ceil(frames + (ACTIVATION + 3) / rate)


def _block_reach(kernel: int, dilations: list[int]) -> int:
    """Return a residual block's reach in samples.

    For each dilation it has a dilated convolution and a plain one, with an activation before each.
    """
    return sum((kernel // 2) * (dilation + 1) + 2 * ACTIVATION for dilation in dilations)
