"""vLLM's ``LLMEngine`` behind the protocol of ``stages.base``, whatever its input is.

Rules
1. One thread: ``add_request`` in ``feed``, ``step`` in ``step``. vLLM schedules, batches, samples and detokenizes.
2. Our request ids are vLLM's external ids, as text. Its own ids, which it draws, key the rows of hidden states.
3. What vLLM refuses is the request's ``InvalidRequest`` with vLLM's message; any other exception of it ends the worker.

With logprobs, an output's data has ``logprobs``: for each new token a list of ``{"token_id", "logprob", "rank",
"token"}``, as vLLM has them; ``prompt_logprobs`` is the same for each token of the prompt (null for the first).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import vllm
from vllm import LLMEngine, SamplingParams

from omni_actors.stages.autoregressive.language import Collector
from omni_actors.stages.base import (
    Chunk,
    InvalidRequest,
    RequestId,
    StageContext,
    StageFailure,
    StageOutput,
    StageRequest,
)
from omni_actors.stages.refusal import request_work, validated
from omni_actors.stages.vllm import _internals
from omni_actors.stages.vllm.arguments import CLIENTS, engine_args, refusal, sampling_params
from omni_actors.stages.vllm.options import VLLMOptions, VLLMParams, VLLMSampling

__all__ = ["Request", "VLLMEngine", "logprobs_of"]


class Request:
    """One request. ``internal``: vLLM's id of it, once its input is complete."""

    internal = ""
    prompt_tokens = 0

    def __init__(self, request: StageRequest, params: VLLMSampling, collector: Collector) -> None:
        self.id, self.params, self.collector = request.request_id, params, collector
        self.sampling: SamplingParams = sampling_params(params)
        self.downstream = request.downstream
        """Whether anybody reads what goes downstream."""
        self.tokens = 0
        """Generated so far."""


R = TypeVar("R", bound=Request)


class VLLMEngine(Generic[R]):
    """A ``StageEngine``. What kind of input it takes, a class below says."""

    PARAMS: ClassVar[type[VLLMSampling]] = VLLMParams

    def __init__(self, context: StageContext, **fixed: Any) -> None:
        """fixed: of vLLM's EngineArgs, what this engine depends on.

        Raises msgspec.ValidationError (options), WrongEngineArgument, UnsupportedVLLMVersion, and whatever vLLM raises
        as it loads.
        """
        self._options = msgspec.convert(context.options, VLLMOptions)
        if context.model is None:
            raise ValueError(f"stage {context.stage!r}: vLLM needs a model, a checkpoint directory")
        arguments = engine_args(context.stage, context.model, self._options.engine_args, fixed)
        context.report(f"vLLM {vllm.__version__} is reading the weights")
        _internals.register_in_process(
            json.loads((context.model / "config.json").read_text()).get("architectures") or ()
        )
        self._llm = LLMEngine.from_engine_args(arguments)
        self._context: int = self._llm.model_config.max_model_len
        self._requests: dict[RequestId, R] = {}

    # what an engine says for itself

    def _open(self, request: StageRequest, params: Any) -> R:
        raise NotImplementedError

    def _complete(self, request: R) -> None:
        """The request's input is here: ``_add`` it, now or in a later step. Raises ``InvalidRequest``."""
        raise NotImplementedError

    def _stepped(self) -> Iterator[StageOutput]:
        """What the stages below get of this step that belongs to no new token."""
        yield from ()

    # StageEngine

    @property
    def busy(self) -> bool:
        busy: bool = self._llm.has_unfinished_requests()
        return busy

    def start(self, request: StageRequest) -> None:
        self._requests[request.request_id] = self._open(request, validated(request.params, self.PARAMS))

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

    def _add(self, request: R, prompt: Any, tokens: int) -> None:
        """prompt: an ``EngineInput`` of vLLM, of so many ``tokens``. Raises ``InvalidRequest``."""
        del request.collector  # it may be large
        request.prompt_tokens = tokens
        try:
            request.internal = self._llm.add_request(
                str(request.id), prompt, request.sampling, priority=request.params.priority
            )
        except CLIENTS as error:
            if request.prompt_tokens >= self._context:
                raise InvalidRequest(str(error), param="messages", code="context_length_exceeded") from error
            raise refusal(error) from error

    def abort(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and request.internal:
            self._llm.abort_request([str(request_id)])
            self._let_go()

    def step(self) -> Iterator[StageOutput | StageFailure]:
        outputs = self._llm.step()
        yield from self._stepped()
        for output in outputs:
            if (request := self._requests.get(int(output.request_id))) is not None:
                yield from self._outputs(request, output)
        self._let_go()

    def gauges(self) -> dict[str, float]:
        """vLLM's counters and gauges of one value each, by its names for them; none with disable_log_stats: true."""
        return _internals.engine_metrics(self._llm) if self._llm.log_stats else {}

    def close(self) -> None:
        self._requests.clear()
        _internals.close(self._llm)
        del self._llm

    def _let_go(self) -> None:
        """vLLM forgets the requests that have ended in the step behind: where none would come, it comes now."""
        if not self._llm.has_unfinished_requests():
            self._llm.step()

    def _outputs(self, request: R, output: Any) -> Iterator[StageOutput]:
        """Of one ``RequestOutput``; a request that ends here is to be forgotten."""
        raise NotImplementedError


def logprobs_of(output: Any, answer: Any) -> dict[str, Any]:
    """What was asked for of the probabilities, of new tokens and, once, of the prompt's."""
    data: dict[str, Any] = {}
    if answer.logprobs:
        data["logprobs"] = [_logprobs(one) for one in answer.logprobs]
    if output.prompt_logprobs:
        data["prompt_logprobs"] = [one and _logprobs(one) for one in output.prompt_logprobs]
    return data


def _logprobs(position: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "logprob": one.logprob, "rank": one.rank, "token": one.decoded_token}
        for token, one in position.items()
    ]
