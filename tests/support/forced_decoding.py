"""Forced decoding: a reference model follows the decisions of an answer, and says how far each is from its own.

The *lag* of a decision is the least relative noise of the logits, as a part of the largest one, that explains it:

- A greedy choice: two logits move towards each other, by a part ``lag`` of the largest one each.
- A drawn choice: all logits may move, those below the draw by ``+x`` and those above it by ``-x``, or the other way
  round. With temperature T that moves the place F of a token in the cumulative distribution to
  F e^(x/T) / (F e^(x/T) + (1 - F) e^(-x/T)), so by tanh(x/T) / 2 at most. The edge of a nucleus (top-p) moves as far,
  so a token beyond the edge lags by what moves the edge there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec
import torch
from torch import Tensor

from omni_actors.stages.autoregressive.sampling import Sampler, Sampling, weights


def lag(logits: Tensor, sampler: Sampler, token: int) -> float:
    """Return the lag of the next choice of ``sampler`` from logits (vocabulary,), which was ``token``."""
    allowed = sampler.allowed(logits)
    largest = float(allowed[allowed.isfinite()].abs().max())
    sampling = sampler.sampling
    if not sampling.temperature:
        return float(allowed.max() - allowed[token]) / largest / 2
    place = sampler.draw()
    lags = (max(moved, _drawn_lag(allowed, nucleus, token, place)) for moved, nucleus in _nuclei(sampling))
    return min(lags) * sampling.temperature / largest


EDGES = (2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1)
"""How far the edge of a nucleus is moved to see whether that explains a choice."""


def _nuclei(sampling: Sampling) -> Iterator[tuple[float, Sampling]]:
    """Yield nuclei with moved edges, each with the noise, times 1 / T, that moves the edge so far."""
    yield 0.0, sampling
    if sampling.top_p < 1:
        for move in EDGES:
            for top_p in (sampling.top_p - move, min(sampling.top_p + move, 1.0)):
                yield math.atanh(2 * move), msgspec.structs.replace(sampling, top_p=top_p)


def _drawn_lag(logits: Tensor, sampling: Sampling, token: int, place: float) -> float:
    cumulative = weights(logits[None], sampling)[0].double().cumsum(0)
    cumulative /= cumulative[-1].clone()
    low, high = float(cumulative[token - 1]) if token else 0.0, float(cumulative[token])
    if low == high:
        return math.inf  # excluded
    return math.atanh(min(2 * max(low - place, place - high, 0.0), 1 - 1e-9))


class ForcedHead:
    """Forward hook of a head, (…, vocabulary): it decides as ``decided`` does; behind the end of that, as it would."""

    def __init__(self, decided: Iterable[int], sampler: Sampler) -> None:
        self._decided, self._sampler = iter(decided), sampler
        self.lags: list[float] = []

    def __call__(self, module: object, inputs: object, logits: Tensor) -> Tensor | None:
        token = next(self._decided, None)
        if token is None:
            return None
        values = logits.reshape(-1, logits.shape[-1])[-1].float()
        self.lags.append(lag(values, self._sampler, token))
        self._sampler.accept(token)
        forced = torch.full_like(logits, -1e9)
        forced[..., token] = 1e9
        return forced
