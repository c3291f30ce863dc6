"""Qwen3-Omni's thinker as a stage: a conversation with sound and pictures to text, and what the talker needs of it.

See ``omni.thinker`` for what thinkers share and ``qwen3.handoff`` for what goes downstream. A token's row is its
embedding, which needs no forward: the talker has it as soon as the token is chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stages.multimodal.processor import OmniProcessor
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.options import ThinkerParams
from omni_actors.stages.omni.thinker import OmniThinker, ThinkerRequest
from omni_actors.stages.qwen3.handoff import talker_positions
from omni_actors.stages.refusal import validated


class _Request(ThinkerRequest):
    spoken: Tensor
    """Which positions of the prompt the talker gets, bool (n,)."""
    seeing: Tensor
    """Which positions are picture, bool (n,)."""
    deepstack: list[Tensor]
    """What is added to those after each of the first layers, (pictures' positions, hidden); [] without."""


class ThinkerEngine(OmniThinker[_Request]):
    """See the module. ``context.model``: a checkpoint directory of Qwen3-Omni."""

    MODEL = Qwen3OmniMoeThinkerForConditionalGeneration

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._heard = _Tap(self._language, self._config.talker_config.accept_hidden_layer)

    def _open(self, request: StageRequest) -> _Request:
        return _Request(request, validated(request.params, ThinkerParams), OmniPrompt(request.sources))

    def _read(self, request: _Request, processor: OmniProcessor) -> list[int]:
        ids = super()._read(request, processor)
        request.spoken = talker_positions(request.ids, self._config)
        return ids

    def _media_encoded(self, request: _Request, pictures: list[tuple[Tensor, Any]]) -> None:
        request.seeing = torch.zeros(len(request.ids), dtype=torch.bool)
        for places, _ in pictures:
            request.seeing |= places
        request.deepstack = _joined(
            request.seeing,
            [(places, [torch.cat(layer) for layer in made.deepstack_features]) for places, made in pictures],
        )

    def _extra_forward_kwargs(self, request: _Request, piece: slice) -> dict[str, Any]:
        seeing = request.seeing[piece]
        if not seeing.any():
            return {}
        before = int(request.seeing[: piece.start].sum())
        shown = slice(before, before + int(seeing.sum()))
        return {
            "visual_pos_masks": seeing[None].to(self._device),
            "deepstack_visual_embeds": [layer[shown] for layer in request.deepstack],
        }

    def _after(self, requests: list[_Request], embeds: Tensor, hidden: Tensor) -> None:
        request, [read, *_] = requests[0], embeds
        if not request.prefill_left or not request.downstream:
            return
        piece = slice(request.cached, request.cached + len(read))
        spoken, heard = request.spoken[piece].to(self._device), request.is_media[piece].to(self._device)
        if spoken.any():
            request.rows.append(torch.where(heard[:, None], self._heard.hidden[0], read)[spoken])
        if piece.stop == len(request.ids):
            del request.deepstack, request.seeing

    def _handoff_header(self, request: _Request) -> dict[str, Tensor]:
        config, spoken = self._config, request.spoken
        tts = self._embed([config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id])
        return {"ids": request.ids[spoken], "is_media": request.is_media[spoken], "tts": tts, **request.grids}

    def _token_row(self, request: _Request) -> Tensor:
        return self._embed([request.token])


class _Tap:
    """Holds what layer ``layer`` of the last forward gave, (rows, count, hidden), as transformers counts layers."""

    hidden: Tensor

    def __init__(self, language: Any, layer: int) -> None:
        layers = language.layers
        if not 0 < layer <= len(layers):
            raise ValueError(f"accept_hidden_layer: found {layer}; the thinker has layers 1 to {len(layers)}")
        source = language.norm if layer == len(layers) else layers[layer - 1]
        source.register_forward_hook(self._hold)

    def _hold(self, module: object, inputs: object, output: Tensor) -> None:
        self.hidden = output


def _joined(seeing: Tensor, parts: list[tuple[Tensor, list[Tensor]]]) -> list[Tensor]:
    """Layer by layer, the rows of images and of videos in the order of their positions.

    parts: of each kind, where it is among all positions and its rows by layer.
    """
    if len(parts) < 2:
        return parts[0][1] if parts else []
    joined = []
    for layers in zip(*(rows for _, rows in parts), strict=True):
        whole = layers[0].new_empty(int(seeing.sum()), layers[0].shape[-1])
        for (places, _), rows in zip(parts, layers, strict=True):
            whole[places[seeing].to(whole.device)] = rows
        joined.append(whole)
    return joined
