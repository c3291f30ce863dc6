"""The asyncio face of a system: for services and notebooks that run asyncio.

>>> async def main():
...     async with AsyncOmni.open("echo") as omni:
...         async for output in omni.generate("hello"):
...             print(output.stage, output.modality, output.delta)
>>> asyncio.run(main())
first text hello

The system runs in a thread of its own (see ``background``); any event loop may use it. Cancellation passes in both
directions: cancelling a task that reads an answer aborts its request in every stage, and the end of a request, or of
the system, is raised in the task that waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from omni_actors import generation, generations
from omni_actors.face import (
    GENERATE,
    Face,
    FaceGeneration,
    FaceGenerations,
    FaceMap,
    bind_call,
    opens_with_signature_of,
    signature_of,
)
from omni_actors.outputs import Answer, AudioChunk, Output, Picture
from omni_actors.prompts import Prompt
from omni_actors.system import OmniSystem

P = ParamSpec("P")
T = TypeVar("T")


def _waiting(
    original: Callable[Concatenate[OmniSystem, P], Awaitable[T]],
) -> Callable[Concatenate[AsyncOmni, P], Coroutine[Any, Any, T]]:
    """Return the asyncio method for an asynchronous method of ``OmniSystem``."""

    async def method(omni: AsyncOmni, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await omni._wait(bind_call(original, *args, **kwargs))

    update_wrapper(method, original)
    return method


class AsyncOmni(Face):
    """A running pipeline, for asyncio. ``AsyncOmni.open`` starts one.

    The methods are those of ``OmniSystem``. All of them raise SystemClosed after ``close``. Those that are not
    coroutines block the event loop for one turn of the system's: typically a tenth of a millisecond.
    """

    @classmethod
    @opens_with_signature_of(OmniSystem.open)
    def open(cls, *args: Any, **kwargs: Any) -> Opening:
        """Start a pipeline: ``async with AsyncOmni.open(…) as omni``, or ``omni = await AsyncOmni.open(…)``.

        Cancelling the wait leaves nothing behind.
        """
        return Opening(partial(cls, *args, **kwargs))

    async def close(self) -> None:
        """Close the system, and return when every worker has been reaped. Later calls have no effect.

        What another task waits for meanwhile raises SystemClosed. The system closes also if this wait is cancelled.
        Raises the exception that ended the system before, if there was one.
        """
        if self.background.stop():
            await _settled(self.background.ended)

    @overload
    def generate(
        self, /, prompt: Prompt | AsyncIterable[str] | None = None, *, n: None = None, **arguments: Any
    ) -> AsyncGeneration: ...

    @overload
    def generate(self, /, prompt: Sequence[Prompt], **arguments: Any) -> AsyncGenerations: ...

    @overload
    def generate(self, /, prompt: Prompt | None = None, *, n: int, **arguments: Any) -> AsyncGenerations: ...

    @signature_of(GENERATE)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Submit a request. It returns at once; reading the returned object reads the answer."""
        inner = self.submit_in_background(GENERATE, *args, **kwargs)
        if isinstance(inner, generations.Generations):
            return AsyncGenerations(self, inner)
        return AsyncGeneration(self, inner)

    @signature_of(OmniSystem.submit)
    def submit(self, *args: Any, **kwargs: Any) -> AsyncGeneration:
        """Submit a request for a pipeline of your own."""
        return AsyncGeneration(self, self.submit_in_background(OmniSystem.submit, *args, **kwargs))

    @signature_of(OmniSystem.map)
    def map(self, prompts: Iterable[Prompt], **arguments: Any) -> AsyncAnswers:
        """Answer many prompts. The returned iterator is a block too; without one, dropping it aborts what runs.

        The prompts are taken in the thread of the event loop.
        """
        return AsyncAnswers(self, prompts, **arguments)

    check_health = _waiting(OmniSystem.check_health)
    wait_ready = _waiting(OmniSystem.wait_ready)
    wait_changed = _waiting(OmniSystem.wait_changed)
    call = _waiting(OmniSystem.call)
    set_desired = _waiting(OmniSystem.set_desired)
    add_lora = _waiting(OmniSystem.add_lora)
    encode = _waiting(OmniSystem.encode)
    tokenize = _waiting(OmniSystem.tokenize)
    detokenize = _waiting(OmniSystem.detokenize)
    remove_lora = _waiting(OmniSystem.remove_lora)
    pin_lora = _waiting(OmniSystem.pin_lora)
    pause_generation = _waiting(OmniSystem.pause_generation)
    resume_generation = _waiting(OmniSystem.resume_generation)
    is_paused = _waiting(OmniSystem.is_paused)
    get_weight_version = _waiting(OmniSystem.get_weight_version)
    collective_rpc = _waiting(OmniSystem.collective_rpc)
    reset_prefix_cache = _waiting(OmniSystem.reset_prefix_cache)
    reset_mm_cache = _waiting(OmniSystem.reset_mm_cache)
    reset_encoder_cache = _waiting(OmniSystem.reset_encoder_cache)
    scale = _waiting(OmniSystem.scale)
    sleep = _waiting(OmniSystem.sleep)
    wake_up = _waiting(OmniSystem.wake_up)
    is_sleeping = _waiting(OmniSystem.is_sleeping)
    get_tokenizer = _waiting(OmniSystem.get_tokenizer)
    get_supported_tasks = _waiting(OmniSystem.get_supported_tasks)
    do_log_stats = _waiting(OmniSystem.do_log_stats)
    start_profile = _waiting(OmniSystem.start_profile)
    stop_profile = _waiting(OmniSystem.stop_profile)
    shutdown = _waiting(OmniSystem.shutdown)
    start_weight_update = _waiting(OmniSystem.start_weight_update)
    update_weights = _waiting(OmniSystem.update_weights)
    finish_weight_update = _waiting(OmniSystem.finish_weight_update)

    async def _wait(self, work: Callable[[OmniSystem], Awaitable[T]]) -> T:
        return await asyncio.wrap_future(self.background.start(work))


class Opening:
    """The opening of a system: await it once, or use it as a block."""

    def __init__(self, begin: Callable[[], AsyncOmni]) -> None:
        self._begin = begin

    def __await__(self) -> Generator[Any, None, AsyncOmni]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> AsyncOmni:
        self._omni = self._begin()
        try:
            await _settled(self._omni.background.opened)
        except BaseException:
            await self._omni.close()
            raise
        return self._omni

    async def __aexit__(self, *_: object) -> None:
        await self._omni.close()


class AsyncGeneration(FaceGeneration, AsyncIterator[Output]):
    """The answer to one request, as an asynchronous iterator of ``Output``. See ``generation.Generation``.

    Iteration raises the ``RequestError`` that ended the request. Dropping the object, for instance by leaving the loop
    early, aborts the request; so does cancelling a task that reads it. (To wait for an output for a limited time, put
    ``asyncio.shield`` around the read.)
    """

    async def __anext__(self) -> Output:
        return await self._read(self._inner.__anext__)

    @signature_of(generation.Generation.collect)
    async def collect(self) -> Answer:
        """Read the rest of the answer and return it."""
        return await self._read(self._inner.collect)

    @signature_of(generation.Generation.text)
    async def text(self) -> str:
        """Read the rest of the answer and return its text."""
        return await self._read(self._inner.text)

    @signature_of(generation.Generation.audio)
    async def audio(self) -> AudioChunk | None:
        """Read the rest of the answer and return its sound."""
        return await self._read(self._inner.audio)

    @signature_of(generation.Generation.picture)
    async def picture(self) -> Picture | None:
        """Read the rest of the answer and return its first finished picture."""
        return await self._read(self._inner.picture)

    @signature_of(generation.Generation.pictures)
    async def pictures(self) -> tuple[Picture, ...]:
        """Read the rest of the answer and return its finished pictures."""
        return await self._read(self._inner.pictures)

    @signature_of(generation.Generation.save)
    async def save(self, path: str | Path) -> AudioChunk | Picture | None:
        """Read the rest of the answer and write its sound, as it arrives, or its first picture to a file."""
        return await self._read(lambda: self._inner.save(path))

    async def _read(self, read: Callable[[], Awaitable[T]]) -> T:
        return await _read(self, self._face, read)


async def _read(reading: FaceGeneration | FaceGenerations, face: Face, read: Callable[[], Awaitable[T]]) -> T:
    try:
        return await asyncio.wrap_future(face.background.start(lambda _: read()))
    except asyncio.CancelledError:
        reading.abort()
        raise


class AsyncGenerations(FaceGenerations, AsyncIterator[Output]):
    """The answers to a list of prompts, as an asynchronous iterator of outputs. See ``generations.Generations``."""

    async def __anext__(self) -> Output:
        return await _read(self, self._face, self._inner.__anext__)

    @signature_of(generations.Generations.collect)
    async def collect(self, **arguments: Any) -> list[Answer]:
        """Read the rest of every answer, and return them in the order of the prompts."""
        return await _read(self, self._face, partial(self._inner.collect, **arguments))


class AsyncAnswers(AsyncIterator[Answer]):
    """The answers of ``AsyncOmni.map``, in the order in which they are complete: an iterator, and a block."""

    def __init__(self, omni: AsyncOmni, prompts: Iterable[Prompt], **arguments: Any) -> None:
        self._complete: asyncio.Queue[Future[Answer]] = asyncio.Queue()
        self._reading = asyncio.Lock()
        """Held while a task takes an answer: one that waited beside it would wait for good behind the last answer."""
        announce = partial(_put, asyncio.get_running_loop(), self._complete)
        self._answering = FaceMap(omni, prompts, announce=announce, **arguments)

    async def __anext__(self) -> Answer:
        try:
            async with self._reading:
                if self._answering.fill():
                    return self._answering.take(await self._complete.get())
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort the requests that are not complete."""
        self._answering.close()

    async def __aenter__(self) -> AsyncAnswers:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def _settled(future: Future[T]) -> T:
    """Wait for a future that several callers wait for: cancelling the wait leaves it alone."""
    settled = asyncio.wrap_future(future)
    settled.add_done_callback(lambda each: each.cancelled() or each.exception())  # a cancelled wait does not ask for it
    return await asyncio.shield(settled)


def _put(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Future[Answer]], future: Future[Answer]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and its tasks with it
        loop.call_soon_threadsafe(queue.put_nowait, future)
