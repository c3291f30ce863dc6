"""vLLM's ``LLMEngine`` behind the ``StageEngine`` protocol, for any kind of input.

Rules
1. All calls come from the engine loop's thread: ``add_request`` from ``feed`` or ``step``, vLLM's ``step`` from
   ``step``. vLLM schedules, batches, samples and detokenizes.
2. Our request ids are vLLM's external ids, as text. vLLM draws internal ids, which key the captured hidden states.
3. A resumed request begins behind the tokens of its journal; vLLM computes them in one prefill, or decides some of them
   again (``decided``). A request with several answers (``n``), and any request of an engine with speculative decoding,
   is not resumed, but refused.
4. An error that vLLM raises for a request becomes that request's ``InvalidRequest``, with vLLM's message. Any other
   exception of vLLM ends the worker. An answer that vLLM ends with the reason "error" fails: with structured outputs by
   ``InvalidRequest``, because they cannot be had; without them for now, because vLLM says that it may be sent again.

If logprobs were asked for, an output's data has ``logprobs``: for each new token a list of ``{"token_id", "logprob",
"rank", "token"}``, in vLLM's order. ``prompt_logprobs`` has the same for each token of the prompt (null for the first).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import msgspec
import vllm
from vllm import LLMEngine, SamplingParams
from vllm.inputs.engine import embeds_input, tokens_input

from omni_actors.stages.adapters.engine import AdaptedEngine
from omni_actors.stages.adapters.options import KEEP, LOAD
from omni_actors.stages.autoregressive.prompt_engine import C, PromptEngine, PromptRequest
from omni_actors.stages.base import (
    Decisions,
    InvalidRequest,
    RequestId,
    StageContext,
    StageFailure,
    StageOutput,
    StageRequest,
    TemporarilyRefused,
)
from omni_actors.stages.raw_prompt import RawPrompt
from omni_actors.stages.refusal import beyond_context
from omni_actors.stages.vllm import _internals, control
from omni_actors.stages.vllm.adapters import DISABLED, VLLMAdapters
from omni_actors.stages.vllm.arguments import CLIENT_ERRORS, engine_args, parallel, refusal, sampling_params
from omni_actors.stages.vllm.decided import DecidedTokens, at_once, decide
from omni_actors.stages.vllm.options import VLLMOptions, VLLMSampling

NOT_RESUMED = "not_resumed"


class VLLMRequest(PromptRequest[C]):
    """One request."""

    internal_id = ""
    """vLLM's own id, once the request is in the batch."""
    prompt_tokens = 0
    completion_tokens = 0

    def __init__(self, request: StageRequest, params: VLLMSampling, collector: C) -> None:
        """Raises InvalidRequest, TemporarilyRefused."""
        super().__init__(request, params, collector)
        self.sampling: SamplingParams = sampling_params(params)
        if request.journal and self.sampling.n > 1:
            message = "its worker died, and an answer of several (n) is not resumed"
            raise TemporarilyRefused(message, code=NOT_RESUMED)
        self.behind: list[Decisions] = [entry for entry in request.journal[: at_once(request, params)] if entry]
        """The first outputs with tokens. The tokens are computed in one prefill."""
        decided = [token for entry in request.journal for token in entry]
        decide(self.sampling, decided, sum(map(len, self.behind)))
        self._undeclared: list[int] = []

    def decide(self, tokens: Iterable[int]) -> None:
        """Note tokens that vLLM has chosen."""
        self._undeclared += tokens

    def decisions(self) -> Decisions:
        """Return the tokens that no output has declared yet."""
        tokens, self._undeclared = tuple(self._undeclared), []
        return tokens


R = TypeVar("R", bound=VLLMRequest[Any])


class VLLMEngine(AdaptedEngine[R, VLLMAdapters], PromptEngine[R]):
    """A ``StageEngine`` on vLLM. ``context.model``: a checkpoint directory. A subclass defines the kind of input."""

    def __init__(self, context: StageContext, **fixed: Any) -> None:
        """Load the model. fixed: the fields of vLLM's ``EngineArgs`` that the engine depends on.

        Raises msgspec.ValidationError (options), WrongEngineArgument, UnsupportedVLLMVersion, and what vLLM raises
        while it loads.
        """
        super().__init__()
        self._options = msgspec.convert(context.options, self.OPTIONS)
        model = context.model_directory
        given = self._options.engine_args
        self._resumes = "speculative_config" not in given  # with it, vLLM takes no logits processors
        if self._resumes:
            processors = [*given.get("logits_processors", ()), DecidedTokens]
            given = {**given, "logits_processors": processors}
        if context.tokenizer is not None:
            fixed = {**fixed, "tokenizer": str(context.tokenizer)}
        given = parallel(context, given)
        arguments = engine_args(context.stage, model, given, fixed)
        context.report(f"vLLM {vllm.__version__} is reading the weights")
        config = json.loads((model / "config.json").read_text())
        _internals.register_in_process(config.get("architectures") or ())
        self._llm = LLMEngine.from_engine_args(arguments)
        self._context: int = self._llm.model_config.max_model_len
        lora = self._llm.vllm_config.lora_config
        self._adapters = VLLMAdapters(self._llm, 0 if lora is None else lora.max_loras)
        if lora is None:
            self._capabilities |= {LOAD: DISABLED, KEEP: DISABLED}
        self._capabilities |= control.capabilities(self._llm)
        self._capabilities["update_weights"] = control.why_no_new_weights(self._llm) or self._update_weights
        self._directory = model
        self._begun: list[tuple[R, list[str]]] = []
        """Requests that have begun behind outputs since the last step, with the texts of these outputs."""

    OPTIONS: ClassVar[type[VLLMOptions]] = VLLMOptions
    PART: ClassVar = ""
    """The part of the checkpoint that the model is; "": all of it."""

    # for subclasses, besides ``_new_request`` and ``_encode`` (sets ``prompt_tokens``, returns vLLM's ``EngineInput``)

    def _outputs(self, request: R, output: Any) -> Iterator[StageOutput]:
        """Yield the outputs of one ``RequestOutput`` of vLLM. Forgets a request that ends with it."""
        raise NotImplementedError

    def _outputs_behind(self, request: R, texts: Sequence[str]) -> Iterator[StageOutput]:
        """Yield the outputs again behind which a request begins, as far as they need no step. texts: of each."""
        raise NotImplementedError

    def _prompt_outputs(self) -> Iterator[StageOutput]:
        """Yield what the last step computed for the downstream stages that belongs to no new token."""
        yield from ()

    # StageEngine

    @property
    def busy(self) -> bool:
        busy: bool = self._llm.has_unfinished_requests()
        return busy

    def start(self, request: StageRequest) -> None:
        if request.journal and not self._resumes:
            message = "its worker died, and with speculative decoding no request is resumed"
            raise TemporarilyRefused(message, code=NOT_RESUMED)
        super().start(request)

    def _join_batch(self, request: R, prompt: Any) -> None:
        del request.collector
        try:
            request.internal_id = self._llm.add_request(
                str(request.id),
                prompt,
                request.sampling,
                lora_request=self._adapters.name_of(request.adapter),
                priority=request.params.priority,
            )
        except CLIENT_ERRORS as error:
            if request.prompt_tokens >= self._context:
                raise beyond_context(str(error)) from error
            raise refusal(error) from error
        if request.behind:
            self._begun.append((request, _internals.begin_behind(self._llm, request.internal_id, request.behind)))

    def _embeds_input(self, prompt: RawPrompt, repetition_penalty: float) -> Any:
        """Return vLLM's input for embeddings. vLLM does not check them: wrong ones would end the worker.

        vLLM would count a repetition penalty for the ids that an earlier request left in the row.
        """
        model = self._llm.model_config
        if not model.enable_prompt_embeds:
            message = "embeds are taken only by a stage with engine_args.enable_prompt_embeds: true"
            raise InvalidRequest(message, param="embeds")
        return embeds_input(prompt.embeds(model.get_hidden_size(), model.dtype, repetition_penalty))

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return control.replace_weights(self._llm, self._directory, self.PART, files)

    def abort(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.internal_id:
            self._llm.abort_request([str(request_id)])
            self._begun = [each for each in self._begun if each[0] is not request]
            self._free_ended()
        super().abort(request_id)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        begun, self._begun = self._begun, []
        for resumed, texts in begun:
            if self._requests.get(resumed.id) is resumed:
                yield from self._outputs_behind(resumed, texts)
        outputs = self._llm.step()
        yield from self._prompt_outputs()
        for output in outputs:
            if (request := self._requests.get(int(output.request_id))) is None:
                continue
            if any(answer.finish_reason == "error" for answer in output.outputs):
                self.abort(request.id)
                yield StageFailure(request.id, _failure(request.params))
            else:
                yield from self._outputs(request, output)
        self._free_ended()

    def warm_up(self) -> None:
        """Answer one token with log probabilities: what vLLM compiles for them would delay every request by seconds."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, prompt_logprobs=1, detokenize=False)
        with _internals.without_figures(self._llm):
            with suppress(*CLIENT_ERRORS):  # the engine may offer none, or its context be too small
                self._llm.add_request("0", tokens_input([0, 0]), sampling)
            while self.busy:
                for _ in self.step():
                    pass

    def gauges(self) -> dict[str, float]:
        """Return vLLM's figures (``_internals.engine_metrics``); empty with ``disable_log_stats: true``."""
        return _internals.engine_metrics(self._llm) if self._llm.log_stats else {}

    def close(self) -> None:
        super().close()
        _internals.close(self._llm)
        del self._llm

    def _free_ended(self) -> None:
        """Let vLLM free the requests that ended. vLLM does that in its next step, and the loop calls none if idle."""
        if not self._llm.has_unfinished_requests():
            self._llm.step()


def _failure(params: VLLMSampling) -> InvalidRequest | TemporarilyRefused:
    """Return why vLLM has ended an answer by an error (rule 4)."""
    if params.structured_outputs is None:
        return TemporarilyRefused("vLLM has ended the answer by an error of its own", code="engine_error")
    param = "structured_outputs"
    message = f"vLLM has ended the answer by an error, which may come from its {param}"
    return InvalidRequest(message, param=param, code="unprocessable_input")


def logprobs_of(output: Any, answer: Any) -> dict[str, Any]:
    """Return the output's data about log probabilities, empty unless the request asked for them.

    output: a ``RequestOutput`` of vLLM, which has the prompt's once. answer: one of its ``CompletionOutput``.
    """
    data: dict[str, Any] = {}
    if answer.logprobs:
        data["logprobs"] = [_logprobs(position) for position in answer.logprobs]
    if output.prompt_logprobs:
        data["prompt_logprobs"] = [position and _logprobs(position) for position in output.prompt_logprobs]
    return data


def _logprobs(position: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "logprob": found.logprob, "rank": found.rank, "token": found.decoded_token}
        for token, found in position.items()
    ]
