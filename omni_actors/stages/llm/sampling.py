"""The next token of each sequence.

Rules
1. Temperature 0 is greedy: the first of the most likely tokens.
2. A sampled sequence owns a generator and draws one number a token: others in the batch cannot change its text.
3. The draw runs through the tokens in order of id, not of probability: rounding differs a little with the shape of the
   batch, and two nearly equal tokens that swap ranks must not change the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni_actors.stages.registry import LLMParams

__all__ = ["Sampler", "choose"]

_COLDEST = 1e-4  # below, dividing by it would overflow, and nothing but the most likely token remains anyway


class Sampler:
    """Draws tokens by temperature, then top_k, then top_p (the order that transformers uses)."""

    def __init__(self, params: LLMParams) -> None:
        self._temperature = max(params.temperature, _COLDEST)
        self._top_k, self._top_p = params.top_k, params.top_p
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed & (2**64 - 1))

    def __call__(self, logits: Tensor) -> int:
        """Draw a token id from the logits (vocabulary,) of one sequence."""
        tokens, probabilities = self.candidates(logits)
        cumulative = probabilities.cumsum(0)
        drawn = torch.rand((), dtype=torch.float64, generator=self._generator) * cumulative[-1]
        place = int(torch.searchsorted(cumulative, drawn, right=True))
        return int(tokens[min(place, len(tokens) - 1)])

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The token ids that may be drawn, in increasing order, and their weights (float64, not normalised)."""
        logits = logits.to("cpu", torch.float32)
        logits = (logits - logits.max()) / self._temperature
        if 0 < self._top_k < len(logits):
            logits = logits.where(logits >= logits.topk(self._top_k).values[-1], float("-inf"))
        weights = logits.softmax(0)
        if self._top_p < 1:
            # All tokens below this floor hold 1 - top_p at most, so the nucleus is among the rest: sort only those.
            likely = weights[weights >= (1 - self._top_p) / len(weights)].sort(descending=True).values
            size = int((likely.cumsum(0) < self._top_p).sum()) + 1
            weights = weights.where(weights >= likely[min(size, len(likely)) - 1], 0.0)
        tokens = weights.nonzero()[:, 0]
        return tokens, weights[tokens].double()


def choose(logits: Tensor, samplers: Sequence[Sampler | None]) -> list[int]:
    """One token id a row of the logits (rows, vocabulary); a row without a sampler is greedy."""
    if all(samplers):
        return [sampler(row) for sampler, row in zip(samplers, logits, strict=True) if sampler]
    tokens: list[int] = logits.argmax(-1).tolist()
    for place, sampler in enumerate(samplers):
        if sampler:
            tokens[place] = sampler(logits[place])
    return tokens
