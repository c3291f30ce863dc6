"""What the engines whose answer is text share: requests through prompt, prefill and decoding to the last piece of text.

An engine that builds on this says how a prompt becomes positions (``_encode``) and what a forward is (``_forward``).

Outputs: ``{"text": piece}``, and at the end ``{"text": rest, "finish_reason": "stop" | "length", "prompt_tokens": n,
"completion_tokens": n}``. A piece never holds half a character or a part of a stop string; the token that ends an
answer counts as one of its completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from omni_actors.stages.autoregressive.options import TextParams
from omni_actors.stages.autoregressive.sampling import Sampler, Sampling, choose, generator, not_finite
from omni_actors.stages.autoregressive.scheduler import Scheduler, Sequence
from omni_actors.stages.autoregressive.text import Answer, Vocabulary
from omni_actors.stages.base import (
    Chunk,
    InvalidRequest,
    RequestId,
    StageFailure,
    StageOutput,
    StageRequest,
    TensorLike,
)
from omni_actors.stages.refusal import request_work

__all__ = ["Collector", "LanguageEngine", "Request"]


class Collector(Protocol):
    """Takes a request's chunks in."""

    def feed(self, chunk: Chunk) -> bool:
        """Whether the input is complete. Raises ``InvalidRequest``."""
        ...


C = TypeVar("C", bound=Collector)


class Request(Sequence, Generic[C]):
    """One request. ``token`` is the last one generated, which the model has not seen."""

    def __init__(self, request: StageRequest, params: TextParams, collector: C) -> None:
        self.id, self.params, self.collector = request.request_id, params, collector
        sampling = Sampling(params.temperature, params.top_k, params.top_p, params.repetition_penalty)
        self.sampler = None if sampling.is_greedy else Sampler(sampling, generator(params.seed))
        self.downstream = request.downstream
        """Whether anybody reads what goes downstream."""
        self.token = -1
        self.generated = self.certain = 0
        """Tokens of the answer; those whose text no stop string can cut off any more."""
        self.answer: Answer


R = TypeVar("R", bound=Request[Any])


class LanguageEngine(Generic[R]):
    """A ``StageEngine`` of anything to text."""

    def __init__(self, batch: Scheduler[R], vocabulary: Vocabulary, context: int) -> None:
        self._scheduler, self._vocabulary, self._context = batch, vocabulary, context
        self._requests: dict[RequestId, R] = {}

    # what an engine says for itself

    def _open(self, request: StageRequest) -> R:
        """Raises ``InvalidRequest``."""
        raise NotImplementedError

    def _encode(self, request: R) -> list[int]:
        """The prompt's tokens, one a position, now that the input is complete. Raises ``InvalidRequest``."""
        raise NotImplementedError

    def _forward(self, rows: list[int], count: int) -> Tensor:
        """Bring each row on by ``count`` positions; logits (rows, vocabulary) of the last one."""
        raise NotImplementedError

    def _downstream(self, request: R, *, generated: bool) -> Mapping[str, TensorLike]:
        """What the stages below get now: of a piece of the prompt, where one was just brought on, and of
        ``request.token`` where that was just generated and is not the last one."""
        return {}

    # StageEngine

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    def start(self, request: StageRequest) -> None:
        self._requests[request.request_id] = self._open(request)

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        request = self._requests[request_id]
        try:
            with request_work("messages"):
                complete = request.collector.feed(chunk)
            if complete:
                self._complete(request)
        except InvalidRequest:
            self.abort(request_id)
            raise

    def _complete(self, request: R) -> None:
        """The input is here. Raises ``InvalidRequest``."""
        with request_work("messages"):
            tokens = self._encode(request)
        self._admit(request, tokens)

    def _admit(self, request: R, tokens: list[int]) -> None:
        """Into the batch, with a prompt of ``tokens``. Raises ``InvalidRequest``."""
        if not tokens:
            raise InvalidRequest("the prompt has no tokens", param="messages")
        del request.collector  # it may be large
        if request.sampler:
            request.sampler.see(tokens)
        request.prefill_left = request.ready = len(tokens)
        limit = min(request.params.max_tokens, self._context - len(tokens))
        request.answer = Answer(self._vocabulary, len(tokens), limit, request.params.stop)
        self._scheduler.add(request)

    def abort(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for row, count in self._scheduler.prefill_chunks():
            # Given out before the forward that follows: it is the first text, which the user is waiting for.
            yield from self._prefill(row, count)
        if rows := self._scheduler.decode_rows():
            yield from self._next([self._scheduler.rows[row] for row in rows], self._forward(rows, 1))

    def close(self) -> None:
        self._requests.clear()
        del self._scheduler

    def _prefill(self, row: int, count: int) -> Iterator[StageOutput | StageFailure]:
        request = self._scheduler.rows[row]
        logits = self._forward([row], count)
        request.prefill_left -= count
        request.ready -= count
        if not request.prefill_left:
            yield from self._next([request], logits)
        elif downstream := self._downstream(request, generated=False):
            yield StageOutput(request.id, downstream=downstream)

    def _next(self, requests: list[R], logits: Tensor) -> Iterator[StageOutput | StageFailure]:
        """Give each its next token; those that are done leave."""
        for request, token in zip(requests, choose(logits, [request.sampler for request in requests]), strict=True):
            try:
                data = self._write(request, token)
            except InvalidRequest as error:
                self.abort(request.id)
                yield StageFailure(request.id, error)
                continue
            if not request.answer.holds:
                request.certain = request.generated
            last = request.answer.finish_reason is not None
            downstream = self._downstream(request, generated=not last)
            if last:
                del self._requests[request.id]
                self._scheduler.remove(request)
            if data or downstream:
                yield StageOutput(request.id, data=data, downstream=downstream, last=last)

    def _write(self, request: R, token: int | None) -> dict[str, Any]:
        """Add a token to the answer; what the client gets of it. Raises ``InvalidRequest``."""
        if token is None:
            raise not_finite()
        with request_work():
            data = request.answer.push(token)
        request.token, request.ready = token, 1
        request.generated += 1
        return data


def refuse_beyond_context(tokens: int, found: str, context: int) -> None:
    """Raises InvalidRequest where a prompt of ``tokens`` and one token of an answer do not fit."""
    if tokens + 1 > context:
        raise InvalidRequest(
            f"the prompt has {found} and the answer needs 1 at least; the context holds {context}",
            param="messages",
            code="context_length_exceeded",
        )
