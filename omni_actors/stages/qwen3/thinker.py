"""Qwen3-Omni's thinker as a stage: a conversation with sound and pictures to text, and what the talker needs of it.

Input: the client's chunks, as ``multimodal.prompt`` takes them. Output: ``LanguageEngine``'s, and ``onward`` what
``speech`` says: rows of the prompt piece by piece as it is prefilled, the row of a token as soon as that is chosen (its
embedding needs no forward).

A request's sounds and pictures are encoded in the step of its prompt's first piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from omni_actors.stages.autoregressive.batch import Batch
from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.language import LanguageEngine, Request, refuse_beyond_context
from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import StageContext, StageRequest, TensorLike
from omni_actors.stages.checkpoint import load_part, whole_config
from omni_actors.stages.multimodal.conversation import validated
from omni_actors.stages.multimodal.processor import OmniInputs, OmniProcessor
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.qwen3.speech import grids_of, is_heard, positions_of, spoken_positions
from omni_actors.stages.registry import ThinkerOptions, ThinkerParams
from omni_actors.stages.tensors import to_wire


class _Request(Request[OmniPrompt]):
    """Tensors of a prompt of n positions; those up to ``seen`` are in the cache."""

    params: ThinkerParams
    inputs: OmniInputs
    ids: Tensor
    """int64 (n,)."""
    grids: dict[str, Tensor]
    spoken: Tensor
    """Which positions the talker gets, bool (n,)."""
    heard: Tensor
    """Which of all are sound or picture, bool (n,)."""
    positions: Tensor
    """int64 (3, n)."""
    delta: int
    embeds: Tensor
    """(n, hidden)."""
    seeing: Tensor
    """Which positions are picture, bool (n,)."""
    deepstack: list[Tensor]
    """What is added to those after each of the first layers, (pictures' positions, hidden); [] without."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen = 0
        self.rows: list[Tensor] = []
        """For the talker, and not on their way yet, (k, hidden) each."""
        self.introduced = False
        """Whether the talker has what comes once."""


class ThinkerEngine(LanguageEngine[_Request]):
    """See the module. ``context.model``: a checkpoint directory of Qwen3-Omni; its ``thinker`` weights are read."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        options = self._options = msgspec.convert(context.options, ThinkerOptions)
        if context.model is None:
            raise ValueError(f"stage {context.stage!r}: qwen3_thinker needs a model, a checkpoint directory")
        torch.set_num_threads(context.threads)
        context.report("reading the processor")
        self._processor = OmniProcessor(context.model)
        context.report("reading the weights of the thinker")
        model: Any = load_part(
            Qwen3OmniMoeThinkerForConditionalGeneration,
            context.model,
            "thinker",
            getattr(torch, options.dtype),
            context.device,
        )
        self._config: Any = whole_config(context.model)
        self._model, self._language = model, model.model.language_model
        self._device = model.device
        self._heard = _Tap(self._language, self._config.talker_config.accept_hidden_layer)
        self._cache = SlottedCache(options.max_batch, options.context, model.dtype, model.device)
        vocabulary = Vocabulary(self._processor.tokenizer, _end_tokens(context, self._config))
        super().__init__(Batch(self._cache, options.max_batch, options.prefill_chunk), vocabulary, options.context)

    def _open(self, request: StageRequest) -> _Request:
        return _Request(request, validated(request.params, ThinkerParams), OmniPrompt(request.sources))

    def _encode(self, request: _Request) -> list[int]:
        inputs = request.inputs = self._processor(
            request.collector,
            system_prompt=self._options.system_prompt,
            use_audio_in_video=request.params.use_audio_in_video,
        )
        refuse_beyond_context(len(inputs.ids), f"{len(inputs.ids)} tokens", self._context)
        request.ids = torch.tensor(inputs.ids)
        request.grids = grids_of(inputs.tensors)
        request.spoken, request.heard = spoken_positions(request.ids, self._config), is_heard(request.ids, self._config)
        request.positions, request.delta = positions_of(
            self._model, request.ids, request.grids, use_audio_in_video=inputs.use_audio_in_video
        )
        return inputs.ids

    @torch.inference_mode()
    def _forward(self, rows: list[int], count: int) -> Tensor:
        requests = [self._batch.rows[row] for row in rows]
        positions, mask = self._cache.extend(rows, count)
        if requests[0].prompt:  # then it is the only one
            (request,) = requests
            embeds, more = self._piece(request, count)
            axes = request.positions[:, None, request.seen : request.seen + count].to(self._device)
        else:
            embeds, more = self._embed([[request.token] for request in requests]), {}
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
        if requests[0].prompt:
            self._keep_rows(requests[0], count)
        logits: Tensor = self._model.lm_head(hidden[:, -1])
        return logits

    def _piece(self, request: _Request, count: int) -> tuple[Tensor, dict[str, Any]]:
        """The next ``count`` positions of a prompt, (1, count, hidden), and what their pictures add to layers."""
        if not request.seen:
            self._encode_media(request)
        piece = slice(request.seen, request.seen + count)
        seeing = request.seeing[piece]
        if not seeing.any():
            return request.embeds[None, piece], {}
        before = int(request.seeing[: piece.start].sum())
        shown = slice(before, before + int(seeing.sum()))
        deepstack = [layer[shown] for layer in request.deepstack]
        return request.embeds[None, piece], {
            "visual_pos_masks": seeing[None].to(self._device),
            "deepstack_visual_embeds": deepstack,
        }

    def _encode_media(self, request: _Request) -> None:
        """Fill ``embeds``, ``seeing`` and ``deepstack``; the processor's tensors are let go."""
        ids, tensors, thinker = request.ids.to(self._device), request.inputs.tensors, self._config.thinker_config
        embeds = self._embed(ids)
        request.seeing = torch.zeros(len(ids), dtype=torch.bool)
        seen: list[tuple[Tensor, list[Tensor]]] = []
        if (features := tensors.get("input_features")) is not None:
            sound = self._model.model.get_audio_features(
                features.to(self._device, self._model.dtype), tensors["feature_attention_mask"].to(self._device)
            ).last_hidden_state
            embeds[ids == thinker.audio_token_id] = sound.to(embeds.dtype)
        for pixels, grid, token, encode in (
            ("pixel_values", "image_grid_thw", thinker.image_token_id, self._model.model.get_image_features),
            ("pixel_values_videos", "video_grid_thw", thinker.video_token_id, self._model.model.get_video_features),
        ):
            if pixels in tensors:
                encoded = encode(tensors[pixels].to(self._device), tensors[grid].to(self._device))
                places = ids == token
                embeds[places] = torch.cat(encoded.pooler_output).to(embeds.dtype)
                seen.append((places.cpu(), [torch.cat(layer) for layer in encoded.deepstack_features]))
                request.seeing |= places.cpu()
        request.embeds, request.deepstack = embeds, _joined(request.seeing, seen)
        del request.inputs

    def _embed(self, ids: Any) -> Tensor:
        embeds: Tensor = self._language.embed_tokens(torch.as_tensor(ids, device=self._device))
        return embeds

    def _keep_rows(self, request: _Request, count: int) -> None:
        piece = slice(request.seen, request.seen + count)
        spoken, heard = request.spoken[piece], request.heard[piece].to(self._device)
        rows = torch.where(heard[:, None], self._heard.hidden[0], request.embeds[piece])
        if spoken.any():
            request.rows.append(rows[spoken.to(self._device)])
        request.seen += count
        if request.seen == len(request.ids):
            del request.embeds, request.deepstack, request.seeing

    @torch.inference_mode()
    def _onward(self, request: _Request, *, generated: bool) -> Mapping[str, TensorLike]:
        onward: dict[str, Tensor] = {}
        if not request.introduced:
            request.introduced = True
            config = self._config
            tts = self._embed([config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id])
            ids, heard = request.ids[request.spoken], request.heard[request.spoken]
            onward = {"ids": ids, "heard": heard, "tts": tts, **request.grids}
        if generated:
            request.rows.append(self._embed([request.token]))
        if request.rows:
            onward["rows"] = torch.cat(request.rows)
            request.rows = []
        return {name: to_wire(tensor) for name, tensor in onward.items()}

    def close(self) -> None:
        super().close()
        del self._model, self._language, self._cache


class _Tap:
    """Holds what layer ``layer`` of the last forward gave, (rows, count, hidden), as transformers counts layers."""

    hidden: Tensor

    def __init__(self, language: Any, layer: int) -> None:
        layers = language.layers
        source = language.norm if layer == len(layers) else layers[layer - 1]
        source.register_forward_hook(self._hold)

    def _hold(self, module: object, inputs: object, output: Tensor) -> None:
        self.hidden = output


def _joined(seeing: Tensor, parts: list[tuple[Tensor, list[Tensor]]]) -> list[Tensor]:
    """Layer by layer, the rows of images and of videos in the order of their positions.

    parts: of each kind, where it is among all positions and its rows by layer.
    """
    if len(parts) < 2:
        return parts[0][1] if parts else []
    joined = []
    for layers in zip(*(rows for _, rows in parts), strict=True):
        whole = layers[0].new_empty(int(seeing.sum()), layers[0].shape[-1])
        for (places, _), rows in zip(parts, layers, strict=True):
            whole[places[seeing].to(whole.device)] = rows
        joined.append(whole)
    return joined


def _end_tokens(context: StageContext, config: Any) -> list[int]:
    """Those that end an answer: the checkpoint's generation config says, and the token that ends every turn."""
    assert context.model is not None
    try:
        said = GenerationConfig.from_pretrained(context.model, local_files_only=True).eos_token_id
    except OSError:
        said = None
    return [config.im_end_token_id, *([said] if isinstance(said, int) else said or [])]
