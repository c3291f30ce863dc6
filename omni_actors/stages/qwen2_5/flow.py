"""Streaming form of Qwen2.5-Omni's flow matching (Lipman et al., 2023): codes to a mel spectrogram, block by block.

The result is that of the model's evaluation over all codes at once, apart from rounding.

The model, a diffusion transformer (DiT), is not causal, but its look-ahead is bounded. A layer attends within its block
of ``block_size`` frames; the layers in ``look_backward_layers`` attend to the block before, too, and those in
``look_ahead_layers`` to the next one. All else is computed frame by frame. So one evaluation of a block needs as many
blocks ahead as there are layers that look ahead (1 at the real sizes). The solver's 36 evaluations, each of which
starts from the one before, need 36: 8.64 s of speech. A block so much older than the newest code is final.

A stream therefore carries, for each layer of each evaluation, the keys and values that later frames attend to, and the
inputs whose look-ahead has not arrived (57 MB per request at the real sizes). Each frame is computed once. The work
grows with the length, where the attention of the whole model grows with its square.

The solver is the Runge-Kutta 3/8 rule (Kutta, 1901) between ``steps`` points in time, as in
``RungeKutta4ODESolver`` of transformers. The noise that it starts from is drawn frame by frame from the request's
generator: with torch's CPU generator, a longer noise begins with the shorter one.
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
"""The strength of the classifier-free guidance, and the sway sampling coefficient, which makes early steps shorter.

Both are the defaults of transformers' ``Qwen2_5OmniToken2WavModel.forward``.
"""

TABLEAU = (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0), (1 / 8, 3 / 8, 3 / 8, 1 / 8)
"""The solver: for each evaluation, the weights of the slopes so far in the point that follows; at last, the end."""


class Flow:
    """What all requests share: a DiT and the solver's intervals.

    steps: points in time, so steps - 1 intervals of 4 evaluations each.
    """

    def __init__(self, dit: Qwen2_5OmniToken2WavDiTModel, steps: int) -> None:
        config: Any = dit.config
        self.dit: Any = dit
        self.device: torch.device = dit.device
        self.repeats: int = config.repeats
        """Frames per code."""
        self.codes: int = dit.text_embed.codec_embed.num_embeddings
        self.longest: int = config.max_position_embeddings // self.repeats
        """The most codes of a request."""
        self.block: int = config.block_size
        if self.block % self.repeats:
            raise ValueError(f"a block of {self.block} frames is no whole number of codes of {self.repeats} frames")
        self.mel: int = config.mel_dim
        times = torch.linspace(0, 1, steps)
        times += SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
        self.intervals = [(float(end - start), self._embedded(start, end)) for start, end in pairwise(times)]
        """Each interval's length and the embeddings, (1, hidden) each, of the four points where it is evaluated."""
        self.reach: int = 4 * len(self.intervals) * _layers_looking_back(dit) * self.block
        """The frames before a block that it depends on, at most."""

    @torch.inference_mode()
    def _embedded(self, start: Tensor, end: Tensor) -> list[Tensor]:
        points = [start + (end - start) * part for part in (0, 1 / 3, 2 / 3)] + [end]
        return [self.dit.time_embed(point[None].to(self.device)) for point in points]


def _layers_looking_back(dit: Any) -> int:
    return sum(bool(layer.look_backward_block) for layer in dit.transformer_blocks)


class FlowStream:
    """Solves one request's flow block by block.

    skipped: int64 (n,), whole blocks of codes at the start, whose frames are not computed. The first ``flow.reach``
    frames behind them (17.3 s of speech at the real sizes) are then not those of all codes.
    """

    @torch.inference_mode()
    def __init__(self, flow: Flow, speaker: Speaker, random: torch.Generator, skipped: Tensor) -> None:
        self._flow, self._random = flow, random
        self._conditions = _Conditions(flow, speaker, skipped.to(flow.device))
        self._draw(len(skipped))
        self._intervals = [_Interval(flow, self._conditions, step, times) for step, times in flow.intervals]

    @torch.inference_mode()
    def push(self, codes: Tensor, *, last: bool) -> Tensor:
        """Add codes; return the frames that have become final with them, float32 (frames, mel).

        codes: int64 (n,), whole blocks unless ``last``. last: no codes will follow.
        """
        flow = self._flow
        self._conditions.codes = torch.cat([self._conditions.codes, codes.to(flow.device)])
        frames = self._draw(len(codes))
        for interval in self._intervals:
            if not len(frames) and not last:
                break
            frames = interval.push(frames, last=last)
        return frames

    def _draw(self, codes: int) -> Tensor:
        """Return the noise of the next codes' frames, (frames, mel)."""
        return torch.randn(codes * self._flow.repeats, self._flow.mel, generator=self._random).to(self._flow.device)


class _Conditions:
    """The conditions of one request's flow: its codes and its speaker.

    In all tensors, row 0 has the conditions and row 1 zeros in their place: the two evaluations of the guidance.
    """

    def __init__(self, flow: Flow, speaker: Speaker, codes: Tensor) -> None:
        self._dit, self._repeats = flow.dit, flow.repeats
        cond, mel = (torch.cat([part, part * 0]).to(flow.device) for part in (speaker.cond, speaker.ref_mel))
        self._columns = flow.dit.input_embed.spk_encoder(mel)[:, None], cond[:, None]
        self.codes = codes
        """All codes so far, int64 (n,)."""
        self.first = len(codes) * flow.repeats
        """The first frame that is computed."""

    def hidden(self, noised: Tensor, first: int) -> Tensor:
        """Return the DiT's input, (2, n, hidden), for noised frames (n, mel) that begin with frame number ``first``."""
        frames = torch.arange(first, first + len(noised), device=noised.device)
        codes = self.codes[frames // self._repeats]
        spoken = self._dit.text_embed.codec_embed(torch.stack([codes, torch.zeros_like(codes)]))
        reference, speaker = (column.expand(-1, len(noised), -1) for column in self._columns)
        inputs = torch.cat([noised.expand(2, -1, -1), reference, spoken, speaker], -1)
        hidden: Tensor = self._dit.input_embed.proj(inputs)
        return hidden


class _Interval:
    """One step of the solver, for the frames that have not passed it: their state and slopes, (frames, mel) each."""

    def __init__(self, flow: Flow, conditions: _Conditions, step: float, times: list[Tensor]) -> None:
        self._step = step
        self._evaluations = [_Evaluation(flow, conditions, time) for time in times]
        self._start = torch.empty(0, flow.mel, device=flow.device)
        self._slopes = [self._start] * len(times)

    def push(self, start: Tensor, *, last: bool) -> Tensor:
        """Add frames of the state at the interval's start; return the frames that reach its end."""
        self._start = torch.cat([self._start, start])
        point = start
        for number, (evaluation, weights) in enumerate(zip(self._evaluations, TABLEAU, strict=True)):
            done = len(self._slopes[number])
            self._slopes[number] = torch.cat([self._slopes[number], evaluation.push(point, last=last)])
            new = slice(done, len(self._slopes[number]))
            parts = [slopes[new] * weight for slopes, weight in zip(self._slopes, weights, strict=False)]
            point = self._start[new] + self._step * torch.stack(parts).sum(0)
        passed = len(self._slopes[-1])
        self._start = self._start[passed:].clone()
        self._slopes = [slopes[passed:].clone() for slopes in self._slopes]
        return point


class _Evaluation:
    """The DiT at one point in time of the solver."""

    def __init__(self, flow: Flow, conditions: _Conditions, time: Tensor) -> None:
        self._dit, self._conditions, self._time = flow.dit, conditions, time.expand(2, -1)
        self._layers = [_Layer(flow, layer, conditions.first) for layer in flow.dit.transformer_blocks]
        self._frames = conditions.first
        """Frames that were skipped or have arrived."""

    def push(self, noised: Tensor, *, last: bool) -> Tensor:
        """Add noised frames; return the slopes, (n, mel), of the frames whose look-ahead has arrived."""
        hidden = self._conditions.hidden(noised, self._frames)
        self._frames += len(noised)
        for layer in self._layers:
            if not hidden.shape[1] and not last:
                break
            hidden = layer.push(hidden, self._time, last=last)
        conditioned, free = self._dit.proj_out(self._dit.norm_out(hidden, self._time))
        slopes: Tensor = conditioned + (conditioned - free) * GUIDANCE
        return slopes


class _Layer:
    """One layer of one evaluation: its inputs without look-ahead yet, and the keys and values that are still needed."""

    def __init__(self, flow: Flow, layer: Any, first: int) -> None:
        self._layer, self._rotary, self._block = layer, flow.dit.rotary_embed, flow.block
        self._ahead, self._back = int(layer.look_ahead_block), int(layer.look_backward_block)
        self._end = first
        """Frames that were skipped or have arrived."""
        heads, size = layer.attn.heads, layer.attn.inner_dim // layer.attn.heads
        self._inputs = torch.empty(2, 0, layer.attn.dim, device=flow.device)
        self._queries = self._keys = self._values = torch.empty(2, heads, 0, size, device=flow.device)

    def push(self, inputs: Tensor, time: Tensor, *, last: bool) -> Tensor:
        """Add frames, (2, n, hidden); return the outputs of those whose look-ahead has arrived, (2, m, hidden)."""
        layer = self._layer
        normed, gate, shift, scale, gate_after = layer.attn_norm(inputs, emb=time)
        self._append(inputs, normed)
        first, first_key = self._end - self._inputs.shape[1], self._end - self._keys.shape[2]
        complete = self._end if last else (self._end // self._block - self._ahead) * self._block
        count = max(0, complete - first)
        hidden, self._inputs = self._inputs[:, :count], self._inputs[:, count:].clone()
        if count:
            hidden = hidden + gate[:, None] * self._attend(first, first_key, count)
            normed = layer.ff_norm(hidden) * (1 + scale[:, None]) + shift[:, None]
            hidden = hidden + gate_after[:, None] * layer.ff(normed)
        done = max(0, ((first + count) // self._block - self._back) * self._block - first_key)
        self._queries = self._queries[:, :, count:].clone()
        self._keys, self._values = self._keys[:, :, done:].clone(), self._values[:, :, done:].clone()
        return hidden

    def _append(self, inputs: Tensor, normed: Tensor) -> None:
        """Append frames and their queries, keys and values."""
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
        """Return the attention of the first ``count`` waiting frames, (2, count, hidden)."""
        device = self._keys.device
        block = torch.arange(first, first + count, device=device)[:, None] // self._block
        key_block = torch.arange(first_key, self._end, device=device) // self._block
        mask = (key_block >= block - self._back) & (key_block <= block + self._ahead)
        found = functional.scaled_dot_product_attention(self._queries[:, :, :count], self._keys, self._values, mask)
        attended: Tensor = self._layer.attn.to_out[0](found.transpose(1, 2).reshape(2, count, -1))
        return attended


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to the first head only, even against odd elements, as the model was trained."""
    even, odd = states[:, :1, :, 0::2], states[:, :1, :, 1::2]
    first = torch.cat([even, odd], -1) * cos[:, None] + torch.cat([-odd, even], -1) * sin[:, None]
    return torch.cat([first, states[:, 1:]], 1)
