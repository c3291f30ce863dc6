"""Flow matching with guidance: the times of a request's steps, and one forward for the pictures of many requests.

A velocity points from the picture (time 0) to the noise (time 1). One forward has, for each request, the latent tokens
between a start and an end mark, once for each context that guidance compares. Tokens of different contexts, and of
different requests, do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from omni_actors.stages.autoregressive.cache import KeyValues
from omni_actors.stages.bagel.contexts import Contexts, Mark
from omni_actors.stages.bagel.language import Experts
from omni_actors.stages.bagel.model import BagelModel, Marks
from omni_actors.stages.bagel.options import Renorm


class Guidance(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is guided. text, image: scales, where 1 means none. begin, end: the times at which it applies.

    renorm, least: as in ``DenoiserParams``.
    """

    text: float
    image: float
    begin: float
    end: float
    renorm: Renorm
    least: float

    def applies(self, time: float) -> bool:
        """Return whether a step from this time is guided."""
        return self.text > 1 and self.begin < time <= self.end


class _Segment(msgspec.Struct, frozen=True):
    """The tokens of one picture that see one context. begin, end: their place in the forward. mark: the context's."""

    begin: int
    end: int
    mark: Mark
    states: KeyValues


class _SegmentsAttention:
    """Attention in which each segment sees itself and its context."""

    def __init__(self, segments: Sequence[_Segment]) -> None:
        self._segments = segments

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen = []
        for each in self._segments:
            old_keys, old_values = each.states[layer]
            new = slice(each.begin, each.end)
            found = functional.scaled_dot_product_attention(
                queries[:, new].transpose(1, 2),
                torch.cat([old_keys[:, : each.mark.length], keys[0, new].transpose(0, 1)], dim=1)[None],
                torch.cat([old_values[:, : each.mark.length], values[0, new].transpose(0, 1)], dim=1)[None],
                enable_gqa=True,
            )
            seen.append(found.transpose(1, 2).flatten(2))
        return torch.cat(seen, dim=1)


class Drawing(msgspec.Struct):
    """One picture on its way. latents: float32 (tokens, channels). times: one more than there are steps."""

    contexts: Contexts
    guidance: Guidance
    times: Tensor
    latents: Tensor
    step: int = 0

    @property
    def time(self) -> float:
        """Where the next step begins."""
        return float(self.times[self.step])

    def estimate(self, velocity: Tensor) -> Tensor:
        """Return the latents at time 0 if the velocity stayed as it is."""
        return self.latents - velocity * self.times[self.step]

    def advance(self, velocity: Tensor) -> None:
        """Do a step."""
        self.latents = self.latents - velocity * (self.times[self.step] - self.times[self.step + 1])
        self.step += 1

    @property
    def seen(self) -> list[tuple[Mark, KeyValues]]:
        """The contexts that the next step compares: the full one; the textless and the imageless one."""
        contexts, full = self.contexts, self.contexts.states
        seen = [(contexts.full, full)]
        if self.guidance.applies(self.time):
            seen.append((contexts.textless, full))
            if self.compares_images:
                seen.append((contexts.imageless, contexts.imageless_states or full))
        return seen

    @property
    def compares_images(self) -> bool:
        """Whether image guidance needs a forward of its own: its context is not the full one."""
        same = self.contexts.imageless_states is None and self.contexts.imageless == self.contexts.full
        return self.guidance.image > 1 and not same


def times(steps: int, shift: float) -> Tensor:
    """Return the times of so many steps, from 1 to 0: float32 (steps + 1,)."""
    even = torch.linspace(1, 0, steps + 1)
    return shift * even / (1 + (shift - 1) * even)


@torch.inference_mode()
def velocities(model: BagelModel, marks: Marks, drawings: Sequence[Drawing]) -> list[Tensor]:
    """Return the guided velocity of each picture's next step, float32 (tokens, channels), in one forward."""
    ends = model.embed([marks.picture_start, marks.picture_end])
    blocks, segments, positions = [], list[_Segment](), list[int]()
    for drawing in drawings:
        contexts = drawing.contexts
        embeds = model.embed_latents(drawing.latents, drawing.time, contexts.width, contexts.height)
        block = torch.cat([ends[:1], embeds, ends[1:]])
        for mark, states in drawing.seen:
            begin = len(positions)
            positions += [mark.position] * len(block)
            segments.append(_Segment(begin, begin + len(block), mark, states))
            blocks.append(block)
    edge = torch.tensor([place for each in segments for place in (each.begin, each.end - 1)], device=model.device)
    inner = torch.cat([torch.arange(each.begin + 1, each.end - 1) for each in segments]).to(model.device)
    hidden = model.language_model.model(
        torch.cat(blocks)[None],
        torch.tensor([positions], device=model.device),
        Experts(edge, inner),
        _SegmentsAttention(segments),
    )
    found = model.llm2vae(hidden[0, inner]).float().cpu().split([each.end - each.begin - 2 for each in segments])
    rest = iter(found)
    return [_guided(drawing, [next(rest) for _ in drawing.seen]) for drawing in drawings]


def _guided(drawing: Drawing, found: list[Tensor]) -> Tensor:
    """Combine the velocities that the contexts of ``Drawing.seen`` give."""
    full, guidance = found[0], drawing.guidance
    if len(found) == 1:
        return full
    textless = found[1]
    imageless = found[2] if len(found) == 3 else full
    guided = textless + guidance.text * (full - textless)
    if guidance.renorm == "text_channel":
        guided = guided * _factor(full, guided, guidance.least, over=-1)
    if guidance.image > 1:
        guided = imageless + guidance.image * (guided - imageless)
    if guidance.renorm == "text_channel":
        return guided
    return guided * _factor(full, guided, guidance.least, over=-1 if guidance.renorm == "channel" else None)


def _factor(wanted: Tensor, found: Tensor, least: float, *, over: int | None) -> Tensor:
    """Return what scales ``found`` down to the norm of ``wanted``: per token (over=-1) or for the whole picture."""
    aim, length = (torch.linalg.vector_norm(each, dim=over, keepdim=over is not None) for each in (wanted, found))
    factor: Tensor = (aim / (length + 1e-8)).clamp(min=least, max=1.0)
    return factor
