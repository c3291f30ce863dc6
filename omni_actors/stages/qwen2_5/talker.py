"""Qwen2.5-Omni's talker as a stage: what the thinker read and writes, to codes, as it comes.

Input: see ``omni.talker`` and ``qwen2_5.thinker``. Output: ``tensors`` codes, int16 (1, 1), a chunk a code;
the last one has one where the request ends by its limit. The end is never given out.

Between the prompt and the answer stands the row of the speaker's bos_token. With the option ``prompt`` "trained" that
row and the answer's first carry the embeddings of the codec's pad and bos, and positions have three axes: so the
model's authors run it, and so the reference does where a prompt is padded. Where none is, transformers 5.23 drops the
attention mask, and with it, unmeant, both: "reference" does the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniTalkerForConditionalGeneration

from omni_actors.stages.base import InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.omni.talker import OmniTalker, TalkerRequest, require_finite
from omni_actors.stages.qwen2_5.options import Qwen25TalkerOptions, Qwen25TalkerParams
from omni_actors.stages.qwen2_5.speakers import load_speakers, speaker_named
from omni_actors.stages.refusal import validated


class TalkerEngine(OmniTalker[TalkerRequest]):
    """See the module. ``context.model``: a checkpoint directory of Qwen2.5-Omni."""

    MODEL = Qwen2_5OmniTalkerForConditionalGeneration
    HANDOFF_HEADER = frozenset({"positions", "tts"})

    def __init__(self, context: StageContext) -> None:
        options = msgspec.convert(context.options, Qwen25TalkerOptions)
        super().__init__(context, options)
        assert context.model is not None
        self._trained = options.prompt == "trained"
        self._speakers = load_speakers(context.model)
        config = self._config
        self._ends = {config.tts_codec_pad_token_id, config.tts_codec_end_token_id}
        """As the reference's default has it: padding ends the speech, too."""
        self._suppressed = torch.arange(config.vocab_size) == config.tts_codec_start_token_id

    def _open(self, request: StageRequest) -> TalkerRequest:
        params = validated(request.params, Qwen25TalkerParams)
        speaker_named(params.speaker, self._speakers)
        opened = TalkerRequest(request, params, self._suppressed)
        config = self._config
        # The reference's repetition penalty counts the codes of the prompt, too, which are these.
        opened.sampler.see(
            [config.tts_codec_mask_token_id, config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
        )
        return opened

    def _check_header(self, tensors: dict[str, Tensor]) -> None:
        super()._check_header(tensors)
        require_finite("tts", tensors["tts"], (2 + len(self._speakers), self._width))
        ids, positions = tensors["ids"], tensors["positions"]
        if positions.shape != (3, len(ids)) or positions.is_complex() or not positions.isfinite().all():
            message = f"positions: finite (3, {len(ids)}) were expected, not {tuple(positions.shape)}"
            raise InvalidRequest(message, param="rows")

    def _accept_header(self, request: TalkerRequest, tensors: dict[str, Tensor]) -> None:
        ids, config = tensors["ids"], self._config
        request.left = len(ids)
        text_end, silence, *bos = tensors["tts"].to(self._device, self._model.dtype)[:, None]
        request.text_end, request.silence = text_end, silence
        between = bos[speaker_named(request.params.speaker, self._speakers).number]
        request.opening = torch.cat([between, torch.zeros_like(between)])
        size = len(ids) + 2
        request.positions, request.delta = torch.arange(size).expand(3, -1), 0
        if self._trained:
            codes = torch.tensor([config.tts_codec_pad_token_id, config.tts_codec_start_token_id], device=self._device)
            request.opening = request.opening + self._model.get_input_embeddings()(codes)
            text = tensors["positions"].max() + 1 + torch.arange(2)
            request.positions = torch.cat([tensors["positions"], text.expand(3, -1)], 1)
            request.delta = int(text[-1]) + 1 - size

    def _project(self, inputs: Tensor) -> Tensor:
        projected: Tensor = self._model.thinker_to_talker_proj(inputs)
        return projected

    def _emit(self, requests: list[TalkerRequest], codes: list[int], hidden: Tensor) -> Iterator[StageOutput]:
        embedded = self._model.get_input_embeddings()(torch.tensor(codes, device=self._device))
        for request, code, frame in zip(requests, codes, embedded[:, None], strict=True):
            ended, full = code in self._ends, request.codes == request.limit
            if ended or full:
                self._end(request)
            else:
                request.frame = frame
                request.advance()
            tensors = {} if ended else {"codes": np.array([[code]], np.int16)}
            yield StageOutput(request.id, tensors, last=ended or full)
