"""Qwen2.5-Omni's flow matching, block by block: codes to a mel spectrogram, that of all codes at once.

The model (a DiT) is not causal, but it sees no further than its attention lets it: a layer attends within its block of
``block_size`` frames, one of ``look_backward_layers`` also to the block before, one of ``look_ahead_layers`` also to
the next. All else is done frame by frame. So one evaluation needs, for a block, as many blocks ahead as there are
layers that look ahead (1 at the real sizes), and the solver's 36 evaluations, each of the outcome of the last, 36: that
is 8.64 s of speech. That far behind the codes each block is final, whatever follows.

So a stream carries, for each layer of each evaluation, the keys and values that are still to be seen and the inputs
whose look-ahead has not come (57 MB a request at the real sizes); each frame is computed once, and only floating-point
rounding differs. The work grows with the length, where the whole model's attention computes, and masks, the square.

The solver is Runge and Kutta's 3/8 rule between ``steps`` points in time. The noise that it begins with comes from the
request's seed, a frame after the other: of torch's generator of the CPU, a longer noise begins as a shorter one does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

from omni_actors.stages.qwen2_5.speakers import Speaker

GUIDANCE, SWAY = 0.5, -1.0
"""The strength of the guidance, and how much shorter than the last the solver's first step is: the reference's."""


class Flow:
    """Takes a DiT. steps: points in time, so steps - 1 intervals of 4 evaluations."""

    def __init__(self, dit: Qwen2_5OmniToken2WavDiTModel, steps: int) -> None:
        config: Any = dit.config
        self.dit: Any = dit
        self.device: torch.device = dit.device
        self.repeats: int = config.repeats
        """Frames of a code."""
        self.codes: int = dit.text_embed.codec_embed.num_embeddings
        self.longest: int = config.max_position_embeddings // self.repeats
        """Codes of a request."""
        self.block: int = config.block_size
        if self.block % self.repeats:
            raise ValueError(f"a block of {self.block} frames is no whole number of codes of {self.repeats} frames")
        self.block_codes = self.block // self.repeats
        self.mel: int = config.mel_dim
        times = torch.linspace(0, 1, steps)
        times += SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
        self.intervals = [(float(end - start), self._embedded(start, end)) for start, end in pairwise(times)]
        """Of each, its length and the embeddings of the four points in time where it is evaluated."""

    @torch.inference_mode()
    def _embedded(self, start: Tensor, end: Tensor) -> list[Tensor]:
        """(1, hidden) each."""
        points = [start + (end - start) * part for part in (0, 1 / 3, 2 / 3)] + [end]
        return [self.dit.time_embed(point[None].to(self.device)) for point in points]


class FlowStream:
    """One request's way through the solver."""

    @torch.inference_mode()
    def __init__(self, flow: Flow, speaker: Speaker, seed: int) -> None:
        self._flow = flow
        self._generator = torch.Generator().manual_seed(seed & (2**64 - 1))
        self._voice = _Voice(flow, speaker)
        self._intervals = [_Interval(flow, self._voice, step, times) for step, times in flow.intervals]

    @torch.inference_mode()
    def push(self, codes: Tensor, *, last: bool) -> Tensor:
        """The frames that are final now and were not before: float32 (frames, mel).

        codes: int64 (n,), whole blocks of them unless ``last``.
        """
        flow = self._flow
        self._voice.codes = torch.cat([self._voice.codes, codes.to(flow.device)])
        frames = torch.randn(len(codes) * flow.repeats, flow.mel, generator=self._generator).to(flow.device)
        for interval in self._intervals:
            if not len(frames) and not last:
                break
            frames = interval.push(frames, last=last)
        return frames


class _Voice:
    """What one request is to say, and in whose voice. Row 0 of all is with both, row 1 without: the guidance's two."""

    def __init__(self, flow: Flow, speaker: Speaker) -> None:
        self._dit, self._repeats = flow.dit, flow.repeats
        cond, mel = (torch.cat([part, part * 0]).to(flow.device) for part in (speaker.cond, speaker.ref_mel))
        self._columns = flow.dit.input_embed.spk_encoder(mel)[:, None], cond[:, None]
        self.codes = torch.empty(0, dtype=torch.int64, device=flow.device)
        """All so far."""

    def hidden(self, noised: Tensor, first: int) -> Tensor:
        """The DiT's input, (2, frames, hidden), for the frames (n, mel) from number ``first`` on."""
        frames = torch.arange(first, first + len(noised), device=noised.device)
        codes = self.codes[frames // self._repeats]
        said = self._dit.text_embed.codec_embed(torch.stack([codes, torch.zeros_like(codes)]))
        heard, speaker = (column.expand(-1, len(noised), -1) for column in self._columns)
        hidden: Tensor = self._dit.input_embed.proj(torch.cat([noised.expand(2, -1, -1), heard, said, speaker], -1))
        return hidden


class _Interval:
    """One step of the solver: a state and its slopes, of the frames that are not through. All are (frames, mel)."""

    def __init__(self, flow: Flow, voice: _Voice, step: float, times: list[Tensor]) -> None:
        self._step = step
        self._evaluations = [_Evaluation(flow, voice, time) for time in times]
        self._start = torch.empty(0, flow.mel, device=flow.device)
        self._slopes = [self._start] * len(times)

    def push(self, start: Tensor, *, last: bool) -> Tensor:
        """More of the state at its start; gives more of that at its end."""
        self._start = torch.cat([self._start, start])
        point = start
        for number, evaluation in enumerate(self._evaluations):
            done = len(self._slopes[number])
            self._slopes[number] = torch.cat([self._slopes[number], evaluation.push(point, last=last)])
            more = slice(done, len(self._slopes[number]))
            point = self._point(number, self._start[more], [slopes[more] for slopes in self._slopes])
        through = len(self._slopes[-1])
        self._start = self._start[through:].clone()
        self._slopes = [slopes[through:].clone() for slopes in self._slopes]
        return point

    def _point(self, number: int, y: Tensor, slopes: list[Tensor]) -> Tensor:
        """Where to evaluate after slope ``number``; after the last one, the end."""
        h, (k1, k2, k3, k4) = self._step, slopes
        if number == 0:
            return y + h * k1 / 3
        if number == 1:
            return y + h * (k2 - k1 / 3)
        if number == 2:
            return y + h * (k1 - k2 + k3)
        return y + (k1 + 3 * (k2 + k3) + k4) * h / 8


class _Evaluation:
    """The DiT at one point in time."""

    def __init__(self, flow: Flow, voice: _Voice, time: Tensor) -> None:
        self._dit, self._voice, self._time = flow.dit, voice, time.expand(2, -1)
        self._layers = [_Layer(flow, layer) for layer in flow.dit.transformer_blocks]
        self._frames = 0

    def push(self, noised: Tensor, *, last: bool) -> Tensor:
        """The slopes, (n, mel), of as many frames as the look-ahead has come for."""
        hidden = self._voice.hidden(noised, self._frames)
        self._frames += len(noised)
        for layer in self._layers:
            if not hidden.shape[1] and not last:
                break
            hidden = layer.push(hidden, self._time, last=last)
        conditioned, free = self._dit.proj_out(self._dit.norm_out(hidden, self._time))
        slopes: Tensor = conditioned + (conditioned - free) * GUIDANCE
        return slopes


class _Layer:
    """One layer of one evaluation: inputs whose look-ahead has not come, and the keys and values still to be seen."""

    def __init__(self, flow: Flow, layer: Any) -> None:
        self._layer, self._rotary, self._block = layer, flow.dit.rotary_embed, flow.block
        self._ahead, self._back = int(layer.look_ahead_block), int(layer.look_backward_block)
        self._end = 0
        """Frames that have come."""
        heads, size = layer.attn.heads, layer.attn.inner_dim // layer.attn.heads
        self._inputs = torch.empty(2, 0, layer.attn.dim, device=flow.device)
        self._queries = self._keys = self._values = torch.empty(2, heads, 0, size, device=flow.device)

    def push(self, inputs: Tensor, time: Tensor, *, last: bool) -> Tensor:
        """(2, n, hidden) each."""
        layer = self._layer
        normed, gate, shift, scale, gate_after = layer.attn_norm(inputs, emb=time)
        self._take(inputs, normed)
        first, first_key = self._end - self._inputs.shape[1], self._end - self._keys.shape[2]
        whole = self._end if last else (self._end // self._block - self._ahead) * self._block
        count = max(0, whole - first)
        hidden, self._inputs = self._inputs[:, :count], self._inputs[:, count:].clone()
        if count:
            hidden = hidden + gate[:, None] * self._attend(first, first_key, count)
            normed = layer.ff_norm(hidden) * (1 + scale[:, None]) + shift[:, None]
            hidden = hidden + gate_after[:, None] * layer.ff(normed)
        seen = max(0, ((first + count) // self._block - self._back) * self._block - first_key)
        self._queries = self._queries[:, :, count:].clone()
        self._keys, self._values = self._keys[:, :, seen:].clone(), self._values[:, :, seen:].clone()
        return hidden

    def _take(self, inputs: Tensor, normed: Tensor) -> None:
        attention, count = self._layer.attn, inputs.shape[1]
        projected = (attention.to_q(normed), attention.to_k(normed), attention.to_v(normed))
        queries, keys, values = (x.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for x in projected)
        places = torch.arange(self._end, self._end + count, device=inputs.device).expand(2, -1)
        cos, sin = self._rotary(inputs, places)
        self._queries = torch.cat([self._queries, _rotated(queries, cos, sin)], 2)
        self._keys = torch.cat([self._keys, _rotated(keys, cos, sin)], 2)
        self._values = torch.cat([self._values, values], 2)
        self._inputs = torch.cat([self._inputs, inputs], 1)
        self._end += count

    def _attend(self, first: int, first_key: int, count: int) -> Tensor:
        """Of the first ``count`` that wait, (2, count, hidden)."""
        device = self._keys.device
        block = torch.arange(first, first + count, device=device)[:, None] // self._block
        key_block = torch.arange(first_key, self._end, device=device) // self._block
        seen = (key_block >= block - self._back) & (key_block <= block + self._ahead)
        found = functional.scaled_dot_product_attention(self._queries[:, :, :count], self._keys, self._values, seen)
        attended: Tensor = self._layer.attn.to_out[0](found.transpose(1, 2).reshape(2, count, -1))
        return attended


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions for the first head alone, its even places against its odd ones: as the model was trained."""
    even, odd = states[:, :1, :, 0::2], states[:, :1, :, 1::2]
    first = torch.cat([even, odd], -1) * cos[:, None] + torch.cat([-odd, even], -1) * sin[:, None]
    return torch.cat([first, states[:, 1:]], 1)
