"""Sampling: chooses the next token of each sequence of a batch.

Rules
1. Temperature 0 is greedy: the most likely token, and the lowest id of several.
2. A sampled sequence has random numbers of its own and draws one per token, so other sequences of the batch cannot
   change its text. The n-th number depends on the seed and n alone, so a sequence can go on behind tokens that were
   decided earlier (``Sampler.replay``) without drawing for them again.
3. The draw inverts the cumulative distribution over tokens in order of id, not of probability. Rounding depends a
   little on the batch's shape, and two nearly equal tokens that swap ranks must not change the text.
4. The order is that of transformers' logits processors: bias, repetition penalty (Keskar et al., 2019), frequency and
   presence penalty, suppressed tokens, temperature, top-k (Fan et al., 2018), top-p (Holtzman et al., 2020), min-p
   (Nguyen et al., 2024).
5. A row without a finite largest logit (it has NaN or +inf, or only -inf) gives None and changes no other row: that
   request fails alone. Every other row gives a token, whatever its logits and parameters are.
6. All of it is computed where the logits are, and no row of logits leaves a device. To copy and to sort 32 rows of a
   large vocabulary on the host takes as long as several steps of a model.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from omni_actors.stages.base import InvalidRequest

_LARGEST = torch.finfo(torch.float32).max
_LOWEST_TEMPERATURE = 1e-4
"""Dividing by less would overflow, and only the most likely token remains at this value already."""


class Sampling(msgspec.Struct, frozen=True):
    """How to choose one sequence's tokens, by fields of ``TextParams``. The default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the text has already, and multiplies the negative ones."""
    min_p: float = 0.0
    min_tokens: int = 0
    """The sampler chooses none of its end tokens before it has chosen this many tokens."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of the tokens that were chosen already."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as many times as the token was chosen already."""

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the plain maximum."""
        counts = self.presence_penalty or self.frequency_penalty
        return self.temperature == 0 and self.repetition_penalty == 1 and self.min_tokens == 0 and not counts


class TokenMask(Protocol):
    """Says which tokens may come next, by those that came before (``structure.Structure``)."""

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits (vocabulary,) with those of tokens that cannot follow at -inf."""
        ...

    def accept(self, token: int) -> None:
        """Count a token."""
        ...


class RandomNumbers:
    """A request's random numbers. seed: any number, of which the lowest 64 bits count; None: one from the system."""

    def __init__(self, seed: int | None) -> None:
        number = secrets.randbits(64) if seed is None else seed & (2**64 - 1)
        self._seed, self._count = number.to_bytes(8, "little"), 0

    def next(self) -> float:
        """Return the next number, in [0, 1)."""
        position = self._count.to_bytes(8, "little")
        self._count += 1
        bits = hashlib.blake2b(position, digest_size=8, key=self._seed).digest()
        return (int.from_bytes(bits, "little") >> 11) / 2**53

    def skip(self, count: int) -> None:
        """Leave out the next ``count`` numbers."""
        self._count += count


class Sampler:
    """Chooses one sequence's tokens.

    source: its random numbers; samplers of one request may share them. suppressed: bool (vocabulary,), tokens that it
    never chooses. bias: added to the logits of these tokens. ``end_tokens``: see ``Sampling.min_tokens``.
    ``structure`` excludes the tokens that cannot follow.
    """

    def __init__(
        self,
        sampling: Sampling,
        source: RandomNumbers,
        suppressed: Tensor | None = None,
        bias: Mapping[int, float] | None = None,
    ) -> None:
        self.sampling, self._source, self._suppressed = sampling, source, suppressed
        self.end_tokens: frozenset[int] = frozenset()
        self.structure: TokenMask | None = None
        self._bias = bias or {}
        self._chosen = 0
        self._counts: Counter[int] = Counter()
        self._seen: set[int] = set()
        self._seen_index = torch.empty(0, dtype=torch.int64)

    def see(self, tokens: Iterable[int]) -> None:
        """Count these tokens for the repetition penalty. Chosen tokens are counted without this call."""
        if self.sampling.repetition_penalty != 1 and (new := set(tokens) - self._seen):
            self._seen |= new
            index = self._seen_index
            self._seen_index = torch.cat([index, torch.tensor(sorted(new), device=index.device)])

    def accept(self, token: int) -> None:
        """Count a chosen token."""
        self._chosen += 1
        self.see([token])
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self._counts[token] += 1
        if self.structure is not None:
            self.structure.accept(token)

    def replay(self, token: int) -> None:
        """Count a token that was decided earlier, and leave out the random number that was drawn for it."""
        self.accept(token)
        if self.sampling.temperature:
            self._source.skip(1)

    def allowed(self, logits: Tensor) -> Tensor:
        """Return the logits (vocabulary,) after bias and penalties, those of excluded tokens at -inf."""
        if self._bias:
            logits = _added(logits, self._bias)
        if self._seen:
            self._seen_index = self._seen_index.to(logits.device)
            found, penalty = logits[self._seen_index], self.sampling.repetition_penalty
            found = torch.where(found < 0, found * penalty, found / penalty).clamp(max=_LARGEST)
            logits = logits.index_put((self._seen_index,), found)
        if self._counts:
            once, each = self.sampling.presence_penalty, self.sampling.frequency_penalty
            logits = _added(logits, {token: -once - each * count for token, count in self._counts.items()})
        if self._suppressed is not None:
            self._suppressed = self._suppressed.to(logits.device)
            logits = logits.masked_fill(self._suppressed, float("-inf"))
        if self._chosen < self.sampling.min_tokens and self.end_tokens:
            known = [token for token in sorted(self.end_tokens) if token < logits.shape[-1]]
            logits = logits.index_fill(0, _ids(known, logits), float("-inf"))
        if self.structure is not None:
            logits = self.structure.mask(logits)
        return logits

    def draw(self) -> float:
        """Return the next random number, in [0, 1)."""
        return self._source.next()

    def __call__(self, logits: Tensor) -> int | None:
        """Choose a token id from one sequence's logits (vocabulary,); None if the largest logit is not finite."""
        return choose(logits[None], [self])[0]


def _added(logits: Tensor, numbers: Mapping[int, float]) -> Tensor:
    """Return the logits (vocabulary,) with these numbers added to those of these tokens."""
    known = [token for token in numbers if token < len(logits)]
    added = torch.tensor([numbers[token] for token in known], dtype=logits.dtype, device=logits.device)
    return logits.index_add(0, _ids(known, logits), added)


def _ids(tokens: list[int], logits: Tensor) -> Tensor:
    """Return these tokens as an index of logits."""
    return torch.tensor(tokens, dtype=torch.long, device=logits.device)


def weights(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return each token's weight in the draw, (rows, vocabulary); 0 excludes it. Rows need not sum to 1."""
    top_k, top_p = sampling.top_k, sampling.top_p
    logits = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, _LOWEST_TEMPERATURE)
    limits_rank = 0 < top_k < logits.shape[-1]
    if limits_rank:
        logits = logits.where(logits >= logits.topk(top_k).values[:, -1:], float("-inf"))
    likely = logits.softmax(-1)
    if top_p < 1:
        if limits_rank:
            floors = _floors(likely.topk(top_k).values, top_p)
        else:
            # All tokens below this weight have at most 1 - top_p together, so the nucleus is among the rest: sort
            # those.
            least = (1 - top_p) / likely.shape[-1]
            ordered = [row[row >= least].sort(descending=True).values for row in likely]
            floors = torch.cat([_floors(row[None], top_p) for row in ordered])
        likely = likely.where(likely >= floors, 0.0)
    if sampling.min_p:
        likely = likely.where(likely >= sampling.min_p * likely.amax(-1, keepdim=True), 0.0)
    return likely


def _floors(ordered: Tensor, top_p: float) -> Tensor:
    """Return the smallest weight in each row's nucleus, (rows, 1). ordered: weights (rows, n), decreasing."""
    size = (ordered.cumsum(-1) < top_p).sum(-1, keepdim=True)
    return ordered.gather(-1, size.clamp(max=ordered.shape[-1] - 1))


def choose(logits: Tensor, samplers: Sequence[Sampler | None]) -> list[int | None]:
    """Choose a token id for each row of the logits (rows, vocabulary). A row without a sampler is greedy.

    A row whose largest logit is not finite, or of which the sampler excludes every token, gives None.
    """
    tokens: list[int | None] = [None] * len(samplers)
    finite = _finite(logits)
    if not all(samplers):
        likeliest = logits.argmax(-1).tolist()
        tokens = [likeliest[row] if finite[row] and not sampler else None for row, sampler in enumerate(samplers)]
    by_sampling: dict[Sampling, list[tuple[int, Sampler]]] = {}
    for row, (sampler, usable) in enumerate(zip(samplers, finite, strict=True)):
        if sampler and usable:
            by_sampling.setdefault(sampler.sampling, []).append((row, sampler))
    for sampling, members in by_sampling.items():
        group = logits[[row for row, _ in members]].float()
        group = torch.stack([sampler.allowed(row) for (_, sampler), row in zip(members, group, strict=True)])
        usable_rows = _finite(group)
        if not all(usable_rows):  # bias or structure has excluded every token of a row
            members = [member for member, usable in zip(members, usable_rows, strict=True) if usable]
            group = group[torch.tensor(usable_rows, device=group.device)]
        if not members:
            continue
        chosen = group.argmax(-1) if sampling.temperature == 0 else _drawn(group, sampling, members)
        for (row, sampler), token in zip(members, chosen.tolist(), strict=True):
            tokens[row] = token
            sampler.accept(token)
    return tokens


def _finite(logits: Tensor) -> list[bool]:
    """Return for each row whether a token can be chosen: its largest logit is finite."""
    finite: list[bool] = logits.amax(-1).isfinite().tolist()
    return finite


def not_finite() -> InvalidRequest:
    """Return the failure of a request for which ``choose`` returned None."""
    message = "the model's output for this request is not finite: no token can be chosen"
    return InvalidRequest(message, code="output_not_finite")


def _drawn(logits: Tensor, sampling: Sampling, members: Sequence[tuple[int, Sampler]]) -> Tensor:
    likely = weights(logits, sampling).double()
    cumulative = likely.cumsum(-1)
    if cumulative.device.type != "cpu":
        # A parallel sum may rise or fall by a rounding error. A search needs an order, and a token without weight must
        # not get an interval.
        cumulative = cumulative.where(likely > 0, 0.0).cummax(-1).values
    total = cumulative[:, -1:].contiguous()
    numbers = torch.tensor([[sampler.draw()] for _, sampler in members], dtype=torch.float64, device=total.device)
    places = torch.searchsorted(cumulative, numbers * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding must not select a token past the last one with weight
    return torch.minimum(places, last)[:, 0]
