"""What the thinkers of omni models share: a conversation with sound and pictures, read in pieces and answered in text.

Input: the client's chunks, as ``multimodal.prompt`` takes them. Output: ``LanguageEngine``'s, and ``downstream`` what
the family's talker is to get: see ``omni.talker``.

Rules
1. Sounds and pictures are decoded and made into features beside the steps (``omni.media_reader``). They are encoded in
   the step of their request's first piece of prompt.
2. Rows of the prompt go to the talker piece by piece, and a token's row as soon as it is there and the token's text is
   certain: what a stop string cuts off is not said either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.language import LanguageEngine, Request, refuse_beyond_context
from omni_actors.stages.autoregressive.scheduler import Scheduler
from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import InvalidRequest, RequestId, StageContext, StageFailure, StageOutput, TensorLike
from omni_actors.stages.checkpoint import load_part, whole_config
from omni_actors.stages.multimodal.limits import MediaLimits
from omni_actors.stages.multimodal.processor import OmniInputs, OmniProcessor
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.media_reader import MediaReader
from omni_actors.stages.omni.options import ThinkerOptions, ThinkerParams
from omni_actors.stages.omni.positions import is_media, position_grids, rotary_positions
from omni_actors.stages.refusal import request_work
from omni_actors.stages.tensors import to_wire


class ThinkerRequest(Request[OmniPrompt]):
    """Tensors of a prompt of n positions; those up to ``seen`` are in the cache."""

    params: ThinkerParams
    inputs: OmniInputs
    ids: Tensor
    """int64 (n,)."""
    grids: dict[str, Tensor]
    is_media: Tensor
    """Which positions are sound or picture, bool (n,)."""
    positions: Tensor
    """int64 (3, n)."""
    delta: float
    """What a later place is from its position."""
    embeds: Tensor
    """(n, hidden)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cached = 0
        self.rows: list[Tensor] = []
        """Of the prompt, for the talker, (k, hidden) each."""
        self.said: list[Tensor] = []
        """Of the answer's tokens in order, (1, hidden) each; ``sent`` of them went before."""
        self.sent = 0
        self.introduced = False
        """Whether the talker has what comes once."""


R = TypeVar("R", bound=ThinkerRequest)


class OmniThinker(LanguageEngine[R]):
    """``context.model``: a checkpoint directory; its ``thinker`` weights are read."""

    MODEL: ClassVar[type[PreTrainedModel]]

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        options = self._options = msgspec.convert(context.options, ThinkerOptions)
        if context.model is None:
            raise ValueError(f"stage {context.stage!r}: a thinker needs a model, a checkpoint directory")
        torch.set_num_threads(context.threads)
        context.report("reading the processor")
        limits = MediaLimits(tokens=options.context - 1)
        self._processor = OmniProcessor(context.model, limits=limits)
        self._media_processor = OmniProcessor(
            context.model, limits=limits
        )  # a tokenizer is not for two threads at once
        self._media_reader = MediaReader[list[int]]()
        context.report("reading the weights of the thinker")
        dtype: torch.dtype = getattr(torch, options.dtype)
        model: Any = load_part(self.MODEL, context.model, "thinker", dtype, context.device)
        self._config: Any = whole_config(context.model)
        self._model, self._language, self._device = model, model.model.language_model, model.device
        self._cache = SlottedCache(options.max_batch, options.context, model.dtype, model.device)
        vocabulary = Vocabulary(self._processor.tokenizer, _end_tokens(context))
        super().__init__(Scheduler(self._cache, options.max_batch, options.prefill_chunk), vocabulary, options.context)

    # what a family says for itself

    def _handoff_header(self, request: R) -> dict[str, Tensor]:
        """What the talker gets once, with its first rows."""
        raise NotImplementedError

    def _token_row(self, request: R) -> Tensor | None:
        """The row of ``request.token``, where it is known as soon as the token is; (1, hidden)."""
        return None

    def _extra_forward_kwargs(self, request: R, piece: slice) -> dict[str, Any]:
        """What else the language model is called with for this piece of a prompt."""
        return {}

    def _media_encoded(self, request: R, pictures: list[tuple[Tensor, Any]]) -> None:
        """What the encoder made of a request's images and of its videos, and where they are, bool (n,)."""

    def _after(self, requests: list[R], embeds: Tensor, hidden: Tensor) -> None:
        """After a forward: what went in and came out, (rows, count, hidden). A prompt's ``seen`` moves on after it."""

    # LanguageEngine

    @property
    def busy(self) -> bool:
        return self._media_reader.pending or super().busy

    def abort(self, request_id: RequestId) -> None:
        super().abort(request_id)
        self._media_reader.forget(request_id)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for request_id, reading in self._media_reader.take():
            try:
                with request_work("messages"):
                    tokens = reading.result()
                self._admit(self._requests[request_id], tokens)
            except InvalidRequest as error:
                del self._requests[request_id]
                yield StageFailure(request_id, error)
        if self._scheduler.busy:
            yield from super().step()
        elif self._media_reader.pending:
            self._media_reader.wait()

    def _complete(self, request: R) -> None:
        if request.collector.media:
            self._media_reader.read(request.id, lambda: self._read(request, self._media_processor))
        else:
            super()._complete(request)

    def _encode(self, request: R) -> list[int]:
        return self._read(request, self._processor)

    def _read(self, request: R, processor: OmniProcessor) -> list[int]:
        """The prompt's tokens, and all else that comes of the input; in the reader's thread where there are media."""
        inputs = request.inputs = processor(
            request.collector,
            system_prompt=self._options.system_prompt,
            use_audio_in_video=request.params.use_audio_in_video,
        )
        refuse_beyond_context(len(inputs.ids), f"{len(inputs.ids)} tokens", self._context)
        request.ids = torch.tensor(inputs.ids)
        request.grids = position_grids(inputs.tensors)
        request.is_media = is_media(request.ids, self._config)
        request.positions, request.delta = rotary_positions(
            self._model, request.ids, request.grids, use_audio_in_video=inputs.use_audio_in_video
        )
        return inputs.ids

    def _prefill(self, row: int, count: int) -> Iterator[StageOutput | StageFailure]:
        request = self._scheduler.rows[row]
        try:
            if not request.cached:
                with request_work("messages"):
                    self._encode_media(request)
        except InvalidRequest as error:
            self.abort(request.id)
            yield StageFailure(request.id, error)
        else:
            yield from super()._prefill(row, count)

    @torch.inference_mode()
    def _forward(self, rows: list[int], count: int) -> Tensor:
        requests = [self._scheduler.rows[row] for row in rows]
        positions, mask = self._cache.extend(rows, count)
        prefilling, more = bool(requests[0].prefill_left), {}  # then it is the only one
        if prefilling:
            (request,) = requests
            piece = slice(request.cached, request.cached + count)
            embeds, more = request.embeds[None, piece], self._extra_forward_kwargs(request, piece)
            axes = request.positions[:, None, piece].to(self._device)
        else:
            embeds = self._embed([[request.token] for request in requests])
            deltas = torch.tensor([request.delta for request in requests], device=self._device)
            axes = (positions + deltas[:, None]).expand(3, -1, -1)
        hidden = self._language(
            inputs_embeds=embeds,
            position_ids=axes,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            **more,
        ).last_hidden_state
        self._after(requests, embeds, hidden)
        if prefilling:
            request.cached += count
            if request.cached == len(request.ids):
                del request.embeds
        logits: Tensor = self._model.lm_head(hidden[:, -1])
        return logits

    @torch.inference_mode()
    def _encode_media(self, request: R) -> None:
        """Fill ``embeds``; the processor's tensors are let go. It changes nothing but the request."""
        ids, tensors, thinker = request.ids.to(self._device), request.inputs.tensors, self._config.thinker_config
        encoders, embeds, pictures = self._model.model, self._embed(ids), []
        if (features := tensors.get("input_features")) is not None:
            sound = encoders.get_audio_features(
                features.to(self._device, self._model.dtype), tensors["feature_attention_mask"].to(self._device)
            ).last_hidden_state
            embeds[ids == thinker.audio_token_id] = sound.to(embeds.dtype)
        for pixels, grid, token, encode in (
            ("pixel_values", "image_grid_thw", thinker.image_token_id, encoders.get_image_features),
            ("pixel_values_videos", "video_grid_thw", thinker.video_token_id, encoders.get_video_features),
        ):
            if pixels in tensors:
                made = encode(tensors[pixels].to(self._device), tensors[grid].to(self._device))
                places = ids == token
                embeds[places] = torch.cat(made.pooler_output).to(embeds.dtype)
                pictures.append((places.cpu(), made))
        self._media_encoded(request, pictures)
        request.embeds = embeds
        del request.inputs

    @torch.inference_mode()
    def _downstream(self, request: R, *, generated: bool) -> Mapping[str, TensorLike]:
        if not request.downstream:
            request.rows, request.said = [], []
            return {}
        downstream: dict[str, Tensor] = {}
        if not request.introduced:
            request.introduced = True
            downstream = self._handoff_header(request)
        if generated and (row := self._token_row(request)) is not None:
            request.said.append(row)
        certain = max(0, request.certain - request.sent)
        going, request.said = request.said[:certain], request.said[certain:]
        request.sent += len(going)
        if rows := request.rows + going:
            downstream["rows"] = torch.cat(rows)
            request.rows = []
        return {name: to_wire(tensor) for name, tensor in downstream.items()}

    @torch.inference_mode()
    def _embed(self, ids: Any) -> Tensor:
        embeds: Tensor = self._language.embed_tokens(torch.as_tensor(ids, device=self._device))
        return embeds

    def close(self) -> None:
        super().close()
        self._media_reader.close()
        del self._model, self._language, self._cache


def _end_tokens(context: StageContext) -> int | list[int] | None:
    """Those that end an answer, by the checkpoint's generation config; the tokenizer knows the one that ends a turn."""
    assert context.model is not None
    try:
        said: int | list[int] | None = GenerationConfig.from_pretrained(
            context.model, local_files_only=True
        ).eos_token_id
    except OSError:
        return None
    return said
