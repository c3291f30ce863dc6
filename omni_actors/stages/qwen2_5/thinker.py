"""Qwen2.5-Omni's thinker on transformers: a conversation with audio, images and video to text, and the talker's rows.

``omni.thinker`` has what thinkers share, ``qwen2_5.handoff`` what goes to the talker. A token's row comes out of its
forward: the talker has it with the next token. The last digits of a row depend on the batch.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration

from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.options import ThinkerParams
from omni_actors.stages.omni.roles import opener
from omni_actors.stages.omni.thinker import OmniThinker, ThinkerRequest
from omni_actors.stages.qwen2_5.handoff import handoff_rows, tts_tokens


class _Request(ThinkerRequest):
    def __init__(self, request: StageRequest, params: ThinkerParams, collector: OmniPrompt) -> None:
        super().__init__(request, params, collector)
        self.rows: deque[Tensor] = deque()
        """The rows, (1, hidden), of computed tokens that the answer has no following token for yet."""


class ThinkerEngine(OmniThinker[_Request]):
    """Writes an answer's text and its talker's rows. ``context.model``: a checkpoint directory of Qwen2.5-Omni."""

    MODEL = Qwen2_5OmniThinkerForConditionalGeneration
    REQUEST = _Request

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._tts = tts_tokens(self._config, context.model_directory)

    def _handoff_header(self, request: _Request) -> dict[str, Tensor]:
        return {"ids": request.ids, "positions": request.positions, "tts": self._embed(self._tts)}

    def _after_forward(self, requests: list[_Request], embeds: Tensor, hidden: Tensor) -> None:
        for request, inputs, outputs in zip(requests, embeds, hidden, strict=True):
            if request.handoff is None:
                continue
            if not request.prompt_is_cached:
                is_media = request.is_media[request.cached : request.cached + len(inputs)]
                request.handoff.add_prompt(handoff_rows(inputs, outputs, is_media))
            else:
                request.rows.extend((outputs + inputs).split(1))

    def _answer_row(self, request: _Request, token: int | None) -> Tensor | None:
        return request.rows.popleft() if request.rows else None


open_engine = opener(ThinkerEngine)
