"""Qwen3-Omni's thinker on transformers: a conversation with audio, images and video to text, and rows for the talker.

``omni.thinker`` has what thinkers share, ``qwen3.handoff`` what goes to the talker. A token's row is its embedding,
which needs no forward: the talker has it as soon as the token is chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.options import ThinkerParams
from omni_actors.stages.omni.thinker import OmniThinker, ThinkerRequest
from omni_actors.stages.qwen3.handoff import handoff_header, talker_positions


class _Request(ThinkerRequest):
    visual: Tensor
    """The positions that are images or video, bool (n,)."""
    deepstack: list[Tensor]
    """What the first layers add to the visual positions, (visual positions, hidden) per layer; [] without any."""


class ThinkerEngine(OmniThinker[_Request]):
    """See the module. ``context.model``: a checkpoint directory of Qwen3-Omni."""

    MODEL = Qwen3OmniMoeThinkerForConditionalGeneration

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._accepted = _LayerOutput(self._language, self._config.talker_config.accept_hidden_layer)

    def _open(self, request: StageRequest, params: ThinkerParams) -> _Request:
        return _Request(request, params, OmniPrompt(request.sources))

    def _talker_positions(self, request: _Request) -> Tensor:
        return talker_positions(request.ids, self._config)

    def _handoff_header(self, request: _Request) -> dict[str, Tensor]:
        return handoff_header(request, self._config, self._embed)

    def _media_encoded(self, request: _Request, visual: list[tuple[Tensor, Any]]) -> None:
        request.visual = torch.zeros(len(request.ids), dtype=torch.bool)
        for places, _ in visual:
            request.visual |= places
        request.deepstack = _merged(
            request.visual,
            [(places, [torch.cat(layer) for layer in encoded.deepstack_features]) for places, encoded in visual],
        )

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
        if not request.prefill_left:
            return
        chunk = slice(request.cached, request.cached + len(text))
        if request.handoff is not None:
            media = request.is_media[chunk].to(self._device)
            request.handoff.add_prompt(torch.where(media[:, None], self._accepted.hidden[0], text))
        if chunk.stop == len(request.ids):
            del request.deepstack, request.visual

    def _token_row(self, request: _Request) -> Tensor:
        return self._embed([request.token])


class _LayerOutput:
    """Holds the output, (rows, count, hidden), of one layer in the last forward; layers count as in transformers."""

    hidden: Tensor

    def __init__(self, language: Any, layer: int) -> None:
        layers = language.layers
        if not 0 < layer <= len(layers):
            raise ValueError(f"accept_hidden_layer: found {layer}; the thinker has layers 1 to {len(layers)}")
        source = language.norm if layer == len(layers) else layers[layer - 1]
        source.register_forward_hook(self._hold)

    def _hold(self, module: object, inputs: object, output: Tensor) -> None:
        self.hidden = output


def _merged(visual: Tensor, parts: list[tuple[Tensor, list[Tensor]]]) -> list[Tensor]:
    """Merge the rows of images and of videos, layer by layer, in the order of their positions.

    visual: the positions of both, bool (n,). parts: of each kind, its positions, bool (n,), and its rows by layer.
    """
    if len(parts) < 2:
        return parts[0][1] if parts else []
    merged = []
    for layers in zip(*(rows for _, rows in parts), strict=True):
        whole = layers[0].new_empty(int(visual.sum()), layers[0].shape[-1])
        for (places, _), rows in zip(parts, layers, strict=True):
            whole[places[visual].to(whole.device)] = rows
        merged.append(whole)
    return merged
