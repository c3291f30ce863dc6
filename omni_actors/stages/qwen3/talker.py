"""Qwen3-Omni's talker on transformers: a thinker's rows to frames of codes, while the thinker is still writing.

Input: see ``omni.talker`` and ``qwen3.handoff``. Output: one chunk per frame, with tensors ``codes``, int16 (1,
groups); the last chunk has none. A request that ends by its limit has one frame less than first codes were chosen. All
of this is as in ``Qwen3OmniMoeForConditionalGeneration.generate`` of transformers, the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration

from omni_actors.stages.autoregressive.sampling import Sampler, Sampling
from omni_actors.stages.base import Decisions, InvalidRequest, StageContext, StageFailure, StageOutput, StageRequest
from omni_actors.stages.omni.options import TalkerOptions, TalkerParams
from omni_actors.stages.omni.positions import GRIDS, rotary_positions
from omni_actors.stages.omni.talker import OmniTalker, require_finite, spoken
from omni_actors.stages.omni.talker_request import TalkerRequest
from omni_actors.stages.qwen3.handoff import ANSWER_HEADER
from omni_actors.stages.qwen3.predictor import CodePredictor
from omni_actors.stages.refusal import validated

SPECIAL = 1024
"""The special codes are the last ones of the vocabulary. Only the end of speech is ever chosen among them."""
DEFAULT_SPEAKER = "ethan"
RESIDUAL_SAMPLING = Sampling(temperature=1.0, top_k=50, top_p=0.8)
"""The code predictor's, if the talker samples: as in the reference."""


class _Request(TalkerRequest):
    is_media: Tensor
    """Which of the prompt rows that have not arrived are audio, images or video, bool."""

    def __init__(self, request: StageRequest, params: TalkerParams, suppressed: Tensor) -> None:
        super().__init__(request, params, suppressed)
        self.residual = Sampler(RESIDUAL_SAMPLING, self.random) if params.talker_temperature else None


class TalkerEngine(OmniTalker[_Request]):
    """Chooses frames of codes for a thinker's rows. ``context.model``: a checkpoint directory of Qwen3-Omni."""

    MODEL = Qwen3OmniMoeTalkerForConditionalGeneration
    HANDOFF_HEADER = frozenset({"is_media", "tts"})

    def __init__(self, context: StageContext) -> None:
        super().__init__(context, msgspec.convert(context.options, TalkerOptions))
        self._config.audio_config = self._whole.thinker_config.audio_config  # the positions of audio depend on it
        self._predictor = CodePredictor(self._model.code_predictor)
        self._speakers: dict[str, int] = {name.lower(): code for name, code in self._config.speaker_id.items()}
        vocabulary = self._config.text_config.vocab_size
        self._suppressed = torch.arange(vocabulary) >= vocabulary - SPECIAL
        self._suppressed[self._config.codec_eos_token_id] = False

    def _new_request(self, request: StageRequest) -> _Request:
        params = validated(request.params, TalkerParams)
        self._speaker(params.speaker)
        return _Request(request, params, self._suppressed)

    def _check_header(self, tensors: dict[str, Tensor]) -> None:
        super()._check_header(tensors)
        ids, found = tensors["ids"], tensors["is_media"]
        if found.dtype != torch.bool or found.shape != ids.shape or len(ids) < ANSWER_HEADER:
            message = f"is_media: bool (n,), n >= {ANSWER_HEADER}, was expected, not {found.dtype} {tuple(found.shape)}"
            raise InvalidRequest(message, param="rows")
        require_finite("tts", tensors["tts"], (3, self._width))

    def _accept_header(self, request: _Request, tensors: dict[str, Tensor]) -> None:
        config, ids = self._config, tensors["ids"]
        request.is_media, request.prompt_rows_left = tensors["is_media"], len(ids)
        pads = ids.new_full((ANSWER_HEADER + 6,), self._whole.tts_pad_token_id)
        grids = {name: tensors[name] for name in GRIDS if name in tensors}
        # Like the reference, this computes positions as if no video had sound.
        request.positions, request.delta = rotary_positions(
            self._model, torch.cat([ids[:-ANSWER_HEADER], pads]), grids, use_audio_in_video=False
        )
        tts = tensors["tts"].to(self._device, self._model.dtype)
        bos, request.text_eos, request.text_pad = self._embed_text(tts)[:, None]
        text = torch.cat([request.text_pad.expand(4, -1), bos, torch.zeros_like(bos)])
        codes = [config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id]
        codes += [self._speaker(request.params.speaker), config.codec_pad_id, config.codec_bos_id]
        request.prefix = text + self._model.get_input_embeddings()(torch.tensor(codes, device=self._device))

    def _embed_prompt(self, request: _Request, rows: Tensor) -> Tensor:
        is_media, request.is_media = request.is_media[: len(rows)].to(rows.device), request.is_media[len(rows) :]
        if not is_media.any():
            return self._embed_text(rows)
        inputs = rows.new_empty(len(rows), self._config.text_config.hidden_size)
        inputs[is_media] = self._model.hidden_projection(rows[is_media])
        inputs[~is_media] = self._embed_text(rows[~is_media])
        return inputs

    def _embed_text(self, rows: Tensor) -> Tensor:
        projected: Tensor = self._model.text_projection(rows)
        return projected

    def _embed_codes(self, codes: Tensor) -> Tensor:
        return self._predictor.embed(self._model.get_input_embeddings()(codes[:, 0]), codes[:, 1:])

    def _replay(self, request: _Request, codes: Decisions) -> None:
        super()._replay(request, codes)
        if request.residual:
            for code in codes[1:]:
                request.residual.replay(code)

    def _speaker(self, name: str | None) -> int:
        """The speaker's code. Raises ``InvalidRequest``."""
        if name is None:
            return self._speakers.get(DEFAULT_SPEAKER, next(iter(self._speakers.values())))
        if name.lower() not in self._speakers:
            known = ", ".join(self._speakers)
            raise InvalidRequest(f"speaker: found {name!r}; accepted: {known}", param="speaker")
        return self._speakers[name.lower()]

    def _emit(self, requests: list[_Request], codes: list[int], hidden: Tensor) -> Iterator[StageOutput | StageFailure]:
        going = []
        for at, (request, code) in enumerate(zip(requests, codes, strict=True)):
            if code == self._config.codec_eos_token_id or request.codes == request.max_codes:
                self.abort(request.id)
                yield spoken(request.id, (), last=True)
            else:
                going.append(at)
        if not going:
            return
        requests, codes = [requests[at] for at in going], [codes[at] for at in going]
        embedded = self._model.get_input_embeddings()(torch.tensor(codes, device=hidden.device))
        with self._adapters.applied([request.adapter for request in requests]):
            others, frames = self._predictor(hidden[going], embedded, [request.residual for request in requests])
        for request, code, rest, frame in zip(requests, codes, others, frames[:, None], strict=True):
            if rest is None:
                yield self._failed(request)
                continue
            request.code_input = frame
            request.advance()
            yield spoken(request.id, [code, *rest], last=False)

    def close(self) -> None:
        super().close()
        del self._predictor
