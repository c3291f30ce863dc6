"""Continuous batching of a causal language model.

Rules
1. A request is collecting (its input is not complete), waiting, prefilling or running; it can leave from each of these.
2. One step is at most one piece of one prompt, then one forward that brings every running request its next token. So a
   long prompt slows the others down, but never stops them.
3. Row i of the cache is the i-th running request's, the row after those the prefilling one's. Requests wait in the
   order in which their input became complete; at most ``max_batch`` have a row.
4. A prompt is prefilled by itself, in pieces that depend on nothing else: alone or in company, a request starts from
   the same numbers.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from omni_actors.stages import assets
from omni_actors.stages.base import Chunk, InvalidRequest, RequestId, StageContext, StageOutput, StageRequest
from omni_actors.stages.llm.cache import SlottedCache
from omni_actors.stages.llm.packed import pack_linears
from omni_actors.stages.llm.prompt import Prompt, validated
from omni_actors.stages.llm.sampling import Sampler, choose
from omni_actors.stages.llm.text import Answer, Vocabulary
from omni_actors.stages.registry import LLMOptions, LLMParams

__all__ = ["LLMEngine", "open_engine"]


class _Request:
    def __init__(self, request: StageRequest, params: LLMParams) -> None:
        self.id, self.params = request.request_id, params
        self.prompt = Prompt(request.sources)
        self.unseen: list[int] = []
        """Tokens that the model has not seen yet: what is left of the prompt, later the last one generated."""
        self.sampler = Sampler(params) if params.temperature > 0 else None
        self.answer: Answer


class LLMEngine:
    """A ``StageEngine`` of text to text.

    Outputs: ``{"text": piece}``, and at the end ``{"text": rest, "finish_reason": "stop" | "length",
    "prompt_tokens": n, "completion_tokens": n}``. A piece never holds half a character or a part of a stop string;
    the token that ends an answer counts as one of its completion.
    """

    def __init__(self, model: Any, tokenizer: Any, options: LLMOptions) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._vocabulary = Vocabulary(tokenizer, model.generation_config.eos_token_id)
        self._cache = SlottedCache(options.max_batch, options.context, model.dtype, model.device)
        self._requests: dict[RequestId, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._prefilling: _Request | None = None
        self._running: list[_Request] = []

    @property
    def busy(self) -> bool:
        return bool(self._running or self._prefilling or self._waiting)

    def start(self, request: StageRequest) -> None:
        params = validated(request.params, LLMParams)
        self._requests[request.request_id] = _Request(request, params)

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        request = self._requests[request_id]
        try:
            if not request.prompt.feed(chunk):
                return
            request.unseen = self._encode(request.prompt)
        except InvalidRequest:
            self.abort(request_id)
            raise
        size = len(request.unseen)
        limit = min(request.params.max_tokens, self._options.context - size)
        request.answer = Answer(self._vocabulary, size, limit, request.params.stop)
        self._waiting.append(request)

    def abort(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request is self._prefilling:
            self._prefilling = None
            self._cache.remove_row(len(self._running), len(self._running))
        elif request in self._running:
            self._leave(self._running.index(request))
        elif request in self._waiting:
            self._waiting.remove(request)

    def step(self) -> Iterator[StageOutput]:
        if self._prefilling is None and self._waiting and len(self._running) < self._options.max_batch:
            self._prefilling = self._waiting.popleft()
            self._cache.add_row()
        if self._prefilling is not None:
            # Given out before the forward that follows: it is the first text, which the user is waiting for.
            yield from self._prefill(self._prefilling)
        if self._running:
            yield from self._decode()

    def close(self) -> None:
        self._requests.clear()
        self._waiting.clear()
        self._running.clear()
        self._prefilling = None
        del self._model, self._cache

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the prompt's tokens, few enough for the context. Raises ``InvalidRequest``.

        What cannot fit is refused as soon as that shows, since rendering and tokenizing take a time that grows with the
        prompt, in which all the other requests wait. A message is a token at least, whatever the chat template.
        """
        self._refuse_beyond_context(prompt.messages, f"{prompt.messages} messages of 1 token at least")
        text = prompt.render(self._tokenizer, self._options.system_prompt)
        least = math.ceil(len(text) / self._vocabulary.longest)
        self._refuse_beyond_context(least, f"{len(text)} characters, which are {least} tokens at least,")
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        self._refuse_beyond_context(len(tokens), f"{len(tokens)} tokens")
        return tokens

    def _refuse_beyond_context(self, tokens: int, found: str) -> None:
        if tokens + 1 > self._options.context:
            raise InvalidRequest(
                f"the prompt has {found} and the answer needs 1 at least; the context holds {self._options.context}",
                param="messages",
                code="context_length_exceeded",
            )

    def _prefill(self, request: _Request) -> list[StageOutput]:
        row, size = len(self._running), self._options.prefill_chunk
        piece, request.unseen = request.unseen[:size], request.unseen[size:]
        logits = self._forward(row, [piece])
        if request.unseen:
            return []
        self._prefilling = None
        self._running.append(request)
        return self._next(row, logits)

    def _decode(self) -> list[StageOutput]:
        return self._next(0, self._forward(0, [request.unseen for request in self._running]))

    @torch.inference_mode()
    def _forward(self, first_row: int, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Bring the rows from ``first_row`` on the same number of tokens each; return logits (rows, vocabulary)."""
        positions, mask = self._cache.extend(first_row, first_row + len(tokens), len(tokens[0]))
        output = self._model(
            input_ids=torch.tensor(tokens, device=self._model.device),
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _next(self, first_row: int, logits: Tensor) -> list[StageOutput]:
        """Give the rows from ``first_row`` on their next token; those that are done leave."""
        outputs, done = [], []
        requests = self._running[first_row:]
        for row, token in enumerate(choose(logits, [request.sampler for request in requests]), first_row):
            request = self._running[row]
            request.unseen = [token]
            data = request.answer.push(token)
            last = request.answer.finish_reason is not None
            if last:
                done.append(row)
            if data:
                outputs.append(StageOutput(request.id, data=data, last=last))
        for row in reversed(done):
            del self._requests[self._running[row].id]
            self._leave(row)
        return outputs

    def _leave(self, row: int) -> None:
        """Free a running request's row; the last running one takes its place."""
        self._cache.remove_row(row, len(self._running) - 1)
        self._running[row] = self._running[-1]
        self._running.pop()


def open_engine(context: StageContext) -> LLMEngine:
    """Load the checkpoint directory ``context.model``; its options are ``LLMOptions``. Nothing is downloaded.

    Raises msgspec.ValidationError (options), ValueError (a model that this engine cannot serve), OSError (its files).
    """
    options = msgspec.convert(context.options, LLMOptions)
    if context.model is None:
        raise ValueError(f"stage {context.stage!r}: the llm engine needs a model, a checkpoint directory")
    torch.set_num_threads(context.threads)
    # torch's compiler, loaded whether it is used or not, makes this directory; without a name, one in /tmp that stays.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(assets.cache_dir() / "torchinductor"))
    context.report("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(context.model, local_files_only=True)
    if tokenizer.chat_template is None:
        raise ValueError(f"{context.model}: no chat template; the llm engine serves conversations only")
    context.report("reading the weights")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would fill the end of stderr, which is kept to explain a crash
    model: Any = AutoModelForCausalLM.from_pretrained(
        context.model, dtype=_dtype(options.dtype), attn_implementation="sdpa", local_files_only=True
    )
    _check(model.config, options)
    model = model.eval().to(torch.device(context.device))
    pack_linears(model, options.max_batch)
    return LLMEngine(model, tokenizer, options)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: found {name!r}; accepted: float32, bfloat16, float16")
    return dtype


def _check(config: Any, options: LLMOptions) -> None:
    """Refuse what would be computed wrongly: positions past the model's, layers that do not see the whole context."""
    positions = getattr(config, "max_position_embeddings", options.context)
    if options.context > positions:
        raise ValueError(f"context: found {options.context}; the model has {positions} positions")
    window = getattr(config, "sliding_window", None) or options.context
    kinds = set(getattr(config, "layer_types", None) or ())
    if window < options.context or not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"the llm engine attends to the whole context of {options.context} tokens; "
            f"found layers {sorted(kinds)}, window {window}"
        )
