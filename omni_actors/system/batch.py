"""Many requests with bounded concurrency."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio

from omni_actors.errors import InvalidRequest, Overloaded, RequestError, TemporarilyRefused
from omni_actors.generation import Generation
from omni_actors.generations import Generations
from omni_actors.outputs import Answer

ATTEMPTS = 60
"""How often a request is sent that a stage refuses for now, a second or more apart: a reason such as other weights in
one of two stages may last."""


def checked_concurrency(given: Any, most: int) -> int:
    """Return how many requests ``map`` makes at a time. given: None means ``most``. Raises InvalidRequest."""
    if given is None:
        return most
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        message = f"concurrency: expected an integer from 1 on, found {given!r:.200}"
        raise InvalidRequest(message, param="concurrency")
    return min(given, most)


@asynccontextmanager
async def answers(
    submit: Callable[[Any], Generation | Generations], prompts: Iterable[Any], concurrency: int, *, keep_errors: bool
) -> AsyncIterator[AsyncIterator[Answer]]:
    """Yield an iterator over the answers to ``prompts``, in the order in which they are complete.

    At most ``concurrency`` requests run at a time. An answer that is complete waits for the caller and occupies one
    task, so a slow caller bounds the memory too. Leaving the block aborts the requests that are not complete.
    """
    numbered = enumerate(prompts)  # shared: a task that is done takes the next prompt
    send, receive = trio.open_memory_channel[Answer](0)
    failure: BaseException | None = None  # raised outside the nursery, so that no exception group wraps it

    async def work(own_end: trio.MemorySendChannel[Answer]) -> None:
        nonlocal failure
        try:
            async with own_end:
                for index, prompt in numbered:
                    await own_end.send(await answer(submit, prompt, index))
        except Exception as error:  # noqa: BLE001 - a wrong argument, or an iterator of prompts that raises
            failure = failure or error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        async with send:
            for _ in range(concurrency):
                nursery.start_soon(work, send.clone())
        try:
            yield _Received(receive, keep_errors=keep_errors)
        except BaseException as error:  # noqa: BLE001
            failure = failure or error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class _Received(AsyncIterator[Answer]):
    """The answers that have arrived. No generator: a caller that breaks off its loop would have to close it."""

    def __init__(self, receive: trio.MemoryReceiveChannel[Answer], *, keep_errors: bool) -> None:
        self._receive, self._keep_errors = receive, keep_errors

    async def __anext__(self) -> Answer:
        complete = await anext(self._receive)
        if complete.error is not None and not self._keep_errors:
            raise complete.error
        return complete


async def answer(submit: Callable[[Any], Generation | Generations], prompt: Any, index: int) -> Answer:
    """Return the answer to one prompt, with its ``index`` and, if the request failed, its error.

    It waits while the system is full, and tries again when a stage refuses the request for now, ``ATTEMPTS`` times in
    all. Cancellation aborts the request. Raises what ``submit`` raises, but for a RequestError.
    """
    refusals = 0
    while True:
        try:
            generation = submit(prompt)
            if isinstance(generation, Generations):
                generation.abort()
                raise TypeError("map makes one answer to each prompt: no list of prompts was expected, and no n")
            collected = await generation.collect()
        except Overloaded as error:  # by requests of other callers, or by control messages that are still unread
            await trio.sleep(error.retry_after_s)
        except RequestError as error:
            error.index = index
            refusals += isinstance(error, TemporarilyRefused)
            if not isinstance(error, TemporarilyRefused) or refusals == ATTEMPTS:
                return Answer(index=index, error=error)
            await trio.sleep(error.retry_after_s)
        else:
            return msgspec.structs.replace(collected, index=index)
