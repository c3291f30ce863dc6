"""Qwen2.5-Omni's thinker on transformers: a conversation with audio, images and video to text, and the talker's rows.

``omni.thinker`` has what thinkers share, ``qwen2_5.handoff`` what goes to the talker. The last digits of a row depend
on the batch, so an answer's rows may differ in a replay: such a replay ends with StageCrashed
(``EngineSpec.deterministic``).
"""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration

from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.options import ThinkerParams
from omni_actors.stages.omni.thinker import OmniThinker, ThinkerRequest
from omni_actors.stages.qwen2_5.handoff import handoff_rows, tts_tokens


class ThinkerEngine(OmniThinker[ThinkerRequest]):
    """Writes an answer's text and its talker's rows. ``context.model``: a checkpoint directory of Qwen2.5-Omni."""

    MODEL = Qwen2_5OmniThinkerForConditionalGeneration

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._tts = tts_tokens(self._config, context.model_directory)

    def _open(self, request: StageRequest, params: ThinkerParams) -> ThinkerRequest:
        return ThinkerRequest(request, params, OmniPrompt(request.sources))

    def _handoff_header(self, request: ThinkerRequest) -> dict[str, Tensor]:
        return {"ids": request.ids, "positions": request.positions, "tts": self._embed(self._tts)}

    def _after_forward(self, requests: list[ThinkerRequest], embeds: Tensor, hidden: Tensor) -> None:
        for request, inputs, outputs in zip(requests, embeds, hidden, strict=True):
            if request.handoff is None:
                continue
            if request.prefill_left:
                is_media = request.is_media[request.cached : request.cached + len(inputs)]
                request.handoff.add_prompt(handoff_rows(inputs, outputs, is_media))
            else:
                request.handoff.add_token(outputs + inputs)
