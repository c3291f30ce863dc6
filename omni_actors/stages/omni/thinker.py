"""What the thinkers of omni models on transformers share: a conversation with audio, images and video to text.

Input: the client's chunks, as ``multimodal.prompt`` takes them. Output: ``LanguageEngine``'s; ``downstream`` is what
the family's talker takes (``omni.talker``).

Rules
1. Media are read while the steps go on (``omni.prompt_engine``). The model encodes them in the step of their request's
   first prefill chunk.
2. Rows go to the talker chunk by chunk while the prompt is prefilled, then token by token (``omni.handoff``).
3. Prefill and decode may be two stages (``omni.roles``).
4. A guided request has a companion (``autoregressive.guidance``), whose prompt is text. The talker gets the rows of the
   request's own sequence, which has the tokens that guidance has chosen.
5. The prefix cache has prompts without media only. It keeps the talker's rows, which are sent again chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.autoregressive import tokenizing
from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.language import LanguageEngine, TextRequest, refuse_beyond_context
from omni_actors.stages.autoregressive.options import SplitOptions
from omni_actors.stages.autoregressive.prefixes import Block
from omni_actors.stages.autoregressive.prompt_states import StatesShape
from omni_actors.stages.autoregressive.roles import check_roles
from omni_actors.stages.autoregressive.scheduler import Scheduler
from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import InvalidRequest, StageContext, StageFailure, StageOutput, StageRequest, TensorLike
from omni_actors.stages.checkpoint import PartWeights, load_part, whole_config
from omni_actors.stages.multimodal.processor import OmniInputs, OmniProcessor
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.options import ThinkerParams
from omni_actors.stages.omni.positions import is_media, rotary_positions
from omni_actors.stages.omni.prompt_engine import OmniPromptEngine, OmniRequest
from omni_actors.stages.refusal import request_work, validated


class ThinkerRequest(OmniRequest, TextRequest[OmniPrompt]):
    """One request, with a prompt of n positions once it is read."""

    inputs: OmniInputs
    """Until the media are encoded."""
    positions: Tensor
    """Rotary positions of the prompt, (3, n)."""
    delta: float
    """Rotary position minus index, of positions after the prompt."""
    embeds: Tensor
    """The model's inputs of the prompt, (n, hidden), while it is prefilled. Those of a raw prompt may be given."""
    cached = 0
    """Prompt positions in the cache."""
    embedded = False
    """Whether the client has sent embeddings in place of tokens."""

    @property
    def prompt_is_cached(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.cached == len(self.ids)


R = TypeVar("R", bound=ThinkerRequest)


class OmniThinker(OmniPromptEngine[R], LanguageEngine[R]):
    """A thinker. ``context.model``: a checkpoint directory, of which it loads the ``thinker`` weights."""

    MODEL: ClassVar[type[PreTrainedModel]]
    REQUEST: ClassVar[type[Any]]
    """The family's ``ThinkerRequest``."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        options = msgspec.convert(context.options, SplitOptions)
        check_roles(options)
        self._split = options
        context.report("reading the processor")
        self._open_processors(context, options.context, options.system_prompt)
        model: Any = load_part(self.MODEL, context, "thinker", options.dtype)
        self._weights = PartWeights(model, context, "thinker")
        self._config = whole_config(context.model_directory)
        self._model, self._language, self._device = model, model.model.language_model, model.device
        self._shape = StatesShape.of(self._language.config, model.lm_head, model.dtype)
        self._cache = SlottedCache(options.max_batch, options.context, model.dtype, model.device)
        rows = self._language.embed_tokens.num_embeddings
        vocabulary = Vocabulary(self._processor.tokenizer, model.generation_config.eos_token_id, rows)
        scheduler: Scheduler[R] = Scheduler(self._cache, options.max_batch, options.prefill_chunk)
        adapters = BatchedAdapters(model, part="thinker", idle=options.idle_loras)
        super().__init__(scheduler, vocabulary, options, adapters)
        self._capabilities["update_weights"] = self._update_weights
        self._capabilities |= tokenizing.capabilities(vocabulary, options.context, self._conversation_tokens)

    # for the families, besides ``_handoff_header`` and ``_talker_positions``

    def _after_forward(self, requests: list[R], embeds: Tensor, hidden: Tensor) -> None:
        """Take rows for the talker from a forward's inputs and outputs, (requests, count, hidden) each.

        A prompt's positions come alone, and ``cached`` does not count them yet.
        """

    def _answer_row(self, request: R, token: int | None) -> Tensor | None:
        """Return the row, (1, hidden), that came with this token, if there is one. token: as in ``_downstream``.

        It is the row of the token itself; or of the token before it, if a row comes out of its token's forward.
        """
        raise NotImplementedError

    def _extra_forward_kwargs(self, request: R, chunk: slice) -> dict[str, Any]:
        """Return further arguments of the language model for this chunk of the request's prompt."""
        return {}

    def _media_encoded(self, request: R, visual: list[tuple[Tensor, Any]]) -> None:
        """Keep what ``_extra_forward_kwargs`` needs of the encoded images and of the encoded videos.

        visual: of each kind that the prompt has, its positions, bool (n,), and the encoder's output.
        """

    # LanguageEngine

    def _new_request(self, request: StageRequest) -> R:
        params = validated(request.params, ThinkerParams)
        made: R = self.REQUEST(request, params, OmniPrompt(request.sources))
        return self._guided(made, params, lambda: self.REQUEST(request, params, OmniPrompt(())))

    def _read(self, request: R, processor: OmniProcessor) -> list[int | None]:
        tokens: list[int | None] = super()._read(request, processor)
        if request.companion is not None:
            with request_work("negative_prompt"):
                self._read_companion(request, request.companion, tokens[-1:], processor)
        return tokens

    def _read_companion(self, request: R, companion: R, end: list[int | None], processor: OmniProcessor) -> None:
        """Give a companion its prompt. end: the last token of the prompt. Raises InvalidRequest."""
        params, text = request.params, request.params.negative_prompt
        try:
            if text is None:
                inputs = OmniInputs([token for token in end if token is not None], {}, use_audio_in_video=False)
            else:
                prompt = request.collector.negative(text)
                inputs = processor(
                    prompt,
                    system_prompt=self._system_prompt,
                    tokenization=params.tokenization_kwargs,
                    template_kwargs=params.chat_template_kwargs,
                )
            companion.ids, companion.grids = torch.tensor(inputs.ids, dtype=torch.int64), {}
            companion.is_media = is_media(companion.ids, self._config)
            _require_text(companion)
            self._prepare(companion, inputs)
        except InvalidRequest as error:
            raise InvalidRequest(f"negative_prompt: {error}", param="negative_prompt", code=error.code) from error
        companion.prefill_left = len(inputs.ids)
        companion.ready = len(inputs.ids) + len(companion.uncomputed)

    def _prepare(self, request: R, inputs: OmniInputs) -> list[int | None]:
        refuse_beyond_context(len(inputs.ids), f"{len(inputs.ids)} tokens", self._context)
        request.inputs = inputs
        if inputs.is_embedded:
            table, penalty = self._language.embed_tokens.weight, request.params.repetition_penalty
            request.embeds = request.collector.raw.embeds(table.shape[1], table.dtype, penalty)
        request.positions, request.delta = rotary_positions(
            self._model, request.ids, request.grids, use_audio_in_video=inputs.use_audio_in_video
        )
        if request.positions.shape[1] != len(inputs.ids):
            raise InvalidRequest("prompt: its placeholders are not arranged as the model expects them", param="prompt")
        if inputs.is_embedded:
            return [None] * len(inputs.ids)
        if not inputs.tensors and not request.is_media.any():
            self._use_prefixes(request, inputs.ids)
        return [*inputs.ids]

    def _prefill(self, row: int, count: int) -> Iterator[StageOutput | StageFailure]:
        request = self._scheduler.rows[row]
        try:
            if not request.cached:
                with request_work("messages"), self._adapters.applied([request.adapter]):
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
        more: dict[str, Any] = {}
        request, in_prompt = requests[0], not requests[0].prompt_is_cached  # then it is the only one
        if in_prompt:
            chunk = slice(request.cached, request.cached + count)
            embeds, more = request.embeds[None, chunk], self._extra_forward_kwargs(request, chunk)
            axes = request.positions[:, None, chunk].to(self._device)
        else:
            embeds = self._embed([request.take(count) for request in requests])
            deltas = torch.tensor([request.delta for request in requests], device=self._device)
            axes = (positions + deltas[:, None]).expand(3, -1, -1)
        with self._adapters.applied([request.adapter for request in requests]):
            hidden = self._language(
                inputs_embeds=embeds,
                position_ids=axes,
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                **more,
            ).last_hidden_state
            logits: Tensor = self._model.lm_head(hidden[:, -1])
        self._after_forward(requests, embeds, hidden)
        if in_prompt:
            request.cached += count
            if request.prompt_is_cached:
                del request.embeds
        return logits

    def _sends_rows(self, request: R) -> bool:
        return request.handoff is not None

    def _computed_rows(self, request: R) -> Tensor:
        assert request.handoff is not None
        return request.handoff.newest_prompt

    def _skip(self, request: R, block: Block) -> None:
        request.cached += block.size
        if request.handoff is not None:
            assert block.rows is not None
            request.handoff.add_prompt(block.rows.to(self._device))  # another stage's rows arrive on the host

    @torch.inference_mode()
    def _encode_media(self, request: R) -> None:
        """Fill ``embeds`` and drop the processor's tensors. It changes nothing that requests share."""
        ids, tensors, thinker = request.ids.to(self._device), request.inputs.tensors, self._config.thinker_config
        embeds = request.embeds.to(self._device) if request.inputs.is_embedded else self._embed(ids)
        encoders, visual = self._model.model, []
        if (features := tensors.get("input_features")) is not None:
            audio = encoders.get_audio_features(
                features.to(self._device, self._model.dtype), tensors["feature_attention_mask"].to(self._device)
            ).last_hidden_state
            embeds[ids == thinker.audio_token_id] = audio.to(embeds.dtype)
        for pixels, grid, token, encode in (
            ("pixel_values", "image_grid_thw", thinker.image_token_id, encoders.get_image_features),
            ("pixel_values_videos", "video_grid_thw", thinker.video_token_id, encoders.get_video_features),
        ):
            if pixels in tensors:
                encoded = encode(tensors[pixels].to(self._device), tensors[grid].to(self._device))
                places = ids == token
                embeds[places] = torch.cat(encoded.pooler_output).to(embeds.dtype)
                visual.append((places.cpu(), encoded))
        self._media_encoded(request, visual)
        request.embeds = embeds
        del request.inputs

    @torch.inference_mode()
    def _downstream(self, request: R, token: int | None = None) -> Mapping[str, TensorLike]:
        if request.handoff is None:
            return {}
        if (row := self._answer_row(request, token)) is not None:
            request.handoff.add_token(row)
        return request.handoff.take(lambda: self._handoff_header(request), request.answer.certain_tokens)

    @torch.inference_mode()
    def _embed(self, ids: Any) -> Tensor:
        """Return the rows of the embedding table, (*ids, hidden)."""
        embeds: Tensor = self._language.embed_tokens(torch.as_tensor(ids, device=self._device))
        return embeds

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return self._weights.replace(files)

    def close(self) -> None:
        super().close()
        del self._model, self._language, self._cache, self._weights


def _require_text(companion: ThinkerRequest) -> None:
    """Raise InvalidRequest if a companion's prompt is not text. Without a negative prompt, it is the last token."""
    if not len(companion.ids):
        raise InvalidRequest("there is none, and embeddings have no last token")
    if companion.is_media.any():
        raise InvalidRequest("there is none, and the prompt ends with a medium, not with text")
