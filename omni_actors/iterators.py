"""Iterators of other threads and event loops, as asynchronous iterators for trio.

The faces replace the iterators in the arguments of a caller by these (see ``for_trio``).

Rules
1. Nothing is read ahead: the next segment is asked for when the system wants it.
2. ``aclose`` returns at once. The caller's iterator is closed where it runs: in a thread, or in its event loop.
3. What an iterator raises is raised to the system. What it raises when it is closed is printed by its own side.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import traceback
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import trio

from omni_actors.errors import InvalidRequest

_ENDED = object()


def for_trio(argument: Any) -> Any:
    """Return an argument with iterators that trio can read: itself, the values of a mapping, the last item of a list.

    An asynchronous iterator is read by a task of the running event loop, any other iterator by a thread.
    Raises InvalidRequest for an asynchronous iterator where no event loop of asyncio runs.
    """
    if isinstance(argument, Iterator):
        return InThread(argument)
    if isinstance(argument, AsyncIterable):
        try:
            return InEventLoop(argument, asyncio.get_running_loop())
        except RuntimeError as error:
            raise InvalidRequest("an asynchronous iterator can be read only where asyncio runs") from error
    if isinstance(argument, Mapping):
        replaced = {key: for_trio(value) for key, value in argument.items()}
        return replaced if any(replaced[key] is not value for key, value in argument.items()) else argument
    if isinstance(argument, list | tuple) and argument:
        last = for_trio(argument[-1])
        return argument if last is argument[-1] else [*argument[:-1], last]
    return argument


class InThread(AsyncIterator[Any]):
    """An iterator that may block. Each segment is taken in a thread, one at a time."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._limiter = trio.CapacityLimiter(1)  # not the system's threads: an iterator may block for long
        self._lock = threading.Lock()
        """Held while the iterator runs."""
        self._closed = False

    async def __anext__(self) -> Any:
        segment = await trio.to_thread.run_sync(self._next, abandon_on_cancel=True, limiter=self._limiter)
        if segment is _ENDED:
            raise StopAsyncIteration
        return segment

    async def aclose(self) -> None:
        self._closed = True
        trio.lowlevel.start_thread_soon(self._close, lambda _: None)

    def _next(self) -> Any:
        with self._lock:
            try:
                return _ENDED if self._closed else next(self._iterator, _ENDED)
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(error, StopAsyncIteration):
                    raise
                # SystemExit would end the system, for all callers, and StopAsyncIteration the input, without a word.
                raise RuntimeError(f"the iterator raised {type(error).__name__}: {error}") from error

    def _close(self) -> None:
        """Close a generator, once it does not run."""
        with self._lock:
            try:
                if (close := getattr(self._iterator, "close", None)) is not None:
                    close()
            except Exception:  # noqa: BLE001 - the request has ended
                traceback.print_exc()


class InEventLoop(AsyncIterator[Any]):
    """An asynchronous iterator of asyncio. One task of its event loop reads and closes it, in the caller's context."""

    def __init__(self, segments: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._segments, self._loop, self._context = segments, loop, contextvars.copy_context()
        self._asked = asyncio.Event()
        """Set when the system wants a segment."""
        self._wanted: Future[Any] | None = None
        """The latest segment that the system wanted."""
        self._task: asyncio.Task[None] | None = None

    async def __anext__(self) -> Any:
        wanted: Future[Any] = Future()
        arrived, token = trio.Event(), trio.lowlevel.current_trio_token()
        wanted.add_done_callback(partial(_wake, token, arrived))
        self._loop.call_soon_threadsafe(self._want, wanted)
        await arrived.wait()
        segment = wanted.result()
        if segment is _ENDED:
            raise StopAsyncIteration
        return segment

    async def aclose(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and its tasks with it
            self._loop.call_soon_threadsafe(self._cancel)

    # In the event loop.

    def _want(self, wanted: Future[Any]) -> None:
        self._wanted = wanted
        self._asked.set()
        if self._task is None:
            self._task = self._loop.create_task(self._read(), context=self._context)
            self._task.add_done_callback(self._fail)
        elif self._task.done():
            self._fail()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _fail(self, _: object = None) -> None:
        """Handle that the task has ended: it gives no segment any more."""
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_exception(RuntimeError("the task that read the iterator was cancelled"))

    async def _next_wanted(self) -> Future[Any]:
        await self._asked.wait()
        self._asked.clear()
        assert self._wanted is not None, "it was asked for"
        return self._wanted

    async def _read(self) -> None:
        iterator, wanted = None, await self._next_wanted()
        try:
            iterator = aiter(self._segments)
            while (segment := await anext(iterator, _ENDED)) is not _ENDED:
                wanted.set_result(segment)
                wanted = await self._next_wanted()
            wanted.set_result(_ENDED)
        except Exception as error:  # noqa: BLE001 - raised to the system
            wanted.set_exception(error)
        finally:
            if (close := getattr(iterator, "aclose", None)) is not None:
                await close()


def _wake(token: trio.lowlevel.TrioToken, event: trio.Event, _: object) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(event.set)
