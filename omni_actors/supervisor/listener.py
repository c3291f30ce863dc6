"""The interface through which the supervisor reports events to the layer above."""

from __future__ import annotations

from typing import Protocol

from omni_actors.errors import StageFailed, WorkerExit
from omni_actors.protocol.messages import Address, RequestNotice


class ProtocolViolation(Exception):
    """A worker sent a notice that cannot follow what it sent before."""


class Listener(Protocol):
    """Receives the supervisor's events, in order. Its methods are plain calls and must not block."""

    def newest_request(self) -> int:
        """Return the highest request number given out so far: the fence of a new incarnation."""
        ...

    def on_worker_ready(self, address: Address) -> None:
        """A worker has loaded its engine and accepts work."""
        ...

    def was_standby(self, address: Address) -> bool:
        """Return whether a replica that has just died served no requests.

        It was a standby, or was loading to become one.
        """
        ...

    def on_worker_died(self, address: Address, exit: WorkerExit, failed_request: int | None) -> bool:
        """A worker has died: find the requests that may have caused it. ``on_worker_lost`` follows.

        Not called if no request is to blame: the supervisor stopped the worker, or its engine raised in a call.

        failed_request: the request for which the engine's call raised, if the worker could report it. Returns whether
        the death counts against the stage's restart intensity.
        """
        ...

    def on_worker_lost(self, address: Address, generation: int, exit: WorkerExit, at: float) -> int:
        """A worker has died, and all its messages and outputs have been delivered. Its rings are still open.

        at: when its death was noticed, on trio's clock. Returns how many requests it held.
        """
        ...

    def on_stage_failed(self, failure: StageFailed) -> int:
        """A replica was given up. Returns how many requests have ended because their stage has no replica left."""
        ...

    def on_message(self, address: Address, message: RequestNotice) -> None:
        """A worker reports on a request. Raises ProtocolViolation: the supervisor then kills the worker."""
        ...

    def on_checkpoint_memory(self, address: Address, request: int, memory_fd: int) -> None:
        """A worker keeps its checkpoints of a request in this memory. The listener owns the descriptor."""
        ...

    def on_output(self, address: Address, data: memoryview) -> None:
        """A chunk has arrived on a worker's output edge.

        data: a copy, which the listener may keep. Raises ringbuf.RingError if it is not a valid chunk: the supervisor
        then kills the worker.
        """
        ...
