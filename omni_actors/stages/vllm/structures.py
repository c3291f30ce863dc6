"""Bounds what the structure of one answer (``structured_outputs``) costs all requests of an ``LLMEngine``.

vLLM bounds the time of regular expressions only, and these only while it converts them. xgrammar 0.2.8 takes 3 s for
each pattern such as "(a{1,200}){1,200}" in a JSON schema. With "(.|\\n){0,500}", the mask of each token costs more than
the one before: 0.04 s more with 50,000 tokens. All requests wait meanwhile, until the supervisor kills the worker.

Rules
1. vLLM's own check of a request runs in a thread first. If it takes longer than ``CHECK_S``, the request is refused
   before vLLM checks it again, in the engine's thread. The thread goes on: nothing can stop it. While ``MOST_LATE``
   such threads go on, requests with a structure are refused.
2. An answer one of whose masks takes more than ``MASK_S`` of the engine's processor time ends with its next token, by
   the error that vLLM has for tokens that a structure rejects.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from vllm import SamplingParams

from omni_actors.stages.base import InvalidRequest

PARAM = "structured_outputs"
CHECK_S = 5.0
"""As long as vLLM gives a regular expression."""
MOST_LATE = 2
MASK_S = 0.5
"""A mask usually takes less than 0.01 s."""
_late: list[threading.Thread] = []
"""The threads of checks that took longer than ``CHECK_S``."""


def check(llm: Any, sampling: SamplingParams) -> None:
    """Let vLLM check a request's parameters if they have a structure. Raises what vLLM raises, InvalidRequest."""
    if sampling.structured_outputs is None:
        return
    _late[:] = [each for each in _late if each.is_alive()]
    if len(_late) >= MOST_LATE:
        message = f"{PARAM}: {MOST_LATE} others that are too large are still being converted; try again later"
        raise InvalidRequest(message, param=PARAM, code="unprocessable_input")
    config, tokenizer = llm.vllm_config, llm.get_tokenizer()
    arguments = config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer
    result: Future[None] = Future()

    def verify() -> None:
        try:
            sampling.clone().verify(*arguments)  # it writes into the structure
        except Exception as error:  # noqa: BLE001  # the engine's thread raises it
            result.set_exception(error)
        else:
            result.set_result(None)

    thread = threading.Thread(target=verify, name="structure", daemon=True)
    thread.start()
    try:
        result.result(CHECK_S)
    except TimeoutError:
        _late.append(thread)
        message = f"{PARAM}: it takes more than {CHECK_S:g} s to convert; give it fewer or smaller repetitions"
        raise InvalidRequest(message, param=PARAM, code="unprocessable_input") from None


def bound(llm: Any, names: Iterable[str]) -> None:
    """Give the grammars of a request that was just added to an ``LLMEngine`` rule 2. names: of its answers."""
    requests = llm.engine_core.engine_core.scheduler.requests
    for name in names:
        structured = requests[name].structured_output_request
        structured.grammar = _bounded(structured._grammar)


def _bounded(grammar: Future[Any]) -> Future[Any]:
    """grammar: vLLM's, which it compiles in a thread."""
    made: Future[Any] = Future()

    def put(compiled: Future[Any]) -> None:
        if (error := compiled.exception()) is not None:
            made.set_exception(error)
        else:
            made.set_result(_Bounded(compiled.result()))

    grammar.add_done_callback(put)
    return made


class _Bounded:
    """A ``StructuredOutputGrammar`` of vLLM."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self._is_too_costly = False

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        began = time.thread_time()
        self._grammar.fill_bitmask(bitmask, batch_index)
        self._is_too_costly |= time.thread_time() - began > MASK_S

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return not self._is_too_costly and bool(self._grammar.accept_tokens(request_id, tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)
