"""Bounds what the structure of one answer (``structured_outputs``) costs all requests of an ``LLMEngine``.

xgrammar 0.2.8 bounds no time. It converts each pattern such as "(a{1,200}){1,200}" in a JSON schema for 3 s. It
compiles an enumeration of 20,000 long strings for minutes, and other structures wait for it. With
"x((.|\n){0,200}){0,200}", the mask behind the "x" takes half a minute. All requests wait for a mask, until the
supervisor kills the worker.

Rules
1. A structure is converted, compiled and turned into masks in threads, each time for a limited time. What takes longer
   is given up. Its thread goes on with a low priority, because nothing can stop it, and another one takes its place.
   While ``MOST_LATE`` such threads go on, requests with a structure are refused.
2. vLLM's own check of a request converts its structure. If it takes more than ``CHECK_S``, the request is refused
   before vLLM checks it again, in the engine's thread.
3. An answer whose structure takes more than ``COMPILE_S`` to compile ends, by the error that vLLM has for wrong
   grammars.
4. An answer one of whose masks takes more than ``MASK_S`` of processor time ends with its next token, by the error that
   vLLM has for tokens that a structure rejects.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from vllm import SamplingParams

from omni_actors.stages.base import InvalidRequest

PARAM = "structured_outputs"
CHECK_S = 5.0
COMPILE_S = 10.0
MASK_S = 0.5
"""A mask usually takes less than 0.01 s."""
MOST_LATE = 2
LATE_NICE = 19
_late: set[threading.Thread] = set()
"""The threads whose job was given up. A late one may have ended."""


class Structures:
    """Bounds the structures of one ``LLMEngine``. Make it before the engine's first request."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._checks = _Threads(1)
        self._compilers = _Threads((multiprocessing.cpu_count() + 1) // 2)  # as many as vLLM's own
        self._fillers = _Threads(min(max(multiprocessing.cpu_count() // 2, 1), 8))  # as many as vLLM's own
        manager = llm.engine_core.engine_core.structured_output_manager
        manager.executor.shutdown()
        manager.executor = self

    def check(self, sampling: SamplingParams) -> None:
        """Let vLLM check a request's parameters if they have a structure. Raises what vLLM raises, InvalidRequest."""
        if sampling.structured_outputs is None:
            return
        _refuse_if_late()
        config, tokenizer = self._llm.vllm_config, self._llm.get_tokenizer()
        arguments = config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer
        job = self._checks.begin(lambda: sampling.clone().verify(*arguments), CHECK_S)  # it writes into the structure
        if job.is_in_time():
            job.result()
        else:
            message = f"{PARAM}: it takes more than {CHECK_S:g} s to convert; give it fewer or smaller repetitions"
            raise InvalidRequest(message, param=PARAM, code="unprocessable_input")

    def submit(self, compiled: Callable[[Any], Any], request: Any) -> Future[Any]:
        """Compile the grammar of a request, in place of vLLM's executor."""

        def bounded() -> _Bounded:
            _refuse_if_late()
            return _Bounded(compiled(request), self._fillers)

        return self._compilers.begin(bounded, COMPILE_S)

    def shutdown(self, **_: bool) -> None:
        """Do nothing: the threads end with the process, because late ones would be waited for without end."""


def _are_many_late() -> bool:
    return sum(each.is_alive() for each in list(_late)) >= MOST_LATE


def _refuse_if_late() -> None:
    """Raise InvalidRequest while there are ``MOST_LATE`` late threads."""
    if _are_many_late():
        message = f"{PARAM}: {MOST_LATE} others that are too large are still being computed; try again later"
        raise InvalidRequest(message, param=PARAM, code="unprocessable_input")


class _Threads:
    """So many threads that carry out jobs, besides the late ones."""

    def __init__(self, count: int) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self.begun: set[_Job] = set()
        for _ in range(count):
            self.start()

    def begin(self, function: Callable[[], Any], limit_s: float, *, of_processor: bool = False) -> _Job:
        """Call a function in a thread. limit_s: seconds from its begin, of the clock or of the thread's processor."""
        job = _Job(function, self, limit_s, of_processor)
        self._jobs.put(job)
        return job

    def start(self) -> None:
        threading.Thread(target=self._run, name="structure", daemon=True).start()

    def _run(self) -> None:
        while self._jobs.get().run():
            pass
        _late.discard(threading.current_thread())


class _Job(Future[Any]):
    """What a function returns or raises; ``TimeoutError`` if ``done`` is asked after its time, which gives it up."""

    def __init__(self, function: Callable[[], Any], threads: _Threads, limit_s: float, of_processor: bool) -> None:
        super().__init__()
        self._function, self._threads = function, threads
        self._limit_s, self._of_processor = limit_s, of_processor
        self._is_late = False
        self._ends_at: float | None = None
        """When its time is over, on its thread's clock; None: no thread has begun with it."""

    def run(self) -> bool:
        """Call the function; return whether its thread is to go on with other jobs."""
        self._thread = threading.current_thread()
        of_thread = time.pthread_getcpuclockid(threading.get_ident())
        self._clock = of_thread if self._of_processor else time.CLOCK_MONOTONIC
        self._ends_at = time.clock_gettime(self._clock) + self._limit_s
        self._threads.begun.add(self)
        try:
            result, error = self._function(), None
        except Exception as raised:  # noqa: BLE001  # the engine's thread raises it
            result, error = None, raised
        self._threads.begun.discard(self)
        try:
            self.set_result(result) if error is None else self.set_exception(error)
        except InvalidStateError:  # it was given up
            return False
        return True

    def is_in_time(self) -> bool:
        """Wait for the job, and return whether it has not been given up."""
        while not self.done():
            with suppress(TimeoutError):
                self.exception(self._left_s())
        return not self._is_late

    def done(self) -> bool:
        if self._ends_at is None and not self._of_processor:  # the engine's thread waits for all masks
            for each in list(self._threads.begun):
                each.done()  # its request may have left, so that nothing else asks
        if not super().done() and self._left_s() <= 0:
            with suppress(InvalidStateError, ProcessLookupError):  # the job, or the thread, has just ended
                self.set_exception(TimeoutError())
                self._is_late = True
                _late.add(self._thread)
                self._threads.start()
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, LATE_NICE)
        return super().done()

    def _left_s(self) -> float:
        return self._limit_s if self._ends_at is None else self._ends_at - time.clock_gettime(self._clock)


class _Bounded:
    """A ``StructuredOutputGrammar`` of vLLM."""

    def __init__(self, grammar: Any, fillers: _Threads) -> None:
        self._grammar, self._fillers = grammar, fillers
        self._is_too_costly = False

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        row, made = bitmask[batch_index], bitmask[batch_index : batch_index + 1].clone()  # a late thread writes to it
        if not self._is_too_costly:
            limit_s = MASK_S / 10 if _are_many_late() else MASK_S  # of a batch, many may be too costly
            job = self._fillers.begin(lambda: self._grammar.fill_bitmask(made, 0), limit_s, of_processor=True)
            self._is_too_costly = not job.is_in_time()
        if self._is_too_costly:
            row.fill_(-1)
        else:
            job.result()
            row.copy_(made[0])

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return not self._is_too_costly and bool(self._grammar.accept_tokens(request_id, tokens))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return [] if self._is_too_costly else list(self._grammar.validate_tokens(tokens))

    def rollback(self, count: int) -> None:
        if not self._is_too_costly:  # a late thread uses the grammar
            self._grammar.rollback(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)
