"""The next token of each sequence.

Rules
1. Temperature 0 is greedy: the first of the most likely tokens.
2. A sampled sequence owns a generator and draws one number a token: others in the batch cannot change its text.
3. The draw runs through the tokens in order of id, not of probability: rounding differs a little with the shape of the
   batch, and two nearly equal tokens that swap ranks must not change the text.
4. The order is transformers': repetition penalty, suppressed tokens, temperature, top_k, top_p.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

__all__ = ["Sampler", "Sampling", "choose", "generator"]

_COLDEST = 1e-4  # below, dividing by it would overflow, and nothing but the most likely token remains anyway


class Sampling(msgspec.Struct, frozen=True):
    """How one sequence's tokens are chosen; the neutral values leave the logits as they are."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    """Logits of tokens that were seen are divided by it, or multiplied where they are negative (Keskar et al. 2019)."""

    @property
    def is_greedy(self) -> bool:
        """Whether it is the plain maximum."""
        return self.temperature == 0 and self.repetition_penalty == 1


def generator(seed: int | None) -> torch.Generator:
    """One request's source of random numbers; None: a seed from the system."""
    made = torch.Generator()
    if seed is None:
        made.seed()
    else:
        made.manual_seed(seed & (2**64 - 1))
    return made


class Sampler:
    """Chooses one sequence's tokens. suppressed: bool (vocabulary,), the tokens that it never gives."""

    def __init__(self, sampling: Sampling, source: torch.Generator, suppressed: Tensor | None = None) -> None:
        self._sampling, self._generator, self._suppressed = sampling, source, suppressed
        self._seen: set[int] = set()

    def see(self, tokens: Iterable[int]) -> None:
        """These count for the repetition penalty, as those do that are chosen."""
        if self._sampling.repetition_penalty != 1:
            self._seen.update(tokens)

    def __call__(self, logits: Tensor) -> int:
        """Choose a token id by the logits (vocabulary,) of one sequence."""
        logits = self._allowed(logits.to("cpu", torch.float32))
        if self._sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            tokens, weights = self._candidates(logits)
            cumulative = weights.cumsum(0)
            drawn = torch.rand((), dtype=torch.float64, generator=self._generator) * cumulative[-1]
            place = int(torch.searchsorted(cumulative, drawn, right=True))
            token = int(tokens[min(place, len(tokens) - 1)])
        self.see([token])
        return token

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The token ids that may be drawn, in increasing order, and their weights (float64, not normalised)."""
        return self._candidates(self._allowed(logits.to("cpu", torch.float32)))

    def _allowed(self, logits: Tensor) -> Tensor:
        """The logits (float32) after the penalty, with those of suppressed tokens at -inf."""
        if self._seen:
            seen, penalty = torch.tensor(sorted(self._seen)), self._sampling.repetition_penalty
            found = logits[seen]
            logits = logits.index_put((seen,), torch.where(found < 0, found * penalty, found / penalty))
        if self._suppressed is not None:
            logits = logits.masked_fill(self._suppressed, float("-inf"))
        return logits

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        logits = (logits - logits.max()) / max(self._sampling.temperature, _COLDEST)
        if 0 < top_k < len(logits):
            logits = logits.where(logits >= logits.topk(top_k).values[-1], float("-inf"))
        weights = logits.softmax(0)
        if top_p < 1:
            # All tokens below this floor hold 1 - top_p at most, so the nucleus is among the rest: sort only those.
            likely = weights[weights >= (1 - top_p) / len(weights)].sort(descending=True).values
            size = int((likely.cumsum(0) < top_p).sum()) + 1
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
