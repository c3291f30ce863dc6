"""vLLM's ``LLMEngine`` behind the ``StageEngine`` protocol, for any kind of input.

Rules
1. All calls come from the engine loop's thread: ``add_request`` from ``feed`` or ``step``, vLLM's ``step`` from
   ``step``. vLLM schedules, batches, samples and detokenizes.
2. Our request ids are vLLM's external ids, as text. vLLM draws internal ids, which key the captured hidden states.
3. A resumed request begins behind the tokens of its journal; vLLM computes them in one prefill, or decides some of them
   again (``decided``). With speculative decoding vLLM cannot decide them again: a request that needs it is refused.
4. An error that vLLM raises for a request becomes that request's ``InvalidRequest``, with vLLM's message. Any other
   exception of vLLM ends the worker. An answer that vLLM ends with the reason "error" fails: with structured outputs by
   ``InvalidRequest``, because they cannot be had; without them for now, because vLLM says that it may be sent again.
"""

from __future__ import annotations

import json
from collections import deque
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
from omni_actors.stages.vllm import _internals, control, logprobs, replay
from omni_actors.stages.vllm.adapters import DISABLED, VLLMAdapters
from omni_actors.stages.vllm.arguments import CLIENT_ERRORS, engine_args, parallel, refusal, sampling_params
from omni_actors.stages.vllm.decided import MOST_LOGPROBS, DecidedTokens, Entry, at_once, drop_reserved, entries
from omni_actors.stages.vllm.options import VLLMOptions, VLLMSampling
from omni_actors.stages.vllm.structures import Structures

NOT_RESUMED = "not_resumed"


class VLLMRequest(PromptRequest[C]):
    """One request."""

    internal_id = ""
    """vLLM's own id, once the request is in the batch."""
    prompt_tokens = 0
    completion_tokens = 0
    DECIDES_LAST_AGAIN: ClassVar = False
    """Whether vLLM decides the tokens of the journal's last output again in any case."""

    def __init__(self, request: StageRequest, params: VLLMSampling, collector: C) -> None:
        """Raises InvalidRequest."""
        super().__init__(request, params, collector)
        self.sampling: SamplingParams = sampling_params(params)
        drop_reserved(self.sampling)
        journal = entries(request.journal, self.sampling)
        count = at_once(journal, request, self.sampling)
        if self.DECIDES_LAST_AGAIN:
            count = min(count, max(0, len(journal) - 1))
        self.behind = deque(entry for entry in journal[:count] if entry.tokens)
        """The first outputs with tokens, until they are put out again. The tokens are computed in one prefill."""
        self.again = [entry for entry in journal[count:] if entry.tokens]
        """The outputs behind these, whose tokens vLLM decides again, less those that ``logprobs_of`` has found."""
        self._due = deque(entry.answer for entry in self.again for _ in entry.tokens)
        self._held = list[Any]()
        self._room = MOST_LOGPROBS
        """For how many more numbers of log probabilities the journal has room."""

    def declare(self, entry: Entry) -> Decisions:
        """Return the decisions of the next output, which are those of the same output before a death."""
        decisions = entry.decisions(self.sampling, self._room)
        self._room -= max(0, len(decisions) - len(entry.tokens) - 2)
        return decisions

    def in_order(self, output: Any) -> Iterator[Any]:
        """Take an output of vLLM, and yield those whose turn has come: as in the journal, then as they come.

        vLLM decides the tokens of several answers again beside each other.
        """
        self._held.append(output)
        while (each := next((each for each in self._held if self._is_due(each)), None)) is not None:
            self._held.remove(each)
            for _ in each.outputs[0].token_ids[: self._due.count(each.outputs[0].index)]:
                self._due.remove(each.outputs[0].index)
            yield each

    def _is_due(self, output: Any) -> bool:
        return not self._due or self._due[0] == output.outputs[0].index

    def logprobs_of(self, output: Any) -> Mapping[str, Any]:
        """Return the data about log probabilities of an output of vLLM: the journal's, if they were put out before.

        With log probabilities of an answer, each output of vLLM is an output of the engine, so they match. Without, an
        output of the engine may have gathered several of vLLM, and has no log probabilities of its tokens.
        """
        (answer,) = output.outputs
        before = next((entry for entry in self.again if entry.answer == answer.index), None)
        if before is not None and before.tokens == tuple(answer.token_ids):
            self.again.remove(before)
            if before.logprobs:
                return before.logprobs
        return logprobs.logprobs_of(output, answer)


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
        config = json.loads((model / "config.json").read_text())
        # With speculative decoding vLLM takes no logits processors.
        self._decides_again = not given.get("speculative_config") and "speculators_config" not in config
        if self._decides_again:
            processors = [*given.get("logits_processors", ()), DecidedTokens]
            given = {**given, "logits_processors": processors}
        if context.tokenizer is not None:
            fixed = {**fixed, "tokenizer": str(context.tokenizer)}
        given = parallel(context, given)
        arguments = engine_args(context.stage, model, given, fixed)
        context.report(f"vLLM {vllm.__version__} is reading the weights")
        _internals.register_in_process(config.get("architectures") or ())
        self._llm = LLMEngine.from_engine_args(arguments)
        self._context: int = self._llm.model_config.max_model_len
        self._structures = Structures(self._llm)
        self._adapters = VLLMAdapters(self._llm, model, self.PART)
        if self._llm.vllm_config.lora_config is None:
            self._capabilities |= {LOAD: DISABLED, KEEP: DISABLED}
        self._capabilities |= control.capabilities(self._llm)
        self._capabilities["update_weights"] = control.why_no_new_weights(self._llm) or self._update_weights
        self._directory = model
        self._begun: list[tuple[R, list[replay.Answer]]] = []
        """Requests that begin behind outputs and have not put them out again, with their answers."""

    OPTIONS: ClassVar[type[VLLMOptions]] = VLLMOptions
    PART: ClassVar = ""
    """The part of the checkpoint that the model is; "": all of it."""

    # for subclasses, besides ``_new_request`` and ``_encode`` (sets ``prompt_tokens``, returns vLLM's ``EngineInput``)

    def _outputs(self, request: R, output: Any) -> Iterator[StageOutput]:
        """Yield the outputs of one ``RequestOutput`` of vLLM. Forgets a request that ends with it."""
        raise NotImplementedError

    def _outputs_behind(self, request: R, outputs: Sequence[Any]) -> Iterator[StageOutput]:
        """Yield the outputs again behind which a request begins, as far as they need no step.

        outputs: vLLM's ``RequestOutput`` for each entry of ``behind``. Forgets a request that ends with them.
        """
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
        super().start(request)
        resumed = self._requests[request.request_id]
        if resumed.again and (why := self._why_not_again(resumed)) is not None:
            self.abort(request.request_id)
            raise TemporarilyRefused(f"its worker died, and {why}, such a request is not resumed", code=NOT_RESUMED)

    def _why_not_again(self, request: R) -> str | None:
        """Return why vLLM cannot decide tokens again; None: it can."""
        if not self._decides_again:
            return "with speculative decoding"
        mode = self._llm.model_config.logprobs_mode
        missing = any(entry.logprobs is None for entry in request.again) and logprobs.of_answer(request.sampling)
        if missing and mode.startswith("processed"):  # they would be those of the one possible token
            return f"with logprobs_mode {mode!r}"
        return None

    def _join_batch(self, request: R, prompt: Any) -> None:
        del request.collector
        try:
            self._structures.check(request.sampling)
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
        if request.behind or request.again:
            self._begin_behind(request)

    def _begin_behind(self, request: R) -> None:
        def of(answer: int, outputs: Iterable[Entry]) -> list[int]:
            return [token for entry in outputs if entry.answer == answer for token in entry.tokens]

        answers = list[replay.Answer]()
        for index, name in enumerate(replay.names(self._llm, str(request.id))):
            at_once = of(index, request.behind)
            tokens = at_once + of(index, request.again)
            answers.append(replay.Answer(self._llm, name, tokens, len(at_once)))
        self._begun.append((request, answers))

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
            self._llm.abort_request([request.internal_id], internal=True)  # by our id, vLLM would keep a part of it
            self._begun = [each for each in self._begun if each[0] is not request]
            self._free_ended()
        super().abort(request_id)

    def _forget(self, request: R) -> None:
        """Forget a request that ends with its next output, and free an adapter that only it has used."""
        del self._requests[request.id]
        if request.adapter is not None:
            self._adapters.trim(self._adapters_in_use())

    def step(self) -> Iterator[StageOutput | StageFailure]:
        if self._adapters.loaded:
            yield from self._fail_those_without_adapter()
        yield from self._put_out_again()
        outputs = self._llm.step()
        yield from self._prompt_outputs()
        for output in outputs:
            if (request := self._requests.get(int(output.request_id))) is None:
                continue
            if any(answer.finish_reason == "error" for answer in output.outputs):
                self.abort(request.id)
                yield StageFailure(request.id, _failure(request.params))
            else:
                for each in request.in_order(output):
                    yield from self._outputs(request, each)
        self._free_ended()

    def _fail_those_without_adapter(self) -> Iterator[StageFailure]:
        for adapter, error in list(self._adapters.check_again(self._adapters_in_use())):
            for request in [each for each in self._requests.values() if each.adapter == adapter]:
                self.abort(request.id)
                yield StageFailure(request.id, error)

    def _put_out_again(self) -> Iterator[StageOutput]:
        """Put out again what the journals have of the requests that begin behind it, once they are ready."""
        begun, self._begun = self._begun, []
        for request, answers in begun:
            if not all(answer.is_ready for answer in answers):
                self._begun.append((request, answers))
                continue
            good = [answer.open() for answer in answers]
            if all(good):  # otherwise vLLM ends the request
                outputs = [answers[entry.answer].put(entry.tokens) for entry in request.behind]
                yield from self._outputs_behind(request, outputs)

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
