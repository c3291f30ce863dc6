"""Qwen2.5-Omni's thinker as a stage: a conversation with sound and pictures to text, and what the talker needs of it.

A row of the talker's is what went into the language model at a position and what came out of it, added up; of sound and
picture only the latter. So the row of a token of the answer is there one step behind the token, and the last token has
none. The talker gets all positions of the prompt. As the last digits of what a batch computes move with the company in
it, so do an answer's rows: a replay that differs ends with StageCrashed (``EngineSpec.deterministic``).

Wire, besides what every talker gets (``omni.talker``):
the first chunk has ``positions``, (3, n), of the prompt's rotary embedding, and ``tts``, (2 + speakers, hidden),
the embeddings of the talker's text_eos and text_pad and of each speaker's bos_token, in the order of the checkpoint's
file.
"""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration

from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.options import ThinkerParams
from omni_actors.stages.omni.thinker import OmniThinker, ThinkerRequest
from omni_actors.stages.qwen2_5.speakers import load_speakers
from omni_actors.stages.refusal import validated


class ThinkerEngine(OmniThinker[ThinkerRequest]):
    """See the module. ``context.model``: a checkpoint directory of Qwen2.5-Omni."""

    MODEL = Qwen2_5OmniThinkerForConditionalGeneration

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        assert context.model is not None
        talker = self._config.talker_config
        speakers = load_speakers(context.model).values()
        self._tts = [talker.tts_text_end_token_id, talker.tts_text_pad_token_id]
        self._tts += [speaker.bos_token for speaker in speakers]

    def _open(self, request: StageRequest) -> ThinkerRequest:
        return ThinkerRequest(request, validated(request.params, ThinkerParams), OmniPrompt(request.sources))

    def _after(self, requests: list[ThinkerRequest], embeds: Tensor, hidden: Tensor) -> None:
        for request, went_in, came_out in zip(requests, embeds, hidden, strict=True):
            if request.prefill_left:
                heard = request.is_media[request.cached : request.cached + len(went_in)].to(self._device)
                request.rows.append(came_out + went_in.masked_fill(heard[:, None], 0))
            else:
                request.said.append(came_out + went_in)

    def _handoff_header(self, request: ThinkerRequest) -> dict[str, Tensor]:
        return {"ids": request.ids, "positions": request.positions, "tts": self._embed(self._tts)}
