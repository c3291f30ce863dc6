"""Qwen3-Omni's thinker on vLLM: as ``qwen3.thinker``.

The talker reads sound and picture as the hidden state of layer ``accept_hidden_layer``, text as rows of the embedding
table, which need no forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omni_actors.stages.base import InvalidRequest, StageContext, StageRequest
from omni_actors.stages.checkpoint import WrongCheckpoint, whole_config
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.qwen3.handoff import talker_positions
from omni_actors.stages.vllm._internals import HiddenStates
from omni_actors.stages.vllm.options import VLLMThinkerParams
from omni_actors.stages.vllm.thinker import Thinker, ThinkerRequest

__all__ = ["Qwen3Thinker"]


class _Request(ThinkerRequest):
    spoken: Tensor
    """Which positions of the prompt the talker gets, bool (n,)."""


class Qwen3Thinker(Thinker[_Request]):
    """See the module. ``context.model``: a checkpoint directory of Qwen3-Omni."""

    def __init__(self, context: StageContext) -> None:
        """Raises as ``Thinker`` does, WrongCheckpoint, OSError."""
        assert context.model is not None
        config: Any = whole_config(context.model)
        layer = config.talker_config.accept_hidden_layer
        if layer <= len(config.thinker_config.vision_config.deepstack_visual_indexes):
            what = f"the talker reads layer {layer}, to which vLLM has added the pictures already"
            raise WrongCheckpoint(context.model, "thinker", what)
        super().__init__(context, config, [layer], [config.im_end_token_id])
        self._hears_videos = bool(self._options.engine_args.get("disable_chunked_mm_input"))

    def _open(self, request: StageRequest, params: VLLMThinkerParams) -> _Request:
        if params.use_audio_in_video and not self._hears_videos:
            # vLLM 0.32.0 mixes up sound and frames where a piece of the prompt ends among them.
            message = "a video is heard only by a stage with engine_args.disable_chunked_mm_input: true"
            raise InvalidRequest(message, param="use_audio_in_video")
        return _Request(request, params, OmniPrompt(request.sources))

    def _prepared(self, request: _Request, *, use_audio_in_video: bool) -> None:
        request.spoken = talker_positions(request.ids, self._config)

    def _handoff_header(self, request: _Request) -> dict[str, Tensor]:
        config, spoken = self._config, request.spoken
        tts = self._embed([config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id])
        return {"ids": request.ids[spoken], "is_media": request.is_media[spoken], "tts": tts, **request.grids}

    def _rows(self, request: _Request, captured: HiddenStates) -> Tensor:
        piece = slice(captured.position, captured.position + len(captured))
        heard = request.is_media[piece].to(captured.last.device)
        return torch.where(heard[:, None], captured.layers[:, 0], self._embed(request.ids[piece]))

    def _token_row(self, token: int) -> Tensor:
        return self._embed([token])

    def _spoken(self, request: _Request, rows: Tensor) -> Tensor:
        return rows[request.spoken[request.given : request.given + len(rows)].to(rows.device)]
