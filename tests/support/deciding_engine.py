"""A resumable engine whose outputs follow from random decisions, so that no repetition gives the same outputs."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from omni_actors.stages import base


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fan_out: int = 1
    """Outputs per chunk of input."""
    step_s: float = 0.0
    dies_at: int = -1
    """The number of the output behind which the worker kills itself, once."""
    marker: str = ""
    """The file that it makes before it kills itself."""
    rounds: bool = False
    """Outputs have a tensor ``row`` of one float, which differs each time in its last digits."""
    blocked_by: str = ""
    """Loading waits while this file exists."""


class _Request:
    def __init__(self, request: base.StageRequest) -> None:
        self.journal, self.needed_from = deque(request.journal), request.needed_from
        self.inputs: deque[tuple[list[list[int]], bool]] = deque()
        """For each output to come, the decisions of the stages upstream, and whether it is the last one."""
        self.outputs = 0


class DecidingEngine:
    """Each output has ``data["trail"]``: for each stage so far, the number of its output and what it decided.

    Outputs that no consumer needs any more have none.
    """

    def __init__(self, context: base.StageContext) -> None:
        self._options = msgspec.convert(context.options, Options)
        self._requests: dict[base.RequestId, _Request] = {}
        while self._options.blocked_by and Path(self._options.blocked_by).exists():
            time.sleep(0.01)

    @property
    def busy(self) -> bool:
        return any(request.inputs for request in self._requests.values())

    def start(self, request: base.StageRequest) -> None:
        self._requests[request.request_id] = _Request(request)

    def feed(self, request_id: base.RequestId, chunk: base.Chunk) -> None:
        trail: list[Any] = chunk.data.get("trail", [])
        copies = self._options.fan_out
        request = self._requests[request_id]
        request.inputs.extend((trail, chunk.last and copy == copies - 1) for copy in range(copies))

    def abort(self, request_id: base.RequestId) -> None:
        del self._requests[request_id]

    def step(self) -> Iterator[base.StageOutput]:
        time.sleep(self._options.step_s)
        for request_id, request in list(self._requests.items()):
            if not request.inputs:
                continue
            trail, last = request.inputs.popleft()
            decisions = request.journal.popleft() if request.journal else (secrets.randbits(60),)
            partial = request.outputs < request.needed_from
            data = {} if partial else {"trail": [*trail, [request.outputs, *decisions]]}
            if last:
                del self._requests[request_id]
            tensors = {"row": _rounded(request.outputs)} if self._options.rounds else {}
            yield base.StageOutput(request_id, tensors, data, last, decisions, partial=partial)
            if request.outputs == self._options.dies_at and not Path(self._options.marker).exists():
                Path(self._options.marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            request.outputs += 1

    def close(self) -> None:
        self._requests.clear()


def _rounded(value: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array([(1 + value) * (1 + secrets.randbits(20) * 1e-9)], np.float32)
