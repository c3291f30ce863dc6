"""One system in a thread of its own, for callers that do not run trio.

Rules
1. One daemon thread runs trio and the system. Callers in other threads post functions to its event loop, and get the
   result as a ``concurrent.futures.Future``.
2. Cancelling such a future cancels its work. Every future settles: with the work's result or error, or with
   ``SystemClosed`` when the system has ended and its workers have been reaped.
3. Nothing is buffered here. An output that no caller asks for stays in the system, under the bounds of ``limits``.
4. The interpreter's exit closes every system that is still open. If the process ends otherwise, its workers end with
   it. A child made by ``os.fork`` has no such thread: there every call raises ``SystemClosed``.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import trio
from multiprocess import util

from omni_actors.errors import SystemClosed
from omni_actors.system import OmniSystem

T = TypeVar("T")


class Background:
    """A system that a thread opens, runs and closes.

    Args:
        opening: Returns ``OmniSystem.open(...)``. Called in the thread.

    Attributes:
        opened: The system, when it is open; or the exception that opening raised.
        ended: Settles when the thread has ended, and every worker has been reaped. It has the exception that ended an
            open system, if that was not ``stop``.
    """

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[OmniSystem]]) -> None:
        self.opened: Future[OmniSystem] = Future()
        self.ended: Future[None] = Future()
        self._opening = opening
        self._pid = os.getpid()
        self._lock = threading.RLock()
        """Protects the next two. Reentrant: a signal handler or the garbage collector may call ``stop`` anywhere."""
        self._token: trio.lowlevel.TrioToken | None = None
        self._stopped = False
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._pending: set[Future[Any]] = set()
        """Futures of work that has begun, or that was posted while the system closed. ``_run`` settles the rest."""
        self._thread = threading.Thread(target=self._run, name="omni-actors", daemon=True)
        _running.add(self)
        self._thread.start()

    # Called in any thread.

    def call(self, function: Callable[[OmniSystem], T]) -> T:
        """Run a synchronous function in the event loop, and wait for its result.

        Raises what the function raises, and SystemClosed.
        """
        if threading.current_thread() is self._thread:
            return function(self.opened.result())
        future: Future[T] = Future()
        self._post(partial(self._call, function, future))
        return future.result()

    def start(self, work: Callable[[OmniSystem], Awaitable[T]]) -> Future[T]:
        """Run an asynchronous function as a task of the event loop. Raises SystemClosed."""
        future: Future[T] = Future()
        self._post(partial(self._start, work, future))
        return future

    def stop(self) -> bool:
        """Begin to close the system, if that has not begun. Return whether ``ended`` will tell when it is done.

        In a process that was forked from the system's, this has no effect.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            self._stopped, token = True, self._token
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._scope.cancel)
        return True

    def _post(self, callback: Callable[[], object]) -> None:
        if os.getpid() != self._pid:
            raise SystemClosed(f"the system belongs to process {self._pid}, and this process was forked from it")
        if self._stopped or self._token is None:
            raise SystemClosed
        try:
            # In the caller's context: a trace continues the caller's current span.
            self._token.run_sync_soon(partial(copy_context().run, callback))
        except trio.RunFinishedError:
            raise SystemClosed from self.ended.exception()

    # Called in the thread.

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - passed on to the callers' threads
            failure = error
        _running.discard(self)
        closed = SystemClosed()
        closed.__cause__ = failure
        for future in list(self._pending):
            _settle(future, error=closed)
        if not self.opened.done():
            self.opened.set_exception(failure or closed)
            failure = None
        _settle(self.ended, error=failure)

    async def _serve(self) -> None:
        with self._scope:
            with self._lock:
                self._token = trio.lowlevel.current_trio_token()
                if self._stopped:
                    self._scope.cancel()
            async with self._opening() as system:
                await self._serve_calls(system)

    async def _serve_calls(self, system: OmniSystem) -> None:
        """Run the callers' work until ``stop``, which cancels it."""
        failure: BaseException | None = None
        system.metrics.read_through(lambda read: self.call(lambda _: read()))
        async with trio.open_nursery() as self._nursery:
            self.opened.set_result(system)
            try:
                await trio.sleep_forever()
            except BaseException as error:  # noqa: BLE001 - raised below, outside the nursery's exception group
                failure = error
            finally:
                self._nursery.cancel_scope.cancel()
                self._nursery = None
        if failure is not None:
            raise failure

    def _call(self, function: Callable[[OmniSystem], T], future: Future[T]) -> None:
        if self._nursery is None:
            self._pending.add(future)
            return
        try:
            _settle(future, function(self.opened.result()))
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            _settle(future, error=error)

    def _start(self, work: Callable[[OmniSystem], Awaitable[T]], future: Future[T]) -> None:
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if self._nursery is not None:
            self._nursery.start_soon(self._work, work, future)

    async def _work(self, work: Callable[[OmniSystem], Awaitable[T]], future: Future[T]) -> None:
        """Settle ``future`` with the outcome of ``work``. If the system closes meanwhile, ``_run`` settles it."""
        with trio.CancelScope() as scope:
            future.add_done_callback(partial(self._cancel, scope))
            try:
                result = await work(self.opened.result())
            except Exception as error:  # noqa: BLE001 - raised in the caller's thread
                _settle(future, error=error)
            else:
                _settle(future, result)

    def _cancel(self, scope: trio.CancelScope, future: Future[Any]) -> None:
        """Cancel the work of a future that was cancelled, in whatever thread."""
        token = self._token
        if future.cancelled() and token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(scope.cancel)


def _settle(future: Future[Any], result: Any = None, *, error: BaseException | None = None) -> None:
    """Give a future its result or error, unless its caller has cancelled it."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _forget_workers() -> None:
    """Keep multiprocess, in a forked child, from ending workers that are not its children."""
    atexit.unregister(util._exit_function)


_running: set[Background] = set()
os.register_at_fork(after_in_child=_forget_workers)


@atexit.register  # runs before the exit handler of multiprocess, which was registered earlier and kills workers
def _close_all() -> None:
    for background in list(_running):
        if background.stop():
            wait([background.ended])
