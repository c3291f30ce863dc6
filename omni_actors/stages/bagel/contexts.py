"""The contexts of one request: what the model has read, as keys and values.

Rules
1. A term is a text or a picture. A text is seen causally; the tokens of a picture see each other, and share a position.
2. A picture is read by the vision tower. To draw, it is first read as latents too.
3. The full context has all terms. Guidance compares it with two companions: the *textless* context, which ends before
   the last text and is a prefix of the full one, and the *imageless* context, which has the texts only. Without
   pictures, the latter is a prefix too: all terms, before the model's own text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional

from omni_actors.stages.autoregressive.cache import KeyValues, SlottedCache
from omni_actors.stages.bagel import pictures
from omni_actors.stages.bagel.language import Experts
from omni_actors.stages.bagel.model import BagelModel, Marks
from omni_actors.stages.multimodal.prompt import Pixels

Term: TypeAlias = "list[int] | Pixels"
"""The tokens of a text, without marks; or a picture as ``BagelModel.encode`` takes it."""


class Mark(msgspec.Struct, frozen=True):
    """Where a context ends: how many keys it has, and the position of what follows."""

    length: Annotated[int, Meta(ge=0, le=2**24)]
    position: Annotated[int, Meta(ge=0, le=2**24)]


class Contexts(msgspec.Struct, frozen=True, kw_only=True):
    """What the denoiser draws from. KeyValues: (heads, length, head size) of each layer."""

    full: Mark
    textless: Mark
    imageless: Mark
    states: KeyValues
    """The keys and values of the full context."""
    imageless_states: KeyValues | None
    """None: the imageless context is a prefix of the full one. Without a text it is empty."""
    edits: bool
    """Whether the request has a picture."""
    width: int
    height: int
    """The size of the picture to draw, in pixels."""
    noise: Tensor
    """The latent tokens before the first step, float32 (tokens, channels)."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Contexts:
        """Return the contexts with their keys and values on a device, in a dtype."""

        def moved(states: KeyValues) -> KeyValues:
            return [(keys.to(device, dtype), values.to(device, dtype)) for keys, values in states]

        imageless = None if self.imageless_states is None else moved(self.imageless_states)
        return msgspec.structs.replace(self, states=moved(self.states), imageless_states=imageless)


class RowsAttention:
    """Attention of rows of a ``SlottedCache``. mask: added to the scores; None: a token sees its whole row."""

    def __init__(self, cache: SlottedCache, mask: Tensor | None) -> None:
        self._cache, self._mask = cache, mask

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        known = self._cache.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
        seen = functional.scaled_dot_product_attention(
            queries.transpose(1, 2), *known, attn_mask=self._mask, enable_gqa=True
        )
        return seen.transpose(1, 2).flatten(2)


class _Context:
    """One context while it grows."""

    def __init__(self, model: BagelModel, limit: int) -> None:
        self._model, self._position = model, 0
        self._cache = SlottedCache(1, limit, model.dtype, model.device)
        self._cache.add_row()

    @property
    def mark(self) -> Mark:
        return Mark(self._cache.lengths[0], self._position)

    @property
    def states(self) -> KeyValues:
        return self._cache.read(0, 0, self._cache.lengths[0])

    def add_text(self, tokens: Sequence[int]) -> None:
        count = len(tokens)
        positions = torch.arange(self._position, self._position + count, device=self._model.device)
        _, mask = self._cache.extend([0], count)
        self._compute(self._model.embed([*tokens]), positions, None, mask)
        self._position += count

    def add_picture(self, embeds: Tensor, marks: Marks, *, latents: bool) -> None:
        start, end = self._model.embed([marks.picture_start, marks.picture_end])
        block = torch.cat([start[None], embeds.to(start.dtype), end[None]])
        positions = torch.full((len(block),), self._position, device=self._model.device)
        self._cache.extend([0], len(block))
        experts = self._model.picture_experts(len(embeds)) if latents else None
        self._compute(block, positions, experts, None)
        self._position += 1

    def _compute(self, embeds: Tensor, positions: Tensor, experts: Experts | None, mask: Tensor | None) -> None:
        attend = RowsAttention(self._cache, mask)
        self._model.language_model.model(embeds[None], positions[None], experts, attend)


class Reader:
    """Reads the terms of one request.

    marks: the tokenizer's. limit: the most keys of a context. draws: whether a picture is to be drawn. imageless:
    whether the imageless context is needed. noise: the source of all random numbers.
    """

    def __init__(
        self, model: BagelModel, marks: Marks, limit: int, *, draws: bool, imageless: bool, noise: torch.Generator
    ) -> None:
        self._model, self._marks, self._draws, self._noise = model, marks, draws, noise
        self._full = _Context(model, limit)
        self._imageless = _Context(model, limit) if imageless else None
        self._textless, self._texts = self._full.mark, self._full.mark

    @property
    def mark(self) -> Mark:
        """The end of the full context."""
        return self._full.mark

    @property
    def states(self) -> KeyValues:
        """The keys and values of the full context; a copy."""
        return self._full.states

    @torch.inference_mode()
    def read(self, terms: Sequence[Term]) -> None:
        """Add the terms of the request."""
        for term in terms:
            if isinstance(term, list):
                self._textless = self._full.mark
                self._add_text(self._full, term)
                if self._imageless is not None:
                    self._add_text(self._imageless, term)
            else:
                self._add_picture(term)
                self._textless = self._full.mark
        self._texts = self._full.mark

    @torch.inference_mode()
    def read_own(self, tokens: list[int]) -> None:
        """Add a text that the model wrote. The companions do not get it."""
        self._add_text(self._full, tokens)

    @torch.inference_mode()
    def contexts(self, width: int, height: int, *, edits: bool) -> Contexts:
        """Return the contexts, to draw a picture of this size in pixels."""
        size = self._model.config.token_pixels
        shape = (height // size) * (width // size), self._model.config.token_channels
        alone = self._imageless
        return Contexts(
            full=self._full.mark,
            textless=self._textless,
            imageless=self._texts if alone is None else alone.mark,
            states=self._full.states,
            imageless_states=None if alone is None else alone.states or None,
            edits=edits,
            width=width,
            height=height,
            noise=torch.randn(shape, generator=self._noise),
        )

    def _add_text(self, context: _Context, tokens: list[int]) -> None:
        context.add_text([self._marks.text_start, *tokens, self._marks.text_end])

    def _add_picture(self, pixels: Pixels) -> None:
        height, width = pixels.shape[:2]
        config = self._model.config
        if self._draws:
            noise = torch.randn(self._model.latent_shape(width, height), generator=self._noise)
            latents = self._model.encode(pixels, noise)
            embeds = self._model.embed_latents(latents, 0.0, width, height)
            self._full.add_picture(embeds, self._marks, latents=True)
        seen = pictures.resized(pixels, config.vit_image_size, config.vision.patch_size)
        self._full.add_picture(self._model.embed_vision(seen), self._marks, latents=False)


def count_positions(model: BagelModel, terms: Sequence[Term], *, draws: bool) -> int:
    """Return how many keys the full context of these terms will have."""
    config, count = model.config, 0
    for term in terms:
        if isinstance(term, list):
            count += len(term) + 2
            continue
        height, width = term.shape[:2]
        seen = pictures.fitted(width, height, config.vit_image_size, config.vision.patch_size)
        count += seen[0] * seen[1] // config.vision.patch_size**2 + 2
        if draws:
            count += width * height // config.token_pixels**2 + 2
    return count
