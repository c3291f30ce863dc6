"""Qwen3-Omni's code2wav, a few frames at a time, with the samples of all frames at once.

The decoder is causal: a transformer with sliding-window attention, then convolutions that look back. So what a frame
needs of those before it is bounded, and can be carried: the last ``sliding_window - 1`` keys and values of each layer,
and the last inputs of each convolution. Each frame is computed once, at any chunk size; only floating-point rounding
differs (other shapes, other order of additions). The reference decodes 300 frames with 25 of left context again, which
is not its own full forward; ``decode_reference`` is that, bit for bit.

A transposed convolution of kernel 2r and stride r gives r samples for each *pair* of neighbours: its first input gives
none. That is where the full forward loses its last 555 samples (at the real strides), and so does this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2Wav,
)

REFERENCE_CHUNK, REFERENCE_CONTEXT = 300, 25


class DecoderState:
    """What one request's decoder carries from chunk to chunk. Fresh: nothing was decoded."""

    def __init__(self) -> None:
        self.frames = 0
        """Decoded so far."""
        self.keys: list[Tensor] = []
        """By layer, (heads, at most sliding_window - 1, head_dim), rotated for their own positions."""
        self.values: list[Tensor] = []
        self.tails: dict[int, Tensor] = {}
        """By convolution, (channels, past inputs)."""


class _Batch:
    """The states of the requests in the forward that is under way; None outside of one."""

    def __init__(self) -> None:
        self.states: Sequence[DecoderState] | None = None

    def past(self, place: int) -> Tensor | None:
        """(batch, channels, past inputs) of a convolution; None where there are none."""
        assert self.states is not None
        if place not in self.states[0].tails:
            return None
        return torch.stack([state.tails[place] for state in self.states])

    def keep(self, place: int, inputs: Tensor) -> None:
        assert self.states is not None
        for state, row in zip(self.states, inputs, strict=True):
            state.tails[place] = row.clone()  # a view would keep the whole chunk


class _Convolution(nn.Module):
    """A causal convolution of stride 1 that begins with the inputs before its own, not with zeros."""

    def __init__(self, whole: Qwen3OmniMoeCausalConvNet, batch: _Batch, place: int) -> None:
        super().__init__()
        assert whole.stride == 1
        self.whole, self._batch, self._place = whole, batch, place

    def forward(self, x: Tensor) -> Tensor:
        if self._batch.states is None:
            return self.whole(x)  # type: ignore[no-any-return]
        past = self._batch.past(self._place)
        if past is None:
            past = x.new_zeros(*x.shape[:2], self.whole.padding)
        x = torch.cat([past, x], -1)
        self._batch.keep(self._place, x[..., x.shape[-1] - self.whole.padding :])
        return self.whole.conv(x)  # type: ignore[no-any-return]


class _Upsampling(nn.Module):
    """A transposed convolution of kernel 2r and stride r that pairs its first input with the one before it."""

    def __init__(self, whole: Qwen3OmniMoeCausalTransConvNet, batch: _Batch, place: int) -> None:
        super().__init__()
        assert whole.conv.kernel_size[0] == 2 * whole.conv.stride[0]
        self.whole, self._batch, self._place = whole, batch, place

    def forward(self, x: Tensor) -> Tensor:
        if self._batch.states is not None:
            past = self._batch.past(self._place)
            if past is not None:
                x = torch.cat([past, x], -1)
            self._batch.keep(self._place, x[..., -1:])
        return self.whole(x)  # type: ignore[no-any-return]


class _Window:
    """The transformer's cache, in the form in which its layers ask for one: past keys and values, right-aligned."""

    def __init__(self, states: Sequence[DecoderState], window: int) -> None:
        self._states, self._window = states, window
        self.lengths = [state.keys[0].shape[-2] if state.keys else 0 for state in states]
        self.longest = max(self.lengths)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """(batch, heads, new, head_dim) each; gives past and new ones, (batch, heads, longest + new, head_dim)."""
        kept = []
        for name, new in (("keys", keys), ("values", values)):
            whole = torch.cat([self._past(name, new, layer), new], -2)
            for state, row, length in zip(self._states, whole, self.lengths, strict=True):
                own = row[:, self.longest - length :]
                by_layer: list[Tensor] = getattr(state, name)
                by_layer[layer : layer + 1] = [own[:, max(0, own.shape[1] - self._window + 1) :].clone()]
            kept.append(whole)
        return kept[0], kept[1]

    def _past(self, name: str, new: Tensor, layer: int) -> Tensor:
        past = new.new_zeros(new.shape[0], new.shape[1], self.longest, new.shape[3])
        for row, state, length in zip(past, self._states, self.lengths, strict=True):
            if length:
                row[:, self.longest - length :] = getattr(state, name)[layer]
        return past

    def mask(self, new: int, device: torch.device) -> Tensor:
        """Which of the past and new positions each new one may look at: bool (batch, 1, new, longest + new)."""
        query = torch.arange(new, device=device).view(1, new, 1)
        key = torch.arange(-self.longest, new, device=device).view(1, 1, -1)
        first = -torch.tensor(self.lengths, device=device).view(-1, 1, 1)
        seen = (key <= query) & (query - key < self._window) & (key >= first)
        return seen.unsqueeze(1)


class StreamingDecoder:
    """Takes a code2wav module over: its convolutions carry state from now on, where they are given any."""

    def __init__(self, model: Qwen3OmniMoeCode2Wav) -> None:
        self._model: Any = model
        self._batch = _Batch()
        self._window: int = model.config.sliding_window
        self.groups: int = model.config.num_quantizers
        self.codebook: int = model.config.codebook_size
        for place, (name, module) in enumerate(list(model.named_modules())):
            carrying: nn.Module | None = None
            if isinstance(module, Qwen3OmniMoeCausalConvNet) and module.padding:
                carrying = _Convolution(module, self._batch, place)
            elif isinstance(module, Qwen3OmniMoeCausalTransConvNet) and module.left_pad:
                carrying = _Upsampling(module, self._batch, place)
            if carrying is not None:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, carrying)

    @torch.inference_mode()
    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> Tensor:
        """The samples that follow: float (batch, samples), in [-1, 1]. The states move on.

        codes: int64 (batch, groups, frames), frames at least 1. The states are all fresh or all not: a first chunk has
        fewer samples than its frames' worth.
        """
        model = self._model
        frames = codes.shape[-1]
        hidden = model.code_embedding(codes + model.code_offset).mean(1)
        window = _Window(states, self._window)
        first = torch.tensor([state.frames for state in states], device=codes.device).view(-1, 1)
        mask = window.mask(frames, codes.device)
        hidden = model.pre_transformer(
            inputs_embeds=hidden,
            attention_mask={"full_attention": mask, "sliding_attention": mask},
            position_ids=first + torch.arange(frames, device=codes.device),
            past_key_values=window,
        ).last_hidden_state
        with self._carrying(states):
            wave = self._convolve(hidden.permute(0, 2, 1))
        for state in states:
            state.frames += frames
        return wave.squeeze(1)

    @torch.inference_mode()
    def decode_reference(self, codes: Tensor) -> Tensor:
        """As the reference decodes the whole of ``codes``, int64 (batch, groups, frames), in chunks of 300 and 25."""
        wave: Tensor = self._model.chunked_decode(codes, REFERENCE_CHUNK, REFERENCE_CONTEXT)
        return wave.squeeze(1)

    def _convolve(self, hidden: Tensor) -> Tensor:
        for blocks in self._model.upsample:
            for block in blocks:
                hidden = block(hidden)
        for block in self._model.decoder:
            hidden = block(hidden)
        return hidden.clamp(min=-1, max=1)

    @contextmanager
    def _carrying(self, states: Sequence[DecoderState]) -> Iterator[None]:
        self._batch.states = states
        try:
            yield
        finally:
            self._batch.states = None
