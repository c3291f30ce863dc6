"""A thread that decodes media and computes their features while the engine's steps go on.

Rules
1. A request waits for its own media and for those of earlier requests. No step waits for media.
2. ``take`` returns results in the engine's thread. Requests enter the batch only there.
3. The work for a request that ended meanwhile runs to its end, and its result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from omni_actors.stages.base import RequestId

LONGEST_WAIT_S = 0.01
"""Seconds. The engine takes in no chunks meanwhile."""


class MediaThread(ThreadPoolExecutor):
    """Runs one piece of work per request in a thread of its own. The engine's thread calls all methods."""

    def __init__(self) -> None:
        super().__init__(1, "media")
        self._futures: dict[RequestId, Future[Any]] = {}

    @property
    def pending(self) -> bool:
        """Whether a result waits to be taken or is still being computed."""
        return bool(self._futures)

    def begin(self, request_id: RequestId, work: Callable[[], Any]) -> None:
        """Run ``work`` in the thread, after the work of earlier requests."""
        self._futures[request_id] = self.submit(work)

    def forget(self, request_id: RequestId) -> None:
        """Drop the work of a request, and its result. Does nothing if there is none."""
        if future := self._futures.pop(request_id, None):
            future.cancel()

    def take(self) -> Iterator[tuple[RequestId, Future[Any]]]:
        """Yield the requests whose work has ended since the last call, each with its result or exception."""
        for request_id, future in list(self._futures.items()):
            if future.done():
                del self._futures[request_id]
                yield request_id, future

    def wait(self) -> None:
        """Wait until a result is there, ``LONGEST_WAIT_S`` at most. For a step that has nothing else to do."""
        wait(self._futures.values(), LONGEST_WAIT_S, FIRST_COMPLETED)

    def close(self) -> None:
        """Drop all work that has not begun. Does not wait for the thread."""
        self.shutdown(wait=False, cancel_futures=True)
