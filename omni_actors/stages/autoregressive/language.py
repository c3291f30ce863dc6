"""Text generation with continuous batching: a request's way through prefill and decoding to its last piece of text.

A subclass defines how a prompt becomes positions (``_encode``) and what a forward is (``_forward``).

The engine is resumable: the decisions of an output are the tokens since the previous output. A request with a journal
prefills its prompt as ever, in the same chunks, and then its decided tokens in chunks too. The outputs come again token
by token, by the code that every token takes. The last decided token is decoded: its forward gives the next decision.

Log probabilities come from the logits, which a prefill computes for its last position alone. So a request that asks for
them decodes its decided tokens again, one by one.

Prefill and decode may be two stages (see ``roles``).

A guided request has a companion, a second sequence in the batch (see ``guidance``). Both prefill the decided tokens.

Outputs: ``{"text": piece}``, and at the end ``{"text": rest, "finish_reason": "stop" | "length", "prompt_tokens": n,
"completion_tokens": n}``. A piece never ends inside a character or a stop string. ``completion_tokens`` counts the end
token. With ``logprobs``, each token gives an output with its ``logprobs`` (see ``logprobs``), with text or without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import msgspec
from torch import Tensor

from omni_actors.stages import base
from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.adapters.engine import AdaptedEngine
from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.guidance import GuidedSequence, guided
from omni_actors.stages.autoregressive.logprobs import token_logprobs
from omni_actors.stages.autoregressive.options import GuidedParams, TextOptions, TextParams
from omni_actors.stages.autoregressive.prefixes import Block, PrefixCache
from omni_actors.stages.autoregressive.prompt_engine import C, PromptEngine, PromptRequest
from omni_actors.stages.autoregressive.prompt_states import ReceivedPrompt
from omni_actors.stages.autoregressive.sampling import RandomNumbers, Sampler, Sampling, choose, not_finite
from omni_actors.stages.autoregressive.scheduler import Scheduler
from omni_actors.stages.autoregressive.structure import PARAM, Structure, StructureTokenizer
from omni_actors.stages.autoregressive.text import AnswerText, Vocabulary
from omni_actors.stages.refusal import beyond_context, refuse_unknown_tokens, request_work


class TextRequest(PromptRequest[C], GuidedSequence):
    """One request, or the companion of one: it has the request's id, adapter and journal, and a prompt of its own."""

    def __init__(self, request: base.StageRequest, params: TextParams, collector: C) -> None:
        super().__init__(request, params, collector)
        self.priority = params.priority
        sampling = msgspec.convert(params, Sampling, from_attributes=True)
        bias = _token_biases(params)
        is_plain = sampling.is_greedy and not bias and params.structured_outputs is None
        self.sampler = None if is_plain else Sampler(sampling, RandomNumbers(params.seed), bias=bias)
        self.decided = deque(token for decisions in request.journal for token in decisions)
        """The tokens of the journal that the answer does not have yet."""
        self.uncomputed = list(self.decided) if params.logprobs is None else []
        """Tokens that the model has not computed yet, in order: those of the answer, and the rest of ``decided``."""
        self.decisions: list[int] = []
        """The answer's tokens since the last output."""
        self.prefix_keys: Sequence[bytes] = ()
        """The keys of the prompt's whole blocks in the ``PrefixCache``; () if it is not used."""
        self.prompt_tokens: Sequence[int | None] = ()
        """The token of each position of a prompt that is computed for another stage (see ``roles``)."""
        self.replayed, self.has_journal = request.replayed, bool(request.journal)
        self.received: ReceivedPrompt | None = None
        """The prompt that another stage computes, until the cache has all of it (see ``roles``)."""
        self.structure: Structure | None = None
        self.answer: AnswerText

    def take(self, count: int) -> list[int]:
        """Take the tokens of the next ``count`` positions, which the model computes now."""
        taken, self.uncomputed = self.uncomputed[:count], self.uncomputed[count:]
        return taken


R = TypeVar("R", bound=TextRequest[Any])


class LanguageEngine(AdaptedEngine[R, BatchedAdapters], PromptEngine[R]):
    """A ``StageEngine`` whose outputs are text.

    adapters: those of the model that ``_forward`` runs. A subclass sets ``_cache``, which the scheduler has too.
    """

    WARM_UP: ClassVar[Mapping[str, Any]] = {"max_tokens": 2}
    """The parameters of the request of ``warm_up``."""
    _cache: SlottedCache

    def __init__(
        self, scheduler: Scheduler[R], vocabulary: Vocabulary, options: TextOptions, adapters: BatchedAdapters
    ) -> None:
        super().__init__()
        self._adapters = adapters
        self._scheduler, self._vocabulary, self._context = scheduler, vocabulary, options.context
        self._max_batch = options.max_batch
        self._structure_tokenizer: StructureTokenizer | None = None
        megabytes = options.prefix_cache_mb
        self._prefixes = PrefixCache(options.prefill_chunk, megabytes * 1_000_000) if megabytes else None
        self._capabilities["reset_prefix_cache"] = (
            "the option prefix_cache_mb is 0" if self._prefixes is None else self._reset_prefix_cache
        )

    # for subclasses, besides ``_new_request`` and ``_encode``, which returns the token of each position of the prompt
    # (None: there is only an embedding)

    def _forward(self, rows: list[int], count: int) -> Tensor:
        """Compute the next ``count`` positions of each row; return the last one's logits, (rows, vocabulary).

        Positions after the prompt are the request's ``uncomputed`` tokens.
        """
        raise NotImplementedError

    def _downstream(self, request: R, token: int | None = None) -> Mapping[str, base.TensorLike]:
        """Return what the downstream stages get now. Called for each prefill chunk of the prompt and for each token.

        token: what was just added to the answer; None: nothing, or its last token.
        """
        return {}

    def _prompt_outputs(self, request: R, row: int, count: int) -> Iterator[base.StageOutput]:
        """Yield what goes downstream when the cache has the next ``count`` positions of a prompt, but not all of it."""
        if downstream := self._downstream(request):
            yield base.StageOutput(request.id, downstream=downstream)

    def _sends_rows(self, request: R) -> bool:
        """Return whether ``_downstream`` returns rows of the prompt, which the prefix cache then keeps too."""
        return False

    def _computed_rows(self, request: R) -> Tensor:
        """Return the rows, (positions, hidden), of the prompt positions that the last forward computed."""
        raise NotImplementedError

    def _skip(self, request: R, block: Block) -> None:
        """Take the next positions of the prompt from the prefix cache. Their keys and values are there already."""
        raise NotImplementedError

    def _answered(self, request: R) -> None:
        """Remove a request whose answer is complete."""
        self.abort(request.id)

    # StageEngine

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    def _guided(self, request: R, params: GuidedParams, companion: Callable[[], R]) -> R:
        """Return a new request, with a companion if it is to be guided. Raises ``InvalidRequest``."""
        if params.guidance_scale != 1:
            if self._max_batch < 2:
                message = f"guidance_scale: a guided request takes 2 rows; the engine has max_batch: {self._max_batch}"
                raise base.InvalidRequest(message, param="guidance_scale", code="unsupported_parameter")
            request.guide_by(companion(), params.guidance_scale)
        return request

    def _join_batch(self, request: R, tokens: Sequence[int | None]) -> None:
        if not tokens:
            raise base.InvalidRequest("the prompt has no tokens", param="messages")
        for each in request.members:
            del each.collector
        params = request.params
        end_tokens = self._vocabulary.end_tokens(params)
        self._require_known("stop_token_ids", params.stop_token_ids)
        self._require_known("logit_bias", _token_biases(params))
        if params.min_tokens > params.max_tokens:
            message = f"min_tokens: {params.min_tokens} is more than max_tokens, {params.max_tokens}"
            raise base.InvalidRequest(message, param="min_tokens")
        if request.sampler:
            request.sampler.see(token for token in tokens if token is not None)
            request.sampler.end_tokens = end_tokens
            request.sampler.structure = request.structure = self._structure(params)
        replayed = len(request.decided) if params.logprobs is None else 0
        request.prefill_left, request.ready = len(tokens), len(tokens) + replayed
        longest = max(each.prefill_left for each in request.members)
        limit = min(params.max_tokens, self._context - longest)
        request.answer = AnswerText(self._vocabulary, len(tokens), limit, params)
        self._scheduler.add(*request.members)

    def _structure(self, params: TextParams) -> Structure | None:
        """Return the structure of an answer. Raises ``InvalidRequest``."""
        if params.structured_outputs is None:
            return None
        if params.ignore_eos or params.min_tokens:
            name = "ignore_eos" if params.ignore_eos else "min_tokens"
            raise base.InvalidRequest(f"{name}: the end of the answer follows from its structure", param=name)
        with request_work(PARAM):
            if self._structure_tokenizer is None:
                self._structure_tokenizer = StructureTokenizer(self._vocabulary.tokenizer, sorted(self._vocabulary.end))
            return Structure(self._structure_tokenizer, params.structured_outputs)

    def _require_known(self, param: str, tokens: Iterable[int]) -> None:
        """Raise ``InvalidRequest`` if the model does not have one of these tokens."""
        refuse_unknown_tokens(tokens, self._vocabulary.size, param)

    def abort(self, request_id: base.RequestId) -> None:
        if (request := self._requests.get(request_id)) is not None:
            self._scheduler.remove(request)
        super().abort(request_id)

    def step(self) -> Iterator[base.StageOutput | base.StageFailure]:
        for row, count in self._scheduler.prefill_chunks():
            # Yielded before the forward that follows: the client waits for this first text.
            yield from self._prefill(row, count)
        if rows := self._scheduler.decode_rows():
            yield from self._next([self._scheduler.rows[row] for row in rows], self._forward(rows, 1))

    def warm_up(self) -> None:
        """Answer a short question with two tokens: the first run of each kernel and of the chat template is slow."""
        data = {"messages": [{"role": "user", "content": "Hello"}]}
        self.start(base.StageRequest(0, (base.CLIENT,), self.WARM_UP))
        with suppress(base.InvalidRequest):  # the configured context may be too small for the question
            self.feed(0, base.Chunk(source=base.CLIENT, seq=0, last=True, tensors={}, data=data))
        while self.busy:
            for _ in self.step():
                pass

    def close(self) -> None:
        super().close()
        del self._scheduler, self._adapters, self._prefixes

    def gauges(self) -> Mapping[str, float]:
        """Return the figures of the prefix cache; none if it is off."""
        return {} if self._prefixes is None else self._prefixes.gauges()

    def _reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache. Running requests have copies of their own, which they keep."""
        assert self._prefixes is not None, "the capability needs it"
        self._prefixes.clear()
        return True

    def _use_prefixes(self, request: R, tokens: Sequence[int]) -> None:
        """Let a request use the prefix cache, if there is one. tokens: its prompt, which must have no media."""
        if self._prefixes is not None:
            request.prefix_keys = self._prefixes.keys(tokens, request.adapter)

    def _reuse(self, request: R, row: int) -> Iterator[base.StageOutput]:
        """Take what the prefix cache has of a prompt that begins.

        At least one position is left to compute: its logits decide the first token. Each block gives the output that
        its forward would give, so that a resumed request has the same outputs, whatever the cache has by then.
        """
        if self._prefixes is None or self._cache.lengths[row] or not request.prefix_keys:
            return
        keys = request.prefix_keys[: (request.prefill_left - 1) // self._prefixes.size]
        for block in self._prefixes.find(keys, with_rows=self._sends_rows(request)):
            self._cache.append(row, block.states)
            self._skip(request, block)
            request.prefill_left -= block.size
            request.ready -= block.size
            yield from self._prompt_outputs(request, row, block.size)

    def _keep(self, request: R, row: int, count: int) -> None:
        """Add the positions that were just computed to the prefix cache, if they are a block of it."""
        end = self._cache.lengths[row]
        if self._prefixes is None or end > len(request.prefix_keys) * self._prefixes.size:
            return  # a prompt is computed alone, in whole blocks
        rows = self._computed_rows(request) if self._sends_rows(request) else None
        self._prefixes.add(
            request.prefix_keys[: end // self._prefixes.size], self._cache.read(row, end - count, count), rows
        )

    def _prefill(self, row: int, count: int) -> Iterator[base.StageOutput | base.StageFailure]:
        request = self._scheduler.rows[row]
        yield from self._reuse(request, row)
        count = min(count, request.prefill_left)
        logits = self._forward([row], count)
        self._keep(request, row, count)
        request.prefill_left -= count
        request.ready -= count
        if request.is_companion:
            _prefilled(request, logits)
        elif request.answer.tokens:
            yield from self._replay(request, count)
        elif request.prefill_left:
            yield from self._prompt_outputs(request, row, count)
        elif request.decided and request.params.logprobs is None:
            request.prefill_left = len(request.decided) - 1
            yield from self._replay(request, 1)
        else:
            yield from self._next([request], logits)

    def _replay(self, request: R, count: int) -> Iterator[base.StageOutput | base.StageFailure]:
        """Add the next ``count`` decided tokens to the answer. The model has computed all tokens before each."""
        for _ in range(count):
            if request.id not in self._requests:
                return  # it failed
            token = request.decided.popleft()
            if request.sampler:
                request.sampler.replay(token)
            yield from self._append(request, token)

    def _next(self, sequences: list[R], logits: Tensor) -> Iterator[base.StageOutput | base.StageFailure]:
        """Choose each request's next token from logits (sequences, vocabulary); remove the requests that end."""
        requests, logits = guided(sequences, logits)
        samplers = [None if request.decided else request.sampler for request in requests]
        for request, chosen, row in zip(requests, choose(logits, samplers), logits, strict=True):
            if (token := chosen) is None:
                yield self._failed(request, _structure_failure(request) or not_finite())
                continue
            if request.decided:
                token = request.decided.popleft()
                if request.sampler:
                    request.sampler.replay(token)
            for each in request.members:
                each.uncomputed.append(token)
                each.ready = 1
            yield from self._append(request, token, row)

    def _append(
        self, request: R, token: int, logits: Tensor | None = None
    ) -> Iterator[base.StageOutput | base.StageFailure]:
        """Add a token to the answer; remove the request if the answer ends. logits: from which it was chosen."""
        count = request.params.logprobs
        if (failure := _structure_failure(request)) is not None:
            yield self._failed(request, failure)
            return
        try:
            with request_work():
                data = request.answer.push(token)
                if logits is not None and count is not None:
                    data["logprobs"] = [token_logprobs(logits, token, count, self._vocabulary)]
        except base.InvalidRequest as error:
            yield self._failed(request, error)
            return
        request.decisions.append(token)
        last = request.answer.finish_reason is not None
        downstream = self._downstream(request, None if last else token)
        if last:
            self._answered(request)
        is_due = len(request.decisions) >= base.MOST_UNDECLARED  # of tokens without text, such as special ones
        if data or downstream or is_due:
            decisions, request.decisions = tuple(request.decisions), []
            yield base.StageOutput(request.id, data=data, downstream=downstream, last=last, decisions=decisions)

    def _failed(self, request: R, error: base.InvalidRequest) -> base.StageFailure:
        """End a request by its own fault; return its failure."""
        self.abort(request.id)
        return base.StageFailure(request.id, error)


def _prefilled(companion: TextRequest[Any], logits: Tensor) -> None:
    """Note that positions of a companion's prefill were computed. logits: of the last one, (1, vocabulary)."""
    if companion.prefill_left:
        return
    if not companion.uncomputed:
        companion.prediction = logits[0]
    elif companion.decided:  # the prompt is done
        companion.prefill_left = len(companion.decided) - 1
        companion.decided.clear()


def _structure_failure(request: TextRequest[Any]) -> base.InvalidRequest | None:
    """Return why the answer cannot have its structure any more, if it cannot."""
    return request.structure.failure if request.structure is not None else None


def _token_biases(params: TextParams) -> dict[int, float]:
    """Return ``logit_bias`` by token. Raises ``InvalidRequest``."""
    biases = params.logit_bias or {}
    if wrong := [name for name in biases if not (isinstance(name, int) or (name.isascii() and name.isdecimal()))]:
        raise base.InvalidRequest(f"logit_bias: {wrong[0]!r} is not a token id", param="logit_bias")
    return {int(token): bias for token, bias in biases.items()}


def refuse_beyond_context(tokens: int, found: str, context: int) -> None:
    """Raise ``InvalidRequest`` if a prompt of ``tokens`` leaves no room for an answer. found: the prompt, in words."""
    if tokens + 1 > context:
        raise beyond_context(f"the prompt has {found} and the answer needs 1 at least; the context holds {context}")
