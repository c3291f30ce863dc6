"""What the blocking face (``sync``) and the asyncio face (``aio``) of a system have in common.

A face offers the methods of ``OmniSystem`` under the same names, with the same arguments. The signature and the
documentation of the arguments are those of ``OmniSystem``: see ``signature_of``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from omni_actors.background import Background
from omni_actors.config import Pipeline
from omni_actors.errors import StageFailed, SystemClosed
from omni_actors.generation import Generation
from omni_actors.generations import Generations
from omni_actors.iterators import for_trio
from omni_actors.metrics import Metrics
from omni_actors.outputs import Answer
from omni_actors.system import Freed, Health, OmniSystem, batch

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


GENERATE: Any = OmniSystem.generate
"""Without its types, because a face types its overloads itself."""


def signature_of(
    original: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[Concatenate[S, ...], R]], Callable[Concatenate[S, P], R]]:
    """Decorate a method of a face: it takes the arguments of ``original``, and its documentation includes theirs."""

    def decorate(method: Callable[Concatenate[S, ...], R]) -> Callable[Concatenate[S, P], R]:
        _document(method, original)
        return method

    return decorate


def opens_with_signature_of(
    original: Callable[P, object],
) -> Callable[[Callable[Concatenate[type[S], ...], R]], Callable[Concatenate[type[S], P], R]]:
    """Decorate the class method of a face that takes the arguments of ``original``, a class method."""

    def decorate(method: Callable[Concatenate[type[S], ...], R]) -> Callable[Concatenate[type[S], P], R]:
        _document(method, original)
        return method

    return decorate


def bind_call(
    original: Callable[Concatenate[OmniSystem, P], R], *args: P.args, **kwargs: P.kwargs
) -> Callable[[OmniSystem], R]:
    """Return a call of a method of ``OmniSystem`` without its system.

    What iterators among the arguments yield is taken now, in the thread of the caller: they may use the system.
    """
    call: Callable[..., R] = original
    taken, named = [_taken(each) for each in args], {name: _taken(each) for name, each in kwargs.items()}
    return lambda system: call(system, *taken, **named)


def _taken(argument: Any) -> Any:
    return list(argument) if isinstance(argument, Iterator) else argument


def sync_method(original: Callable[Concatenate[OmniSystem, P], R]) -> Callable[Concatenate[Face, P], R]:
    """Return the method of a face for a synchronous method of ``OmniSystem``."""

    def method(face: Face, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return face.background.call(bind_call(original, *args, **kwargs))

    functools.update_wrapper(method, original)
    return method


def _document(method: Callable[..., object], original: Callable[..., object]) -> None:
    signature, own = inspect.signature(original), inspect.signature(method)
    parameters = list(signature.parameters.values())
    if inspect.ismethod(original):  # a class method: its ``cls`` is bound
        parameters.insert(0, next(iter(own.parameters.values())))
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=own.return_annotation
    )
    described = inspect.cleandoc(original.__doc__ or "").partition(">>>")[0].rstrip()
    method.__doc__ = f"{inspect.getdoc(method)}\n\nAs ``{original.__qualname__}``:\n\n{described}"


class Face:
    """A system in the background, and the methods that neither face waits in for the models.

    Each call waits for the system's event loop, typically a tenth of a millisecond. It may be made in any thread, and
    raises SystemClosed after the end of the system. Dropping the last reference to the face and its generations closes
    the system.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Begin to open a system. The arguments are those of ``OmniSystem.open``."""
        self.background = Background(partial(OmniSystem.open, *args, **kwargs))
        weakref.finalize(self, self.background.stop).atexit = False

    def submit_in_background(
        self, submit: Callable[Concatenate[OmniSystem, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return what a method of ``OmniSystem`` returns.

        Iterators of segments are read in threads, or in the caller's event loop (see ``iterators``).
        """
        ask: Callable[..., R] = submit
        replaced, named = [for_trio(each) for each in args], {name: for_trio(each) for name, each in kwargs.items()}
        return self.background.call(lambda system: ask(system, *replaced, **named))

    @signature_of(OmniSystem.abort)
    def abort(self, *args: Any, **kwargs: Any) -> FaceAbort:
        """End requests now."""
        return FaceAbort(self, self.background.call(bind_call(OmniSystem.abort, *args, **kwargs)))

    abort_all = sync_method(OmniSystem.abort_all)
    drop_desired = sync_method(OmniSystem.drop_desired)
    make_room = sync_method(OmniSystem.make_room)
    live_state = sync_method(OmniSystem.live_state)
    list_loras = sync_method(OmniSystem.list_loras)

    @signature_of(OmniSystem.health)
    def health(self) -> Health:
        """Return the state of the system."""
        return self.background.call(OmniSystem.health)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that runs, with every default."""
        return self.background.opened.result().pipeline

    @property
    def metrics(self) -> Metrics:
        """The system's metrics. They may be read in any thread."""
        return self.background.opened.result().metrics

    @property
    def is_running(self) -> bool:
        """Whether the system is open and not ``errored``."""
        try:
            return self.background.call(lambda system: system.is_running)
        except SystemClosed:
            return False

    @property
    def is_stopped(self) -> bool:
        """Whether the system was closed, or shut down."""
        try:
            return self.background.call(lambda system: system.is_stopped)
        except SystemClosed:
            return True

    @property
    def model_config(self) -> Mapping[str, Mapping[str, Any]]:
        """As ``OmniSystem.model_config``."""
        return self.background.opened.result().model_config

    @property
    def errored(self) -> bool:
        """As ``OmniSystem.errored``."""
        return self.background.call(lambda system: system.errored)

    @property
    def dead_error(self) -> StageFailed | None:
        """As ``OmniSystem.dead_error``."""
        return self.background.call(lambda system: system.dead_error)

    @property
    def is_tracing_enabled(self) -> bool:
        """As ``OmniSystem.is_tracing_enabled``."""
        return self.background.call(lambda system: system.is_tracing_enabled)

    @property
    def in_flight(self) -> int:
        """As ``OmniSystem.in_flight``."""
        return self.background.call(lambda system: system.in_flight)

    @property
    def retry_after_s(self) -> float:
        """As ``OmniSystem.retry_after_s``."""
        return self.background.call(lambda system: system.retry_after_s)

    @property
    def descriptors(self) -> int:
        """As ``OmniSystem.descriptors``."""
        return self.background.call(lambda system: system.descriptors)


class FaceAbort(Awaitable[Freed]):
    """Requests that were aborted. ``result``, or awaiting it, waits until they are freed; neither is needed."""

    def __init__(self, face: Face, inner: Awaitable[Freed]) -> None:
        self._face, self._inner = face, inner

    def result(self) -> Freed:
        """Wait until the workers have freed the requests, and return what was freed."""
        return self._face.background.start(self._wait).result()

    def __await__(self) -> Generator[Any, None, Freed]:
        """As ``result``, in asyncio."""
        return asyncio.wrap_future(self._face.background.start(self._wait)).__await__()

    async def _wait(self, _: OmniSystem) -> Freed:
        return await self._inner


class FaceGeneration:
    """A request of a face: what its ``Generation`` in the background is to the callers of the face."""

    def __init__(self, face: Face, inner: Generation) -> None:
        self._face, self._inner = face, inner
        """face: kept, because dropping it closes the system."""

    @property
    def request_id(self) -> str:
        """The request's identifier, as ``abort`` of the face takes it."""
        return self._inner.request_id

    @signature_of(Generation.abort)
    def abort(self) -> None:
        """End the request now, in every stage; reading it then raises ``Aborted``."""
        with suppress(SystemClosed):  # then it has ended
            self._face.background.call(lambda _: self._inner.abort())


class FaceGenerations:
    """The requests that a face made of a list of prompts, or of one with ``n``."""

    def __init__(self, face: Face, inner: Generations) -> None:
        self._face, self._inner = face, inner

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The identifier of each request, as ``abort`` of the face takes it."""
        return self._inner.request_ids

    @signature_of(Generations.abort)
    def abort(self) -> None:
        """End every request now, in every stage; reading then raises ``Aborted`` for each."""
        with suppress(SystemClosed):  # then they have ended
            self._face.background.call(lambda _: self._inner.abort())


class FaceMap:
    """The requests of one ``map``: at most ``concurrency`` run, or are complete and wait for the caller.

    The prompts are taken in the caller's thread, so that an iterable that waits does not stop the system. Dropping the
    object closes it.

    Args:
        announce: Called with the future of each answer that is complete, in any thread. It must not refer to this
            object.
    """

    def __init__(
        self,
        face: Face,
        prompts: Iterable[Any],
        *,
        announce: Callable[[Future[Answer]], object],
        concurrency: int | None = None,
        keep_errors: bool = False,
        **arguments: Any,
    ) -> None:
        most = face.pipeline.limits.max_requests
        self._face, self._announce, self._keep_errors, self._arguments = face, announce, keep_errors, arguments
        self._concurrency = batch.checked_concurrency(concurrency, most)
        self._numbered: Iterator[tuple[int, Any]] = enumerate(prompts)
        self._failure: Exception | None = None
        """What the prompts raised behind an answer that was complete. The next ``fill`` raises it."""
        self._futures: set[Future[Answer]] = set()

    def fill(self) -> bool:
        """Start as many prompts as there is room for. Return whether there is an answer to wait for.

        Raises what the prompts raise, and SystemClosed.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        for index, prompt in islice(self._numbered, self._concurrency - len(self._futures)):
            future = self._face.background.start(partial(_answer, prompt, index, self._arguments))
            self._futures.add(future)
            future.add_done_callback(self._announce)
        return bool(self._futures)

    def take(self, future: Future[Answer]) -> Answer:
        """Return an answer, after its place was given to the next prompt. Raises what the loop over ``map`` raises.

        The answer is returned also if taking that prompt fails.
        """
        self._futures.discard(future)
        answer = future.result()
        if answer.error is not None and not self._keep_errors:
            raise answer.error
        try:
            self.fill()
        except Exception as error:  # noqa: BLE001 - raised by the next ``fill``
            self._failure = error.with_traceback(_of_caller(error.__traceback__))
        return answer

    def close(self) -> None:
        """Abort the requests that are not complete, and take no more prompts."""
        self._numbered, self._failure = iter(()), None
        while self._futures:
            self._futures.pop().cancel()

    def __del__(self) -> None:
        if hasattr(self, "_futures"):  # the prompts are iterable
            self.close()


def _of_caller(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of ``take``'s traceback that is below ``fill``: the frames of both refer to the object."""
    for _ in ("take", "fill"):
        traceback = traceback and traceback.tb_next
    return traceback


def _answer(prompt: Any, index: int, arguments: Mapping[str, Any], system: OmniSystem) -> Awaitable[Answer]:
    return batch.answer(partial(system.generate, **arguments), prompt, index)
