"""Qwen3-Omni's talker as a stage: what the thinker read and writes, to frames of codes, as it comes.

Input: see ``speech``. Output: ``tensors`` codes, int16 (1, groups), a chunk a frame; the last one has none. A request
whose answer has no text ends without a frame.

Prompt rows are prefilled as they come, while the thinker is still prefilling or writing. The position of the answer's
first token is the first that is decoded: when that token is known, one step is left to the first frame. The step behind
frame k needs the row of the answer's token k + 1, or its end; a request whose row is not here waits, and no other does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration

from omni_actors.stages.autoregressive.batch import Batch, Sequence
from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.sampling import Sampler, Sampling, generator
from omni_actors.stages.base import Chunk, InvalidRequest, RequestId, StageContext, StageOutput, StageRequest
from omni_actors.stages.checkpoint import load_part, whole_config
from omni_actors.stages.multimodal.conversation import validated
from omni_actors.stages.qwen3.predictor import CodePredictor
from omni_actors.stages.qwen3.speech import GRIDS, HEADER, positions_of
from omni_actors.stages.registry import TalkerOptions, TalkerParams
from omni_actors.stages.tensors import to_torch

SPECIAL = 1024
"""The last of the talker's vocabulary: of these only the end is ever chosen."""
DEFAULT_SPEAKER = "ethan"
RESIDUAL_SAMPLING = Sampling(temperature=1.0, top_k=50, top_p=0.8)
"""Of the code predictor, where the talker samples; the reference's."""


class _Request(Sequence):
    """Rows here are of the talker's width, (k, hidden), and its dtype."""

    heard: Tensor
    """Which of the prompt rows to come are sound or picture, bool; shorter with each that has come."""
    positions: Tensor
    """Of the prompt, int64 (3, n)."""
    delta: int
    text_end: Tensor
    """(1, hidden)."""
    silence: Tensor
    """(1, hidden): beside each frame after the text."""
    opening: Tensor
    """(6, hidden): what comes between the prompt and the answer's first token; the last is added to that."""
    limit: int
    """Codes that may be chosen."""

    def __init__(self, request: StageRequest, params: TalkerParams, suppressed: Tensor) -> None:
        self.id, self.params = request.request_id, params
        self.open = set(request.sources)
        self.inputs: list[Tensor] = []
        """Of positions that are ready."""
        self.text: deque[Tensor] = deque()
        """Of the answer, for frames to come."""
        self.introduced = self.opened = False
        """Whether the first chunk is here; whether the answer's first token is."""
        self.seen = self.codes = 0
        """Positions in the cache; codes chosen."""
        self.frame: Tensor | None = None
        """The last frame's codes as an input, which waits for its text."""
        source = generator(params.seed)
        sampling = Sampling(
            params.talker_temperature, params.talker_top_k, params.talker_top_p, params.talker_repetition_penalty
        )
        self.sampler = Sampler(sampling, source, suppressed)
        self.residual = Sampler(RESIDUAL_SAMPLING, source) if params.talker_temperature else None

    def add(self, rows: Tensor) -> None:
        self.inputs.append(rows)
        self.ready += len(rows)

    def take(self, count: int) -> Tensor:
        rows = torch.cat(self.inputs)
        self.inputs = [rows[count:]]
        self.ready -= count
        return rows[:count]

    def advance(self) -> None:
        """The next position is ready where its text is, or where no more text comes."""
        if self.frame is not None and (self.text or not self.open):
            self.add(self.frame + (self.text.popleft() if self.text else self.silence))
            self.frame = None


class TalkerEngine:
    """See the module. ``context.model``: a checkpoint directory of Qwen3-Omni; its ``talker`` weights are read."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        options = self._options = msgspec.convert(context.options, TalkerOptions)
        if context.model is None:
            raise ValueError(f"stage {context.stage!r}: qwen3_talker needs a model, a checkpoint directory")
        torch.set_num_threads(context.threads)
        context.report("reading the weights of the talker")
        model: Any = load_part(
            Qwen3OmniMoeTalkerForConditionalGeneration,
            context.model,
            "talker",
            getattr(torch, options.dtype),
            context.device,
        )
        whole: Any = whole_config(context.model)
        model.config.audio_config = whole.thinker_config.audio_config  # the positions of sound depend on it
        self._model, self._config, self._tts_pad = model, model.config, whole.tts_pad_token_id
        self._predictor = CodePredictor(model.code_predictor)
        vocabulary = self._config.text_config.vocab_size
        self._suppressed = torch.arange(vocabulary) >= vocabulary - SPECIAL
        self._suppressed[self._config.codec_eos_token_id] = False
        self._cache = SlottedCache(options.max_batch, options.context, model.dtype, model.device)
        self._batch: Batch[_Request] = Batch(self._cache, options.max_batch, options.prefill_chunk)
        self._requests: dict[RequestId, _Request] = {}
        self._silent: list[RequestId] = []
        """To be ended without a frame."""

    # StageEngine

    @property
    def busy(self) -> bool:
        return bool(self._silent) or self._batch.busy

    def start(self, request: StageRequest) -> None:
        params = validated(request.params, TalkerParams)
        self._speaker(params.speaker)
        self._requests[request.request_id] = _Request(request, params, self._suppressed)

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        request = self._requests[request_id]
        try:
            self._take_in(request, {name: to_torch(tensor) for name, tensor in chunk.tensors.items()})
        except InvalidRequest:
            self.abort(request_id)
            raise
        if chunk.last:
            request.open.discard(chunk.source)
            if not request.open and not request.opened:
                self._batch.remove(request)
                self._silent.append(request_id)
            elif not request.open:
                request.text.append(request.text_end)
        request.advance()

    def abort(self, request_id: RequestId) -> None:
        if request := self._requests.pop(request_id, None):
            self._batch.remove(request)
        if request_id in self._silent:
            self._silent.remove(request_id)

    def step(self) -> Iterator[StageOutput]:
        for request_id in self._silent:
            del self._requests[request_id]
            yield StageOutput(request_id, last=True)
        self._silent.clear()
        if piece := self._batch.next_piece():
            row, count = piece
            request = self._batch.rows[row]
            axes = request.positions[:, None, request.seen : request.seen + count]
            self._forward([row], request.take(count)[None], axes)
            request.prompt -= count
        if rows := self._batch.decoding():
            yield from self._decode(rows)

    def close(self) -> None:
        self._requests.clear()
        del self._batch, self._cache, self._model, self._predictor

    # in

    @torch.inference_mode()
    def _take_in(self, request: _Request, tensors: dict[str, Tensor]) -> None:
        if "ids" in tensors:
            self._introduce(request, tensors)
        rows = tensors.get("rows")
        if rows is None:
            return
        width = self._config.thinker_hidden_size
        if not request.introduced or rows.dim() != 2 or rows.shape[1] != width:
            raise InvalidRequest(f"rows (n, {width}) behind a first chunk were expected, not {tuple(rows.shape)}")
        rows = rows.to(self._model.device, self._model.dtype)
        count = min(len(rows), len(request.heard))
        if count:
            heard = request.heard[:count].to(rows.device)
            read = torch.empty(count, self._config.text_config.hidden_size, dtype=rows.dtype, device=rows.device)
            read[heard] = self._model.hidden_projection(rows[:count][heard])
            read[~heard] = self._model.text_projection(rows[:count][~heard])
            request.add(read)
            request.heard = request.heard[count:]
            if not len(request.heard):
                request.add(request.opening[:-1])
        for row in self._model.text_projection(rows[count:])[:, None]:
            if request.opened:
                request.text.append(row)
            else:
                request.opened = True
                request.add(row + request.opening[-1:])

    def _introduce(self, request: _Request, tensors: dict[str, Tensor]) -> None:
        """Take the first chunk, see ``speech``; the request waits for a row from now on."""
        config, device = self._config, self._model.device
        request.heard, ids = tensors["heard"], tensors["ids"]
        pads = ids.new_full((HEADER + 6,), self._tts_pad)
        grids = {name: tensors[name] for name in GRIDS if name in tensors}
        # As the reference: positions are computed as if no sound came inside a video.
        request.positions, request.delta = positions_of(
            self._model, torch.cat([ids[:-HEADER], pads]), grids, use_audio_in_video=False
        )
        size = request.positions.shape[1]
        request.limit = min(request.params.talker_max_tokens, self._options.context - size)
        if request.limit < 1:
            raise InvalidRequest(
                f"the prompt takes {size} positions of the talker's context, which has {self._options.context}",
                param="messages",
                code="context_length_exceeded",
            )
        speaker = self._speaker(request.params.speaker)
        codes = [config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id, speaker]
        codes += [config.codec_pad_id, config.codec_bos_id]
        bos, request.text_end, request.silence = self._model.text_projection(
            tensors["tts"].to(device, self._model.dtype)
        ).split(1)
        beside = torch.cat([request.silence.expand(4, -1), bos, torch.zeros_like(bos)])
        request.opening = beside + self._model.get_input_embeddings()(torch.tensor(codes, device=device))
        request.prompt = size - 1
        request.introduced = True
        self._batch.add(request)

    def _speaker(self, name: str | None) -> int:
        """The speaker's code. Raises ``InvalidRequest``."""
        known: dict[str, int] = self._config.speaker_id
        if name is None:
            name = DEFAULT_SPEAKER if DEFAULT_SPEAKER in known else next(iter(known))
        if name.lower() not in known:
            raise InvalidRequest(f"speaker: found {name!r}; accepted: {', '.join(known)}", param="speaker")
        return known[name.lower()]

    # out

    @torch.inference_mode()
    def _forward(self, rows: list[int], inputs: Tensor, axes: Tensor | None = None) -> Tensor:
        """Bring rows on by their inputs, (rows, count, hidden); their last hidden states, (rows, hidden).

        axes: positions on the three axes, int64 (3, rows, count), where they are not the places behind the prompt.
        """
        count = inputs.shape[1]
        positions, mask = self._cache.extend(rows, count)
        requests = [self._batch.rows[row] for row in rows]
        if axes is None:
            deltas = torch.tensor([request.delta for request in requests], device=positions.device)
            axes = (positions + deltas[:, None]).expand(3, -1, -1)
        for request in requests:
            request.seen += count
        hidden: Tensor = self._model.model(
            inputs_embeds=inputs,
            position_ids=axes.to(inputs.device),
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        return hidden

    @torch.inference_mode()
    def _decode(self, rows: list[int]) -> Iterator[StageOutput]:
        requests = [self._batch.rows[row] for row in rows]
        hidden = self._forward(rows, torch.stack([request.take(1) for request in requests]))
        logits = self._model.codec_head(hidden)
        first = [request.sampler(row) for request, row in zip(requests, logits, strict=True)]
        going = []
        for at, (request, code) in enumerate(zip(requests, first, strict=True)):
            request.codes += 1
            if code == self._config.codec_eos_token_id or request.codes == request.limit:
                del self._requests[request.id]
                self._batch.remove(request)
                yield StageOutput(request.id, last=True)
            else:
                going.append(at)
        if not going:
            return
        requests, first = [requests[at] for at in going], [first[at] for at in going]
        embedded = self._model.get_input_embeddings()(torch.tensor(first, device=hidden.device))
        others, frames = self._predictor(hidden[going], embedded, [request.residual for request in requests])
        for request, code, rest, frame in zip(requests, first, others, frames[:, None], strict=True):
            request.frame = frame
            request.advance()
            yield StageOutput(request.id, {"codes": np.array([[code, *rest]], np.int16)})
