"""Puts what an earlier incarnation has decided into the answers of a request that was just added to an ``LLMEngine``.

Behind each forward, vLLM gives the scheduler's request its new tokens, asks ``check_stop`` whether the answer ends
there, advances the grammar of a structured output, and lets ``process_outputs`` detokenize, find stop strings, and make
the ``RequestOutput``. ``Answer.put`` does the same with the tokens of one output of a journal. So vLLM returns what it
returned the first time, and an answer that has ended needs no forward.

All of it happens before vLLM's first step with the request. To the scheduler, the request then looks like one that it
has preempted. ``_internals.StageWorker`` does the same for the model runner. ``_internals.NAMES`` has the names of vLLM
that are used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pkgutil import resolve_name
from typing import Any

from omni_actors.stages.base import Decisions
from omni_actors.stages.vllm.decided import begin_with

check_stop: Any = resolve_name("vllm.v1.core.sched.utils:check_stop")
append_logprobs: Any = resolve_name("vllm.logprobs:append_logprobs_for_next_position")
EngineCoreOutput: Any = resolve_name("vllm.v1.engine:EngineCoreOutput")


class Answer:
    """One answer of a request. tokens: what is decided of it. at_once: how many of them ``put`` gets."""

    def __init__(self, llm: Any, name: str, tokens: Sequence[int], at_once: int) -> None:
        self._llm, self._name = llm, name
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._request = request = self._scheduler.requests[name]
        self._grammar: Future[Any] | None = None
        """The grammar, which vLLM compiles in a thread. Until ``open`` the scheduler waits for another one."""
        if (structured := request.structured_output_request) is not None:
            self._grammar, structured.grammar = structured._grammar, Future()
        if tokens:
            request.sampling_params = begin_with(request.sampling_params, tokens, at_once)
        if at_once:
            request.take_prefill_stats()  # they are of prompts only

    @property
    def is_ready(self) -> bool:
        """Whether ``open`` may be called."""
        return self._grammar is None or self._grammar.done()

    def open(self) -> bool:
        """Let vLLM go on with the answer, also if its grammar is wrong; return whether ``put`` may be called."""
        if self._grammar is not None:
            self._request.structured_output_request.grammar = self._grammar
        return self._grammar is None or self._grammar.exception() is None

    def put(self, tokens: Decisions) -> Any:
        """Put in the tokens of one output; return vLLM's ``RequestOutput``, whose log probabilities mean nothing.

        An answer that ends with them is removed from the scheduler. The figures of vLLM do not count them.
        """
        request, llm, status = self._request, self._llm, self._request.status
        new = list[int]()
        for token in tokens:
            new.append(token)
            request.append_output_token_ids(token)
            if check_stop(request, self._scheduler.max_model_len):
                break
        accepted = self._scheduler.structured_output_manager.accept_tokens(request, new)
        assert accepted, "the grammar accepts what it has accepted before"
        output = EngineCoreOutput(
            request_id=self._name,
            new_token_ids=new,
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
        )
        request.status = status
        state = llm.output_processor.request_states[self._name]
        [made] = llm.output_processor.process_outputs([output]).request_outputs
        if (logprobs := state.logprobs_processor.logprobs) is not None:
            for token in new:  # from these tokens vLLM tells which characters the next ones end
                append_logprobs(logprobs, [token], [0.0], [""], 1, 0)
        state.is_prefilling = True  # the next output is the first one of which the figures know
        if self._name not in llm.output_processor.request_states:
            llm.engine_core.abort_requests([self._name])
        return made


def names(llm: Any, request_id: str) -> list[str]:
    """Return vLLM's internal ids of the answers of a request that was just added, by the answers' indices."""
    found: list[str] = llm.output_processor.external_req_ids[request_id]
    return list(found)
