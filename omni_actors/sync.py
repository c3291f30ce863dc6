"""The blocking face of a system: for scripts, threads and notebooks.

>>> with Omni.open("echo") as omni:
...     for output in omni.generate("hello"):
...         print(output.stage, output.modality, output.delta)
first text hello

The system runs in a thread of its own (see ``background``). Any number of threads may use one ``Omni``. Ctrl-C ends a
call that waits, and aborts its request.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial, update_wrapper
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
R = TypeVar("R", bound=AsyncIterator[Output])


def _waiting(original: Callable[Concatenate[OmniSystem, P], Awaitable[T]]) -> Callable[Concatenate[Omni, P], T]:
    """Return the blocking method for an asynchronous method of ``OmniSystem``."""

    def method(omni: Omni, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return omni._wait(bind_call(original, *args, **kwargs))

    update_wrapper(method, original)
    return method


class Omni(Face):
    """A running pipeline, for callers that block. ``Omni.open`` starts one; it is also a context manager.

    The methods are those of ``OmniSystem``, and ``answer_all``. All of them raise SystemClosed after ``close``.
    """

    @classmethod
    @opens_with_signature_of(OmniSystem.open)
    def open(cls, *args: Any, **kwargs: Any) -> Omni:
        """Start a pipeline, and return when it is open. Interrupting it leaves nothing behind."""
        omni = cls(*args, **kwargs)
        try:
            omni.background.opened.result()
        except BaseException:
            omni.close()
            raise
        return omni

    def close(self) -> None:
        """Close the system, and return when every worker has been reaped. Later calls have no effect.

        What another thread waits for meanwhile raises SystemClosed. Raises the exception that ended the system before,
        if there was one.
        """
        if self.background.stop():
            self.background.ended.result()

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def generate(
        self, /, prompt: Prompt | AsyncIterable[str] | None = None, *, n: None = None, **arguments: Any
    ) -> Generation: ...

    @overload
    def generate(self, /, prompt: Sequence[Prompt], **arguments: Any) -> Generations: ...

    @overload
    def generate(self, /, prompt: Prompt | None = None, *, n: int, **arguments: Any) -> Generations: ...

    @signature_of(GENERATE)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Submit a request. It returns at once; reading the returned object reads the answer."""
        inner = self.submit_in_background(GENERATE, *args, **kwargs)
        return Generations(self, inner) if isinstance(inner, generations.Generations) else Generation(self, inner)

    @signature_of(OmniSystem.submit)
    def submit(self, *args: Any, **kwargs: Any) -> Generation:
        """Submit a request for a pipeline of your own."""
        return Generation(self, self.submit_in_background(OmniSystem.submit, *args, **kwargs))

    @signature_of(OmniSystem.map)
    def map(self, prompts: Iterable[Prompt], **arguments: Any) -> Answers:
        """Answer many prompts. The returned iterator is a block too; without one, dropping it aborts what runs.

        The prompts are taken in the thread of the caller.
        """
        return Answers(self, prompts, **arguments)

    def answer_all(self, prompts: Iterable[Prompt], *, progress: bool = True, **arguments: Any) -> list[Answer]:
        """Answer a list of prompts, and return the answers in the order of the prompts.

        Args:
            prompts: Questions, conversations or raw prompts.
            progress: Whether to show a progress bar on standard error, where that is a terminal or a notebook.
            arguments: Those of ``map``: concurrency, keep_errors, modalities, max_tokens, …

        Raises what the loop over ``map`` raises; the requests that are not complete are then aborted.
        """
        asked = list(prompts)
        bar, text = BarColumn(), TextColumn("answers")
        columns = (text, bar, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with (
            Progress(*columns, console=Console(stderr=True), disable=not progress) as shown,
            self.map(asked, **arguments) as answers,
        ):
            return sorted(shown.track(answers, total=len(asked)), key=lambda answer: answer.index)

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

    def _wait(self, work: Callable[[OmniSystem], Awaitable[T]]) -> T:
        future = self.background.start(work)
        try:
            return future.result()
        finally:
            future.cancel()  # has an effect only if the wait was interrupted


class _Reader(Iterator[Output], Generic[R]):
    """What readers of one answer and of several have in common."""

    _face: Face
    _inner: R

    @abstractmethod
    def abort(self) -> None: ...

    def __next__(self) -> Output:
        try:
            return self._read(self._inner.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def _read(self, read: Callable[[], Awaitable[T]]) -> T:
        try:
            return self._face.background.start(lambda _: read()).result()
        except Exception:
            raise
        except BaseException:  # interrupted
            self.abort()
            raise


class Generation(FaceGeneration, _Reader[generation.Generation]):
    """The answer to one request, as an iterator of ``Output``. See ``generation.Generation``.

    Iteration raises the ``RequestError`` that ended the request. Dropping the object, for instance by leaving the loop
    early, aborts the request. An interrupted read (Ctrl-C) aborts it too.
    """

    @signature_of(generation.Generation.collect)
    def collect(self) -> Answer:
        """Read the rest of the answer and return it."""
        return self._read(self._inner.collect)

    @signature_of(generation.Generation.text)
    def text(self) -> str:
        """Read the rest of the answer and return its text."""
        return self._read(self._inner.text)

    @signature_of(generation.Generation.audio)
    def audio(self) -> AudioChunk | None:
        """Read the rest of the answer and return its sound."""
        return self._read(self._inner.audio)

    @signature_of(generation.Generation.picture)
    def picture(self) -> Picture | None:
        """Read the rest of the answer and return its first finished picture."""
        return self._read(self._inner.picture)

    @signature_of(generation.Generation.pictures)
    def pictures(self) -> tuple[Picture, ...]:
        """Read the rest of the answer and return its finished pictures."""
        return self._read(self._inner.pictures)

    @signature_of(generation.Generation.save)
    def save(self, path: str | Path) -> AudioChunk | Picture | None:
        """Read the rest of the answer and write its sound, as it arrives, or its first picture to a file."""
        return self._read(lambda: self._inner.save(path))


class Generations(FaceGenerations, _Reader[generations.Generations]):
    """The answers to a list of prompts, as an iterator of their outputs. See ``generations.Generations``."""

    @signature_of(generations.Generations.collect)
    def collect(self, **arguments: Any) -> list[Answer]:
        """Read the rest of every answer, and return them in the order of the prompts."""
        return self._read(partial(self._inner.collect, **arguments))


class Answers(Iterator[Answer]):
    """The answers of ``Omni.map``, in the order in which they are complete: an iterator, and a context manager."""

    def __init__(self, omni: Omni, prompts: Iterable[Prompt], **arguments: Any) -> None:
        self._complete: SimpleQueue[Future[Answer]] = SimpleQueue()
        self._reading = threading.RLock()
        """Held while a thread takes an answer: one that waited beside it would wait for good behind the last answer."""
        self._answering = FaceMap(omni, prompts, announce=self._complete.put, **arguments)

    def __next__(self) -> Answer:
        try:
            with self._reading:
                if self._answering.fill():
                    return self._answering.take(self._complete.get())
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Abort the requests that are not complete."""
        self._answering.close()

    def __enter__(self) -> Answers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
