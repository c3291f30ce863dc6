"""Guidance of an answer by a companion: classifier-free guidance, as transformers' ``guidance_scale`` computes it.

Rules
1. A guided request has two sequences in the batch: its own, and a companion that has the negative prompt in place of
   the prompt. Both go on with the same answer: every token that is chosen is added to both.
2. The companion is prefilled first. So its prediction is there when the prompt of the request ends.
3. With the log probabilities p of the request and n of the companion, a token is chosen from n + scale x (p - n), in
   float32. What follows (bias, penalties, structure, sampling) takes these scores as it takes logits.
4. Only the request samples, has an answer and gives outputs. The companion lives exactly as long as its request.

Stay on topic with classifier-free guidance (Sanchez et al., 2023).
"""

from __future__ import annotations

from typing import Self, TypeVar

import torch
from torch import Tensor

from omni_actors.stages.autoregressive.scheduler import ScheduledSequence


class GuidedSequence(ScheduledSequence):
    """A sequence that may have a companion or be one."""

    companion: Self | None = None
    scale = 1.0
    """The strength of the guidance; it counts only with a companion."""
    is_companion = False
    prediction: Tensor | None = None
    """The logits (vocabulary,) of the position that a companion computed last."""

    def guide_by(self, companion: Self, scale: float) -> None:
        """Give the sequence a companion."""
        self.companion, self.scale, companion.is_companion = companion, scale, True

    @property
    def members(self) -> tuple[Self, ...]:
        """The sequences in the order in which they are prefilled: the companion, if there is one, and this one."""
        return (self,) if self.companion is None else (self.companion, self)


G = TypeVar("G", bound=GuidedSequence)


def guided(sequences: list[G], logits: Tensor) -> tuple[list[G], Tensor]:
    """Keep the predictions of companions; return the other sequences with the scores from which they choose.

    logits: of one forward, (sequences, vocabulary). Scores: the logits, or float32 log probabilities where a sequence
    has a companion. A token whose logit is -inf, the companion's included, is excluded.
    """
    if not any(each.is_companion or each.companion for each in sequences):
        return sequences, logits
    for sequence, row in zip(sequences, logits, strict=True):
        if sequence.is_companion:
            sequence.prediction = row
    own = [(each, row) for each, row in zip(sequences, logits, strict=True) if not each.is_companion]
    return [each for each, _ in own], torch.stack([_scores(each, row).float() for each, row in own])


def _scores(sequence: GuidedSequence, logits: Tensor) -> Tensor:
    if sequence.companion is None:
        return logits
    assert sequence.companion.prediction is not None, "rule 2"
    prediction = sequence.companion.prediction
    excluded = (logits == float("-inf")) | (prediction == float("-inf"))  # both would be NaN
    likely, unwanted = logits.float().log_softmax(-1), prediction.float().log_softmax(-1)
    return (unwanted + sequence.scale * (likely - unwanted)).masked_fill(excluded, float("-inf"))
