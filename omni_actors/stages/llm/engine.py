"""The ``llm`` engine: a causal language model on transformers, text to text, with continuous batching.

A prompt is a conversation or a raw prompt (``raw_prompt``). A position is a token, or an embedding of the prompt.
With ``pooling``, the one output is ``tensors["embedding"]``, float32 (hidden,), with ``{"prompt_tokens": n}``: the mean
of the hidden states of all positions, or that of the last one.
``autoregressive`` has the scheduler, the cache and the sampling.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from omni_actors.stages import assets
from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.autoregressive import tokenizing
from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.language import LanguageEngine, TextRequest, refuse_beyond_context
from omni_actors.stages.autoregressive.options import SplitOptions
from omni_actors.stages.autoregressive.packed import pack_linears
from omni_actors.stages.autoregressive.prefixes import Block
from omni_actors.stages.autoregressive.prompt_states import StatesShape
from omni_actors.stages.autoregressive.roles import Decoding, Prefilling, check_roles
from omni_actors.stages.autoregressive.sampling import not_finite
from omni_actors.stages.autoregressive.scheduler import Scheduler
from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.autoregressive.weights import replace_weights
from omni_actors.stages.base import InvalidRequest, StageContext, StageFailure, StageOutput, StageRequest
from omni_actors.stages.llm.chat_template import check_chat_template
from omni_actors.stages.llm.options import LLMParams, Tools
from omni_actors.stages.llm.prompt import Prompt, conversation_tokens
from omni_actors.stages.refusal import request_work, validated


class LLMRequest(TextRequest[Prompt]):
    """One request."""

    embeds: Tensor | None = None
    """The embeddings of the prompt positions that are not computed yet, (n, hidden); None: positions are tokens."""
    pooled: Tensor | None = None
    """What was pooled of the hidden states so far, float32 (hidden,)."""


class LLMEngine(LanguageEngine[LLMRequest]):
    """A ``StageEngine`` from text to text; ``LanguageEngine`` documents its outputs.

    model: a causal language model of transformers, in evaluation mode. tokenizer: its tokenizer, with a chat template.
    """

    def __init__(self, model: Any, tokenizer: Any, options: SplitOptions) -> None:
        self._split = options
        self._shape = StatesShape.of(model.config, model.get_output_embeddings(), model.dtype)
        self._model, self._system_prompt = model, options.system_prompt
        self._cache = SlottedCache(options.max_batch, options.context, model.dtype, model.device)
        batch = Scheduler[LLMRequest](self._cache, options.max_batch, options.prefill_chunk)
        rows = model.get_input_embeddings().num_embeddings
        vocabulary = Vocabulary(tokenizer, model.generation_config.eos_token_id, rows)
        super().__init__(batch, vocabulary, options, BatchedAdapters(model, part="", idle=options.idle_loras))
        self._capabilities["update_weights"] = self._update_weights
        conversation = partial(conversation_tokens, tokenizer, self._system_prompt)
        self._capabilities |= tokenizing.capabilities(vocabulary, self._context, conversation)

    def _new_request(self, request: StageRequest) -> LLMRequest:
        params = validated(request.params, LLMParams)
        if params.pooling is not None and request.downstream:
            message = "pooling: an embedding is for the client, and downstream stages read text"
            raise InvalidRequest(message, param="pooling")
        if params.pooling is not None and params.guidance_scale != 1:
            message = "guidance_scale: an embedding has no answer that could be guided"
            raise InvalidRequest(message, param="guidance_scale", code="unsupported_parameter")
        made = LLMRequest(request, params, Prompt(request.sources))
        return self._guided(made, params, lambda: LLMRequest(request, params, Prompt(())))

    def _encode(self, request: LLMRequest) -> list[int | None]:
        tokens = self._encode_prompt(request)
        if request.companion is not None:
            self._encode_negative(request, request.companion, tokens[-1:])
        return tokens

    def _encode_negative(self, request: LLMRequest, companion: LLMRequest, end: list[int | None]) -> None:
        """Give a companion its prompt. end: the last token of the prompt. Raises InvalidRequest."""
        text, tokens = request.params.negative_prompt, [token for token in end if token is not None]
        if text is not None:
            prompt, params = request.collector.negative(text), request.params
            try:
                with request_work("negative_prompt"):
                    tokens = self._tokens(prompt, params)
                refuse_beyond_context(len(tokens), f"{len(tokens)} tokens", self._context)
            except InvalidRequest as error:
                message = f"negative_prompt: {error}"
                raise InvalidRequest(message, param="negative_prompt", code=error.code) from error
        if not tokens:
            reason = "it has no tokens" if text is not None else "there is none, and embeddings have no last token"
            raise InvalidRequest(f"negative_prompt: {reason}", param="negative_prompt")
        self._use_prefixes(companion, tokens)
        companion.prefill_left = len(tokens)
        companion.uncomputed = tokens + companion.uncomputed
        companion.ready = len(companion.uncomputed)

    def _encode_prompt(self, request: LLMRequest) -> list[int | None]:
        prompt = request.collector
        if prompt.raw.is_embedded:
            size = prompt.raw.least_tokens(1)
            refuse_beyond_context(size, f"{size} embeddings", self._context)
            hidden, penalty = self._model.get_input_embeddings().embedding_dim, request.params.repetition_penalty
            request.embeds = prompt.raw.embeds(hidden, self._model.dtype, penalty)
            return [None] * size
        tokens = self._tokens(prompt, request.params, request.params.tools)
        refuse_beyond_context(len(tokens), f"{len(tokens)} tokens", self._context)
        request.uncomputed = tokens + request.uncomputed
        if request.params.pooling is None:
            self._use_prefixes(request, tokens)
        return [*tokens]

    def _tokens(self, prompt: Prompt, params: LLMParams, tools: Tools = ()) -> list[int]:
        return prompt.encode(
            self._vocabulary,
            self._system_prompt,
            self._context,
            tools=tools,
            template_kwargs=params.chat_template_kwargs,
            kwargs=params.tokenization_kwargs,
        )

    @torch.inference_mode()
    def _forward(self, rows: list[int], count: int) -> Tensor:
        logits: Tensor = self._run(self._model, rows, count, logits_to_keep=1).logits[:, -1]
        return logits

    def _skip(self, request: LLMRequest, block: Block) -> None:
        request.take(block.size)

    def _run(self, model: Any, rows: list[int], count: int, **more: Any) -> Any:
        """Run the model or its decoder on the next ``count`` positions of each row."""
        requests = [self._scheduler.rows[row] for row in rows]
        inputs = self._inputs(requests, count)
        positions, mask = self._cache.extend(rows, count)
        with self._adapters.applied([request.adapter for request in requests]):
            return model(
                **inputs,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                **more,
            )

    def _prefill(self, row: int, count: int) -> Iterator[StageOutput | StageFailure]:
        request = self._scheduler.rows[row]
        if request.params.pooling is None:
            yield from super()._prefill(row, count)
            return
        self._pool(request, row, count)
        request.prefill_left -= count
        request.ready -= count
        if not request.prefill_left:
            size = self._cache.lengths[row]
            self.abort(request.id)
            yield _embedding(request, size)

    @torch.inference_mode()
    def _pool(self, request: LLMRequest, row: int, count: int) -> None:
        hidden = self._run(self._model.get_decoder(), [row], count).last_hidden_state[0].float()
        if request.params.pooling == "last":
            request.pooled = hidden[-1]
        else:
            request.pooled = hidden.sum(0) if request.pooled is None else request.pooled + hidden.sum(0)

    def _inputs(self, requests: list[LLMRequest], count: int) -> dict[str, Tensor]:
        """Return the model's inputs for the next ``count`` positions of each request."""
        request, device = requests[0], self._model.device
        if request.embeds is not None and len(request.embeds):  # the request is the only one
            taken, request.embeds = request.embeds[:count], request.embeds[count:]
            return {"inputs_embeds": taken[None].to(device)}
        return {"input_ids": torch.tensor([request.take(count) for request in requests], device=device)}

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return replace_weights(self._model, files)

    def close(self) -> None:
        super().close()
        del self._model, self._cache


class LLMPrefilling(Prefilling[LLMRequest], LLMEngine):
    """The engine of a stage that computes prompts."""


class LLMDecoding(Decoding[LLMRequest], LLMEngine):
    """The engine of a stage that writes answers to prompts that another stage has computed."""

    def _skip(self, request: LLMRequest, block: Block) -> None:
        pass  # the tokens of the prompt are not among those that are to be computed


ROLES: dict[str, type[LLMEngine]] = {"both": LLMEngine, "prefill": LLMPrefilling, "decode": LLMDecoding}


def _embedding(request: LLMRequest, size: int) -> StageOutput | StageFailure:
    """Return the output of a request whose prompt of ``size`` positions was pooled."""
    assert request.pooled is not None
    vector = request.pooled / size if request.params.pooling == "mean" else request.pooled
    if request.params.normalize:
        vector = torch.nn.functional.normalize(vector, dim=0)
    if not vector.isfinite().all():
        return StageFailure(request.id, not_finite())
    return StageOutput(request.id, {"embedding": vector.cpu().numpy()}, {"prompt_tokens": size}, last=True)


def open_engine(context: StageContext) -> LLMEngine:
    """Load the checkpoint directory ``context.model``, with the options ``SplitOptions``. Nothing is downloaded.

    Raises msgspec.ValidationError: the options are wrong. ValueError: this engine cannot serve the model. OSError: its
    files cannot be read.
    """
    options = msgspec.convert(context.options, SplitOptions)
    check_roles(options)
    directory = context.model_directory
    torch.set_num_threads(context.threads)
    # Importing torch's compiler creates this directory. Without the variable it would be one in /tmp that stays.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(assets.cache_dir() / "torchinductor"))
    context.report("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(context.tokenizer_directory, local_files_only=True)
    check_chat_template(tokenizer, context.tokenizer_directory)
    context.report("reading the weights")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would fill the end of stderr, which explains a crash
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, options.dtype), attn_implementation="sdpa", local_files_only=True
    )
    _check(model.config, options)
    model = model.eval().to(torch.device(context.device))
    pack_linears(model, options.max_batch)
    return ROLES[options.role](model, tokenizer, options)


def _check(config: Any, options: SplitOptions) -> None:
    """Raise ValueError if the context exceeds the model's positions, or layers do not attend to the whole context."""
    positions = getattr(config, "max_position_embeddings", options.context)
    if options.context > positions:
        raise ValueError(f"context: found {options.context}; the model has {positions} positions")
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        # transformers takes the frequencies of all rows of a step from its longest one.
        if each.get("rope_type") == "longrope" and options.context > each["original_max_position_embeddings"]:
            most = each["original_max_position_embeddings"]
            message = f"beyond {most} its positions (longrope) would depend on other requests; use the engine vllm"
            raise ValueError(f"context: found {options.context}; this model has at most {most}: {message}")
    window = getattr(config, "sliding_window", None) or options.context
    kinds = set(getattr(config, "layer_types", None) or ())
    if window < options.context or not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"the llm engine attends to the whole context of {options.context} tokens; "
            f"found layers {sorted(kinds)}, window {window}"
        )
