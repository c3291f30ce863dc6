"""Qwen2.5-Omni's thinker on vLLM. ``qwen2_5.handoff`` has what goes to the talker, ``vllm.thinker`` the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration

from omni_actors.stages.base import InvalidRequest, StageContext, StageRequest
from omni_actors.stages.checkpoint import whole_config
from omni_actors.stages.multimodal.processor import OmniInputs
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.positions import rotary_positions
from omni_actors.stages.qwen2_5.handoff import handoff_rows, tts_tokens
from omni_actors.stages.refusal import validated
from omni_actors.stages.vllm._internals import HiddenStates
from omni_actors.stages.vllm.options import VLLMThinkerParams
from omni_actors.stages.vllm.thinker import Thinker, ThinkerRequest


class _Request(ThinkerRequest):
    positions: Tensor
    """Rotary positions of the prompt, (3, n)."""


class Qwen25Thinker(Thinker[_Request]):
    """Writes an answer's text and its talker's rows. ``context.model``: a checkpoint directory of Qwen2.5-Omni."""

    def __init__(self, context: StageContext) -> None:
        """Raises as ``Thinker`` does, OSError."""
        config: Any = whole_config(context.model_directory)
        self._tts = tts_tokens(config, context.model_directory)
        super().__init__(context, config, [0], ())
        with torch.device("meta"):  # a model without weights, which computes positions only
            self._position_model = Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)

    def _new_request(self, request: StageRequest) -> _Request:
        params = validated(request.params, VLLMThinkerParams)
        if params.use_audio_in_video:
            # vLLM 0.32.0 answers a video with its sound differently than transformers does.
            raise InvalidRequest("this stage shows videos without their sound", param="use_audio_in_video")
        return _Request(request, params, OmniPrompt(request.sources))

    def _prepare(self, request: _Request, inputs: OmniInputs) -> Any:
        request.positions, _ = rotary_positions(
            self._position_model, request.ids, request.grids, use_audio_in_video=inputs.use_audio_in_video
        )
        return super()._prepare(request, inputs)

    def _handoff_header(self, request: _Request) -> dict[str, Tensor]:
        return {"ids": request.ids, "positions": request.positions, "tts": self._embed(self._tts)}

    def _prompt_rows(self, request: _Request, states: HiddenStates) -> Tensor:
        is_media = request.is_media[states.position : states.position + len(states)]
        return handoff_rows(states.layers[:, 0], states.last, is_media)

    def _answer_row(self, states: HiddenStates) -> Tensor:
        return states.last + states.layers[:, 0]
