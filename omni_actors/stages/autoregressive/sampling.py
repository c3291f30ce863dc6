"""The next token of each sequence.

Rules
1. Temperature 0 is greedy: the first of the most likely tokens.
2. A sampled sequence owns a generator and draws one number a token: others in the batch cannot change its text.
3. The draw runs through the tokens in order of id, not of probability: rounding differs a little with the shape of the
   batch, and two nearly equal tokens that swap ranks must not change the text.
4. The order is transformers': repetition penalty, suppressed tokens, temperature, top_k, top_p.
5. A row from which nothing can be drawn (NaN, +inf, or no token above -inf) gives None, and changes no other row: it is
   the failure of its own request. Every other row gives a token, whatever its numbers and its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from omni_actors.stages.base import InvalidRequest

__all__ = ["Sampler", "Sampling", "choose", "generator", "not_finite", "weights"]

_LARGEST = torch.finfo(torch.float32).max
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
        self.sampling, self._generator, self._suppressed = sampling, source, suppressed
        self._seen: set[int] = set()
        self._seen_index = torch.empty(0, dtype=torch.int64)

    def see(self, tokens: Iterable[int]) -> None:
        """These count for the repetition penalty, as those do that are chosen."""
        if self.sampling.repetition_penalty != 1 and (new := set(tokens) - self._seen):
            self._seen |= new
            self._seen_index = torch.cat([self._seen_index, torch.tensor(sorted(new))])

    def allowed(self, logits: Tensor) -> Tensor:
        """The logits (vocabulary,) after the penalty, with those of suppressed tokens at -inf."""
        if self._seen:
            found, penalty = logits[self._seen_index], self.sampling.repetition_penalty
            found = torch.where(found < 0, found * penalty, found / penalty).clamp(max=_LARGEST)
            logits = logits.index_put((self._seen_index,), found)
        if self._suppressed is not None:
            logits = logits.masked_fill(self._suppressed, float("-inf"))
        return logits

    def draw(self) -> float:
        """A random number, in [0, 1)."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))

    def __call__(self, logits: Tensor) -> int | None:
        """Choose a token id by the logits (vocabulary,) of one sequence; None: see rule 5."""
        return choose(logits[None], [self])[0]


def weights(logits: Tensor, sampling: Sampling) -> Tensor:
    """How likely each token is to be drawn: (rows, vocabulary), 0 for those that are not; rows need not sum to 1."""
    top_k, top_p = sampling.top_k, sampling.top_p
    logits = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, _COLDEST)
    limits_rank = 0 < top_k < logits.shape[-1]
    if limits_rank:
        logits = logits.where(logits >= logits.topk(top_k).values[:, -1:], float("-inf"))
    likely = logits.softmax(-1)
    if top_p < 1:
        if limits_rank:
            floors = _floors(likely.topk(top_k).values, top_p)
        else:
            # All tokens below this weight hold 1 - top_p at most, so the nucleus is among the rest: sort only those.
            least = (1 - top_p) / likely.shape[-1]
            ordered = [row[row >= least].sort(descending=True).values for row in likely]
            floors = torch.cat([_floors(row[None], top_p) for row in ordered])
        likely = likely.where(likely >= floors, 0.0)
    return likely


def _floors(ordered: Tensor, top_p: float) -> Tensor:
    """The least weight in the nucleus of each row, (rows, 1), of weights (rows, n) in decreasing order."""
    size = (ordered.cumsum(-1) < top_p).sum(-1, keepdim=True)
    return ordered.gather(-1, size.clamp(max=ordered.shape[-1] - 1))


def choose(logits: Tensor, samplers: Sequence[Sampler | None]) -> list[int | None]:
    """One token id a row of the logits (rows, vocabulary), or None (rule 5); a row without a sampler is greedy."""
    tokens: list[int | None] = [None] * len(samplers)
    finite = _finite(logits)
    if not all(samplers):
        tokens = [token if usable else None for token, usable in zip(logits.argmax(-1).tolist(), finite, strict=True)]
    by_sampling: dict[Sampling, list[tuple[int, Sampler]]] = {}
    for row, (sampler, usable) in enumerate(zip(samplers, finite, strict=True)):
        if sampler and usable:
            by_sampling.setdefault(sampler.sampling, []).append((row, sampler))
    for sampling, members in by_sampling.items():
        mine = logits[[row for row, _ in members]].to("cpu", torch.float32)
        mine = torch.stack([sampler.allowed(row) for (_, sampler), row in zip(members, mine, strict=True)])
        usable_rows = _finite(mine)
        chosen = mine.argmax(-1) if sampling.temperature == 0 else _drawn(mine, sampling, members)
        for (row, sampler), token, usable in zip(members, chosen.tolist(), usable_rows, strict=True):
            tokens[row] = token if usable else None
            sampler.see([token] if usable else [])
    return tokens


def _finite(logits: Tensor) -> list[bool]:
    """Whether each row has a token that can be chosen: its largest logit is a finite number."""
    finite: list[bool] = logits.amax(-1).isfinite().tolist()
    return finite


def not_finite() -> InvalidRequest:
    """The failure of a request for which ``choose`` gave None."""
    message = "the model's output for this request is not finite: no token can be chosen"
    return InvalidRequest(message, code="output_not_finite")


def _drawn(logits: Tensor, sampling: Sampling, members: Sequence[tuple[int, Sampler]]) -> Tensor:
    cumulative = weights(logits, sampling).double().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    numbers = torch.tensor([[sampler.draw()] for _, sampler in members], dtype=torch.float64)
    places = torch.searchsorted(cumulative, numbers * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding must not lead past the last token that may be drawn
    return torch.minimum(places, last)[:, 0]
