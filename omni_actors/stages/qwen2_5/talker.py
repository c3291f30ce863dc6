"""Qwen2.5-Omni's talker on transformers: a thinker's rows to codes, while the thinker is still writing.

Input: see ``omni.talker`` and ``qwen2_5.handoff``. Output: one chunk per code, with tensors ``codes``, int16 (1, 1).
The last chunk has a code only if the request ends by its limit: the end itself is not given out.

The row of the speaker's bos_token stands between the prompt and the answer. With the option ``prompt`` "trained", the
embeddings of the codec's pad and bos are added to that row and to the answer's first one, and positions have three
axes. The model's authors run it so, and so does transformers 5.23 (``Qwen2_5OmniForConditionalGeneration.generate``,
the reference) if a prompt is padded. Without padding, transformers drops the attention mask and, probably by mistake,
both of these with it; "reference" does the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniTalkerForConditionalGeneration

from omni_actors.stages.base import InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.omni.talker import OmniTalker, require_finite, spoken
from omni_actors.stages.omni.talker_request import TalkerRequest
from omni_actors.stages.qwen2_5.options import Qwen25TalkerOptions, Qwen25TalkerParams
from omni_actors.stages.qwen2_5.speakers import load_speakers, speaker_named
from omni_actors.stages.refusal import validated


class TalkerEngine(OmniTalker[TalkerRequest]):
    """Chooses codec codes for a thinker's rows. ``context.model``: a checkpoint directory of Qwen2.5-Omni."""

    MODEL = Qwen2_5OmniTalkerForConditionalGeneration
    HANDOFF_HEADER = frozenset({"positions", "tts"})

    def __init__(self, context: StageContext) -> None:
        options = msgspec.convert(context.options, Qwen25TalkerOptions)
        super().__init__(context, options)
        self._trained = options.prompt == "trained"
        self._speakers = load_speakers(context.model_directory)
        config = self._config
        self._ends = {config.tts_codec_pad_token_id, config.tts_codec_end_token_id}
        """Padding ends the speech, too: the reference's default."""
        self._suppressed = torch.arange(config.vocab_size) == config.tts_codec_start_token_id

    def _new_request(self, request: StageRequest) -> TalkerRequest:
        params = validated(request.params, Qwen25TalkerParams)
        speaker_named(params.speaker, self._speakers)
        opened = TalkerRequest(request, params, self._suppressed)
        config = self._config
        # The reference's repetition penalty also counts the prompt's codes, which are these.
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
        request.prompt_rows_left = len(ids)
        text_eos, text_pad, *bos = tensors["tts"].to(self._device, self._model.dtype)[:, None]
        request.text_eos, request.text_pad = text_eos, text_pad
        between = bos[speaker_named(request.params.speaker, self._speakers).number]
        request.prefix = torch.cat([between, torch.zeros_like(between)])
        size = len(ids) + 2
        request.positions, request.delta = torch.arange(size).expand(3, -1), 0
        if self._trained:
            codes = torch.tensor([config.tts_codec_pad_token_id, config.tts_codec_start_token_id], device=self._device)
            request.prefix = request.prefix + self._model.get_input_embeddings()(codes)
            text = tensors["positions"].max() + 1 + torch.arange(2)
            request.positions = torch.cat([tensors["positions"], text.expand(3, -1)], 1)
            request.delta = int(text[-1]) + 1 - size

    def _project(self, inputs: Tensor) -> Tensor:
        projected: Tensor = self._model.thinker_to_talker_proj(inputs)
        return projected

    def _embed_codes(self, codes: Tensor) -> Tensor:
        embedded: Tensor = self._model.get_input_embeddings()(codes[:, 0])
        return embedded

    def _emit(self, requests: list[TalkerRequest], codes: list[int], hidden: Tensor) -> Iterator[StageOutput]:
        embedded = self._embed_codes(torch.tensor(codes, device=self._device)[:, None])
        for request, code, frame in zip(requests, codes, embedded[:, None], strict=True):
            ended, full = code in self._ends, request.codes == request.max_codes
            if ended or full:
                self.abort(request.id)
            else:
                request.code_input = frame
                request.advance()
            yield spoken(request.id, () if ended else (code,), last=ended or full)
