"""Qwen2.5-Omni's vocoder (a BigVGAN), a piece at a time: a mel spectrogram to the samples of all of it at once.

It is made of convolutions that look to both sides, so a sample depends on the frames within some reach, 39 at the real
sizes. A piece is decoded with that much on either side, of which nothing is kept: its samples are those of the whole,
but for rounding. At the ends of the whole there is nothing beyond to be decoded with, as in the whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

ACTIVATION = 6
"""Samples on either side that an activation depends on: it works at twice the rate, between two filters of 12 taps."""


class Vocoder:
    def __init__(self, model: Qwen2_5OmniToken2WavBigVGANModel) -> None:
        config: Any = model.config
        self.model: Any = model
        self.samples: int = math.prod(config.upsample_rates)
        """Of a frame."""
        self.reach = _reach(config)
        """Frames."""


class VocoderStream:
    """One request's spectrogram on its way to sound."""

    def __init__(self, vocoder: Vocoder) -> None:
        self._vocoder = vocoder
        self._mel: Tensor | None = None
        """(frames, mel), from frame ``_first`` on."""
        self._first = self._done = 0

    def push(self, mel: Tensor) -> None:
        """float32 (frames, mel)."""
        self._mel = mel if self._mel is None else torch.cat([self._mel, mel])

    @torch.inference_mode()
    def pop(self, frames: int, *, last: bool) -> Tensor | None:
        """The samples of the next ``frames``, float32 (n,), fewer at the end; None where they are not certain yet.

        last: no more mel comes.
        """
        if self._mel is None:
            return None
        vocoder, end = self._vocoder, self._first + len(self._mel)
        stop = min(self._done + frames, end)
        if stop == self._done or (not last and stop + vocoder.reach > end):
            return None
        window = self._mel[: stop + vocoder.reach - self._first]
        wave: Tensor = vocoder.model(window.T[None]).reshape(-1)
        piece = wave[(self._done - self._first) * vocoder.samples : (stop - self._first) * vocoder.samples]
        self._done = stop
        first = max(0, stop - vocoder.reach)
        self._mel, self._first = self._mel[first - self._first :].clone(), first
        return piece


def _reach(config: Any) -> int:
    """How many frames to either side a sample depends on, at most."""
    frames, rate = 3.0, 1  # the first convolution's 7 taps
    for stride, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        frames += math.ceil(kernel / stride) / rate
        rate *= stride
        frames += max(map(_block_reach, config.resblock_kernel_sizes, config.resblock_dilation_sizes)) / rate
    return math.ceil(frames + (ACTIVATION + 3) / rate)


def _block_reach(kernel: int, dilations: list[int]) -> int:
    """Samples: for each dilation a dilated convolution and a plain one, with an activation before each."""
    return sum((kernel // 2) * (dilation + 1) + 2 * ACTIVATION for dilation in dilations)
