"""Qwen3-Omni's thinker on transformers: a conversation with audio, images and video to text, and rows for the talker.

``omni.thinker`` has what thinkers share, ``qwen3.handoff`` what goes to the talker. A token's row is its embedding,
which needs no forward: the talker has it as soon as the token is chosen.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from omni_actors.stages.base import StageContext
from omni_actors.stages.omni.roles import opener
from omni_actors.stages.omni.thinker import OmniThinker, ThinkerRequest
from omni_actors.stages.qwen3.handoff import handoff_header, talker_positions


class _Request(ThinkerRequest):
    visual: Tensor
    """The positions that are images or video, bool (n,)."""
    deepstack: list[Tensor]
    """What the first layers add to the visual positions, (visual positions, hidden) per layer; [] without any."""


class ThinkerEngine(OmniThinker[_Request]):
    """Writes an answer's text and its talker's rows. ``context.model``: a checkpoint directory of Qwen3-Omni."""

    MODEL = Qwen3OmniMoeThinkerForConditionalGeneration
    REQUEST = _Request

    _accepted: Tensor
    """The last forward's output, (rows, count, hidden), of the layer that the talker reads."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        layers, accepted = self._language.layers, self._config.talker_config.accept_hidden_layer
        if not 0 < accepted <= len(layers):
            raise ValueError(f"accept_hidden_layer: found {accepted}; the thinker has layers 1 to {len(layers)}")
        source = self._language.norm if accepted == len(layers) else layers[accepted - 1]
        source.register_forward_hook(self._keep_output)

    def _keep_output(self, module: object, inputs: object, output: Tensor) -> None:
        self._accepted = output

    def _talker_positions(self, request: _Request) -> Tensor:
        return talker_positions(request.ids, self._config)

    def _handoff_header(self, request: _Request) -> dict[str, Tensor]:
        return handoff_header(request, self._config, self._embed)

    def _media_encoded(self, request: _Request, visual: list[tuple[Tensor, Any]]) -> None:
        positions = torch.cat([torch.empty(0, dtype=torch.int64), *(places.nonzero()[:, 0] for places, _ in visual)])
        request.visual = torch.zeros(len(request.ids), dtype=torch.bool).index_fill(0, positions, value=True)
        layers = zip(*(encoded.deepstack_features for _, encoded in visual), strict=True)
        # Images and videos may alternate in the prompt.
        request.deepstack = [torch.cat([*chain(*layer)])[positions.argsort()] for layer in layers]

    def _extra_forward_kwargs(self, request: _Request, chunk: slice) -> dict[str, Any]:
        visual = request.visual[chunk]
        if not visual.any():
            return {}
        before = int(request.visual[: chunk.start].sum())
        rows = slice(before, before + int(visual.sum()))
        return {
            "visual_pos_masks": visual[None].to(self._device),
            "deepstack_visual_embeds": [layer[rows] for layer in request.deepstack],
        }

    def _after_forward(self, requests: list[_Request], embeds: Tensor, hidden: Tensor) -> None:
        request, text = requests[0], embeds[0]
        if request.prompt_is_cached:
            return
        chunk = slice(request.cached, request.cached + len(text))
        if request.handoff is not None:
            media = request.is_media[chunk].to(self._device)
            request.handoff.add_prompt(torch.where(media[:, None], self._accepted[0], text))
        if chunk.stop == len(request.ids):
            del request.deepstack, request.visual

    def _answer_row(self, request: _Request, token: int | None) -> Tensor | None:
        return None if token is None else self._embed([token])


open_engine = opener(ThinkerEngine)
