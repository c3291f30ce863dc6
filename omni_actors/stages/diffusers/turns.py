"""A function that runs in a thread of its own, and only while its caller waits for it.

A library that calls back in the middle of its work becomes a sequence of steps in this way.

Rules
1. Either the caller or the function computes, never both. So the function may use what the caller owns without a lock.
2. The function hands values over. After each one it waits until the caller calls ``advance`` again.
3. The thread ends when the function ends: by returning, by an exception (``advance`` raises it), or by ``cancel``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Cancelled(BaseException):
    """Ends the function in ``hand_over``. It is no ``Exception``, so that no library takes it for a failure."""


class Turns(Generic[T]):
    """A function that computes in a thread of its own, one value at a time, whenever ``advance`` is called.

    work: the function. Its argument ``hand_over`` takes a value, and returns when the function may go on.
    """

    def __init__(self, work: Callable[[Callable[[T], None]], T]) -> None:
        self.done = False
        """Whether the function has ended."""
        self._work: Callable[[Callable[[T], None]], T] | None = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._value: T | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)
        self._thread.start()

    def advance(self) -> T:
        """Let the function compute, and return the next value that it hands over, or returns when it is ``done``.

        Raises what the function raises, which is ``done`` then.
        """
        self._go.release()
        self._back.acquire()
        if self.done:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        value, self._value = self._value, None
        assert value is not None, "the function hands over a value"
        return value

    def cancel(self) -> None:
        """End the function where it waits, and return when its thread has ended. No other call follows."""
        self._cancelled = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if self._work is not None and not self._cancelled:
                self._value = self._work(self._hand_over)
        except Cancelled:
            self._value = None
        except BaseException as error:  # noqa: BLE001  # ``advance`` raises it
            self._error = error
        self._work = None  # and what the function holds
        self.done = True
        self._back.release()

    def _hand_over(self, value: T) -> None:
        self._value = value
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise Cancelled
