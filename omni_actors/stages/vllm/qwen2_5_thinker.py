"""Qwen2.5-Omni's thinker on vLLM: as ``qwen2_5.thinker``.

A row of the talker's is what went into the language model at a position and what came out of it, added up; of sound and
picture only the latter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration

from omni_actors.stages.base import InvalidRequest, StageContext, StageRequest
from omni_actors.stages.checkpoint import whole_config
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.positions import rotary_positions
from omni_actors.stages.qwen2_5.speakers import load_speakers
from omni_actors.stages.vllm._internals import HiddenStates
from omni_actors.stages.vllm.options import VLLMThinkerParams
from omni_actors.stages.vllm.thinker import Thinker, ThinkerRequest

__all__ = ["Qwen25Thinker"]


class _Request(ThinkerRequest):
    positions: Tensor
    """(3, n)."""


class Qwen25Thinker(Thinker[_Request]):
    """See the module. ``context.model``: a checkpoint directory of Qwen2.5-Omni."""

    def __init__(self, context: StageContext) -> None:
        """Raises as ``Thinker`` does, OSError."""
        assert context.model is not None
        config: Any = whole_config(context.model)
        talker = config.talker_config
        self._tts = [talker.tts_text_end_token_id, talker.tts_text_pad_token_id]
        self._tts += [speaker.bos_token for speaker in load_speakers(context.model).values()]
        super().__init__(context, config, [0], ())
        with torch.device("meta"):  # it counts positions, and has no weights
            self._counting = Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)

    def _open(self, request: StageRequest, params: VLLMThinkerParams) -> _Request:
        if params.use_audio_in_video:
            # Of a video with its sound vLLM 0.32.0 makes another answer than transformers does.
            raise InvalidRequest("this stage shows videos without their sound", param="use_audio_in_video")
        return _Request(request, params, OmniPrompt(request.sources))

    def _prepared(self, request: _Request, *, use_audio_in_video: bool) -> None:
        request.positions, _ = rotary_positions(
            self._counting, request.ids, request.grids, use_audio_in_video=use_audio_in_video
        )

    def _handoff_header(self, request: _Request) -> dict[str, Tensor]:
        return {"ids": request.ids, "positions": request.positions, "tts": self._embed(self._tts)}

    def _rows(self, request: _Request, captured: HiddenStates) -> Tensor:
        heard = request.is_media[captured.position : captured.position + len(captured)].to(captured.last.device)
        return captured.last + captured.layers[:, 0].masked_fill(heard[:, None], 0)

    def _row(self, captured: HiddenStates) -> Tensor:
        return captured.last + captured.layers[:, 0]
