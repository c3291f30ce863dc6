"""Streaming decoder of Qwen3-Omni's code2wav: a few frames at a time, with the samples of one forward over all frames.

The decoder is causal: a transformer with sliding-window attention, then convolutions that look back. So the state that
a frame needs of earlier ones is bounded: the last ``sliding_window - 1`` keys and values of each layer, and the last
inputs of each convolution. With that state each frame is computed once, at any chunk size, and only floating-point
rounding differs (other shapes, another order of additions).

A state can also be computed from codes whose samples are not needed (``skip``). A layer's keys depend on those of the
layer below, so this takes more frames than a state has: ``sliding_window - 1`` for each layer, and those before that
the convolutions reach (578 at the real sizes, 46 s of speech; of these, the convolutions compute 10 only).

The reference, transformers' ``chunked_decode``, decodes 300 frames at a time with 25 earlier frames as context. That
differs from its own full forward.

A transposed convolution of kernel 2r and stride r makes r samples of each *pair* of neighbouring inputs, and none of
its first input. So the full forward has 555 samples less than its frames' worth (at the real strides), and so has this
one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling


class DecoderState:
    """The state that one request's decoder carries from chunk to chunk. A fresh state has decoded nothing."""

    def __init__(self) -> None:
        self.frames = 0
        """Frames decoded so far."""
        self.past: list[Tensor] = []
        """Per layer, its keys and values: (2, heads, at most sliding_window - 1, head_dim), with rotary positions."""
        self.tails: dict[int, Tensor] = {}
        """Per convolution, by its index: (channels, past inputs)."""


class _Carrying(nn.Module):
    """A convolution whose inputs follow its past inputs.

    inner: the convolution. states: of the requests in the current forward. place: the convolution's index. first: the
    zeros before its first input. kept: the past inputs that the next chunk needs.
    """

    def __init__(self, inner: nn.Module, states: list[DecoderState], place: int, *, first: int, kept: int) -> None:
        super().__init__()
        self.inner, self._states, self._place, self._first, self._kept = inner, states, place, first, kept

    def forward(self, x: Tensor) -> Tensor:
        if self._place in self._states[0].tails:
            past = torch.stack([state.tails[self._place] for state in self._states])
        else:
            past = x.new_zeros(*x.shape[:2], self._first)
        x = torch.cat([past, x], -1)
        for state, inputs in zip(self._states, x[..., x.shape[-1] - self._kept :], strict=True):
            state.tails[self._place] = inputs.clone()  # a view would keep the whole chunk alive
        return self.inner(x)  # type: ignore[no-any-return]


class _Window:
    """The transformer's cache, in the form that its layers expect: past keys and values, right-aligned."""

    def __init__(self, states: Sequence[DecoderState], window: int) -> None:
        self._states, self._window = states, window
        self.lengths = [state.past[0].shape[-2] if state.past else 0 for state in states]
        self.longest = max(self.lengths)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keep new keys and values, (batch, heads, new, head_dim) each; return past and new ones together.

        They are (batch, heads, longest + new, head_dim) each.
        """
        new = torch.stack([keys, values], 1)
        past = new.new_zeros(*new.shape[:3], self.longest, new.shape[4])
        for row, state, length in zip(past, self._states, self.lengths, strict=True):
            if length:
                row[:, :, self.longest - length :] = state.past[layer]
        whole = torch.cat([past, new], -2)
        for row, state, length in zip(whole, self._states, self.lengths, strict=True):
            own = row[:, :, self.longest - length :]
            state.past[layer : layer + 1] = [own[:, :, max(0, own.shape[2] - self._window + 1) :].clone()]
        return whole[:, 0], whole[:, 1]

    def mask(self, new: int, device: torch.device) -> Tensor:
        """Return which past and new positions each new one attends to: bool (batch, 1, new, longest + new)."""
        query = torch.arange(new, device=device).view(1, new, 1)
        key = torch.arange(-self.longest, new, device=device).view(1, 1, -1)
        first = -torch.tensor(self.lengths, device=device).view(-1, 1, 1)
        seen = (key <= query) & (query - key < self._window) & (key >= first)
        return seen.unsqueeze(1)


class StreamingDecoder:
    """Decodes with a code2wav module, which it changes: the convolutions carry state inside ``decode``."""

    def __init__(self, model: modeling.Qwen3OmniMoeCode2Wav) -> None:
        self._model: Any = model
        self._states: list[DecoderState] = []
        self._window: int = model.config.sliding_window
        reach = _reach(model)
        self._convolved = reach
        """The frames before one that its samples depend on, through the convolutions, at most."""
        self.reach: int = reach + model.config.num_hidden_layers * (self._window - 1)
        """The same through the whole decoder."""
        for place, (name, module) in enumerate(list(model.named_modules())):
            if isinstance(module, modeling.Qwen3OmniMoeCausalConvNet) and module.padding:
                assert module.stride == 1
                carrying = _Carrying(module.conv, self._states, place, first=module.padding, kept=module.padding)
            elif isinstance(module, modeling.Qwen3OmniMoeCausalTransConvNet) and module.left_pad:
                assert module.conv.kernel_size[0] == 2 * module.conv.stride[0]
                carrying = _Carrying(module, self._states, place, first=0, kept=1)
            else:
                continue
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, carrying)

    @torch.inference_mode()
    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> Tensor:
        """Decode the next frames of some requests: float (batch, samples), in [-1, 1]. Updates the states.

        codes: int64 (batch, groups, frames), at least one frame. The states must be all fresh or all not fresh, because
        a first chunk has fewer samples.
        """
        return self._convolve(self._transform(codes, states), states)

    @torch.inference_mode()
    def skip(self, codes: Tensor, state: DecoderState) -> None:
        """Bring a fresh state behind the first frames of a request, as ``decode`` would, apart from rounding.

        codes: int64 (groups, frames). Only the last ``reach`` frames are computed.
        """
        state.frames = max(0, codes.shape[-1] - self.reach)
        hidden = self._transform(codes[None, :, state.frames :], [state])
        self._convolve(hidden[:, -self._convolved :], [state])

    def _transform(self, codes: Tensor, states: Sequence[DecoderState]) -> Tensor:
        """Return the transformer's outputs, (batch, frames, hidden), for the next frames."""
        model = self._model
        frames = codes.shape[-1]
        hidden = model.code_embedding(codes + model.code_offset).mean(1)
        window = _Window(states, self._window)
        first = torch.tensor([state.frames for state in states], device=codes.device).view(-1, 1)
        mask = window.mask(frames, codes.device)
        for state in states:
            state.frames += frames
        transformed: Tensor = model.pre_transformer(
            inputs_embeds=hidden,
            attention_mask={"full_attention": mask, "sliding_attention": mask},
            position_ids=first + torch.arange(frames, device=codes.device),
            past_key_values=window,
        ).last_hidden_state
        return transformed

    def _convolve(self, hidden: Tensor, states: Sequence[DecoderState]) -> Tensor:
        """Return the samples, (batch, samples), of the transformer's next outputs."""
        self._states[:] = states
        wave: Tensor = hidden.permute(0, 2, 1)
        for block in chain(*self._model.upsample, self._model.decoder):
            wave = block(wave)
        self._states.clear()
        return wave.clamp(min=-1, max=1).squeeze(1)


def _reach(model: modeling.Qwen3OmniMoeCode2Wav) -> int:
    """Return how many frames before one its samples depend on, at most, through the convolutions."""
    frames, rate = 0.0, 1
    for module in model.modules():
        if isinstance(module, modeling.Qwen3OmniMoeCausalConvNet):
            frames += module.padding / rate
        elif isinstance(module, modeling.Qwen3OmniMoeCausalTransConvNet):
            frames += bool(module.left_pad) / rate
            rate *= module.conv.stride[0]
    return math.ceil(frames)
