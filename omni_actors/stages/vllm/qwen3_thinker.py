"""Qwen3-Omni's thinker on vLLM. ``qwen3.handoff`` has what goes to the talker, ``vllm.thinker`` the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omni_actors.stages.base import InvalidRequest, StageContext, StageRequest
from omni_actors.stages.checkpoint import WrongCheckpoint, whole_config
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.qwen3.handoff import handoff_header, talker_positions
from omni_actors.stages.refusal import validated
from omni_actors.stages.vllm._internals import HiddenStates
from omni_actors.stages.vllm.options import VLLMThinkerParams
from omni_actors.stages.vllm.thinker import Thinker, ThinkerRequest


class Qwen3Thinker(Thinker[ThinkerRequest]):
    """Writes an answer's text and its talker's rows. ``context.model``: a checkpoint directory of Qwen3-Omni."""

    WORKER = "omni_actors.stages.vllm.recordings.Qwen3ThinkerWorker"

    def __init__(self, context: StageContext) -> None:
        """Raises as ``Thinker`` does, WrongCheckpoint, OSError."""
        config: Any = whole_config(context.model_directory)
        layer = config.talker_config.accept_hidden_layer
        if layer <= len(config.thinker_config.vision_config.deepstack_visual_indexes):
            what = f"the talker reads layer {layer}, to which vLLM has added the pictures already"
            raise WrongCheckpoint(context.model_directory, "thinker", what)
        super().__init__(context, config, [layer], [config.im_end_token_id])
        self._audio_in_video = bool(self._options.engine_args.get("disable_chunked_mm_input"))

    def _new_request(self, request: StageRequest) -> ThinkerRequest:
        params = validated(request.params, VLLMThinkerParams)
        if params.use_audio_in_video and not self._audio_in_video:
            # vLLM 0.32.0 mixes up sound and frames if a prefill chunk ends among them.
            message = "the sound of a video needs a stage with engine_args.disable_chunked_mm_input: true"
            raise InvalidRequest(message, param="use_audio_in_video")
        return ThinkerRequest(request, params, OmniPrompt(request.sources))

    def _talker_positions(self, request: ThinkerRequest) -> Tensor:
        return talker_positions(request.ids, self._config)

    def _handoff_header(self, request: ThinkerRequest) -> dict[str, Tensor]:
        return handoff_header(request, self._config, self._embed)

    def _prompt_rows(self, request: ThinkerRequest, states: HiddenStates) -> Tensor:
        chunk = slice(states.position, states.position + len(states))
        is_media = request.is_media[chunk].to(states.last.device)
        return torch.where(is_media[:, None], states.layers[:, 0], self._embed(request.ids[chunk]))

    def _token_row(self, token: int) -> Tensor:
        return self._embed([token])
