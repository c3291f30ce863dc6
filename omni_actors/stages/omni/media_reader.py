"""Media are read beside the steps: one thread decodes sounds and pictures and makes features of them.

Rules
1. A request waits for its own media, and for those of requests before it; the steps wait for none.
2. ``take`` gives what was read to the engine's thread; only there a request enters the batch.
3. What is read for a request that is gone comes to its end and is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from omni_actors.stages.base import RequestId

__all__ = ["MediaReader"]

LOOK_UP_S = 0.01
"""How long a step without anything to compute waits for the reader: commands and chunks are not taken in meanwhile."""

T = TypeVar("T")


class MediaReader(ThreadPoolExecutor, Generic[T]):
    """All but the work itself is for the engine's thread."""

    def __init__(self) -> None:
        super().__init__(1, "reader")
        self._reading: dict[RequestId, Future[T]] = {}

    @property
    def pending(self) -> bool:
        """Whether ``take`` has something to give, or will have."""
        return bool(self._reading)

    def read(self, request_id: RequestId, work: Callable[[], T]) -> None:
        self._reading[request_id] = self.submit(work)

    def forget(self, request_id: RequestId) -> None:
        if reading := self._reading.pop(request_id, None):
            reading.cancel()

    def take(self) -> Iterator[tuple[RequestId, Future[T]]]:
        """What was read since the last call: each result is there, or is the exception that the work ended with."""
        for request_id, reading in list(self._reading.items()):
            if reading.done():
                del self._reading[request_id]
                yield request_id, reading

    def wait(self) -> None:
        """For a moment, until something more was read: where there is nothing else to do."""
        wait(self._reading.values(), LOOK_UP_S, FIRST_COMPLETED)

    def close(self) -> None:
        self.shutdown(wait=False, cancel_futures=True)
