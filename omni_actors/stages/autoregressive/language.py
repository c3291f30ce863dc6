"""Text generation with continuous batching: a request's way through prefill and decoding to its last piece of text.

A subclass defines how a prompt becomes positions (``_encode``) and what a forward is (``_forward``).

Outputs: ``{"text": piece}``, and at the end ``{"text": rest, "finish_reason": "stop" | "length", "prompt_tokens": n,
"completion_tokens": n}``. A piece never ends inside a character or a stop string. ``completion_tokens`` counts the end
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from omni_actors.stages import base
from omni_actors.stages.autoregressive.options import TextParams
from omni_actors.stages.autoregressive.prompt_engine import C, PromptEngine, PromptRequest
from omni_actors.stages.autoregressive.sampling import Sampler, Sampling, choose, generator, not_finite
from omni_actors.stages.autoregressive.scheduler import Scheduler, Sequence
from omni_actors.stages.autoregressive.text import Answer, Vocabulary
from omni_actors.stages.refusal import beyond_context, request_work


class TextRequest(PromptRequest[C], Sequence):
    """One request. ``token`` is the last generated token, which the model has not computed yet."""

    def __init__(self, request: base.StageRequest, params: TextParams, collector: C) -> None:
        super().__init__(request, params, collector)
        sampling = msgspec.convert(params, Sampling, from_attributes=True)
        self.sampler = None if sampling.is_greedy else Sampler(sampling, generator(params.seed))
        self.token = -1
        self.answer: Answer


R = TypeVar("R", bound=TextRequest[Any])


class LanguageEngine(PromptEngine[R]):
    """A ``StageEngine`` whose outputs are text. context: the tokens of a prompt and its answer together."""

    def __init__(self, scheduler: Scheduler[R], vocabulary: Vocabulary, context: int) -> None:
        super().__init__()
        self._scheduler, self._vocabulary, self._context = scheduler, vocabulary, context

    # for subclasses, besides ``_open`` and ``_encode``, which returns the tokens of the prompt's positions

    def _forward(self, rows: list[int], count: int) -> Tensor:
        """Compute the next ``count`` positions of each row; return the last one's logits, (rows, vocabulary)."""
        raise NotImplementedError

    def _downstream(self, request: R, *, generated: bool) -> Mapping[str, base.TensorLike]:
        """Return what the downstream stages get now.

        It covers the prefill chunk that was just computed, if there was one. generated: ``request.token`` was just
        generated and is not the last one.
        """
        return {}

    # StageEngine

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    def _admit(self, request: R, tokens: list[int]) -> None:
        if not tokens:
            raise base.InvalidRequest("the prompt has no tokens", param="messages")
        del request.collector
        params = request.params
        end_tokens = self._vocabulary.end_tokens(params)
        if unknown := [token for token in params.stop_token_ids if token >= self._vocabulary.size]:
            message = f"stop_token_ids: the model has no token {unknown[0]}; it has {self._vocabulary.size}"
            raise base.InvalidRequest(message, param="stop_token_ids")
        if params.min_tokens > params.max_tokens:
            message = f"min_tokens: {params.min_tokens} is more than max_tokens, {params.max_tokens}"
            raise base.InvalidRequest(message, param="min_tokens")
        if request.sampler:
            request.sampler.see(tokens)
            request.sampler.end_tokens = end_tokens
        request.prefill_left = request.ready = len(tokens)
        limit = min(params.max_tokens, self._context - len(tokens))
        request.answer = Answer(self._vocabulary, len(tokens), limit, params)
        self._scheduler.add(request)

    def abort(self, request_id: base.RequestId) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request)

    def step(self) -> Iterator[base.StageOutput | base.StageFailure]:
        for row, count in self._scheduler.prefill_chunks():
            # Yielded before the forward that follows: the client waits for this first text.
            yield from self._prefill(row, count)
        if rows := self._scheduler.decode_rows():
            yield from self._next([self._scheduler.rows[row] for row in rows], self._forward(rows, 1))

    def warm_up(self) -> None:
        """Answer a short question with two tokens: the first run of each kernel and of the chat template is slow."""
        data = {"messages": [{"role": "user", "content": "Hello"}]}
        self.start(base.StageRequest(0, (base.CLIENT,), {"max_tokens": 2}))
        with suppress(base.InvalidRequest):  # the configured context may be too small for the question
            self.feed(0, base.Chunk(source=base.CLIENT, seq=0, last=True, tensors={}, data=data))
        while self.busy:
            for _ in self.step():
                pass

    def close(self) -> None:
        super().close()
        del self._scheduler

    def _prefill(self, row: int, count: int) -> Iterator[base.StageOutput | base.StageFailure]:
        request = self._scheduler.rows[row]
        logits = self._forward([row], count)
        request.prefill_left -= count
        request.ready -= count
        if not request.prefill_left:
            yield from self._next([request], logits)
        elif downstream := self._downstream(request, generated=False):
            yield base.StageOutput(request.id, downstream=downstream)

    def _next(self, requests: list[R], logits: Tensor) -> Iterator[base.StageOutput | base.StageFailure]:
        """Choose each request's next token from logits (requests, vocabulary); remove the requests that end."""
        for request, token in zip(requests, choose(logits, [request.sampler for request in requests]), strict=True):
            try:
                with request_work():
                    if token is None:
                        raise not_finite()
                    data = request.answer.push(token)
            except base.InvalidRequest as error:
                self.abort(request.id)
                yield base.StageFailure(request.id, error)
                continue
            request.token, request.ready = token, 1
            last = request.answer.finish_reason is not None
            downstream = self._downstream(request, generated=not last)
            if last:
                self.abort(request.id)
            if data or downstream:
                yield base.StageOutput(request.id, data=data, downstream=downstream, last=last)


def refuse_beyond_context(tokens: int, found: str, context: int) -> None:
    """Raise ``InvalidRequest`` if a prompt of ``tokens`` leaves no room for an answer. found: the prompt, in words."""
    if tokens + 1 > context:
        raise beyond_context(f"the prompt has {found} and the answer needs 1 at least; the context holds {context}")
