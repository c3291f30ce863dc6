"""A deterministic stage for tests and benches: it repeats its input at a cost that the options choose.

Rules
1. Each chunk gives ``fan_out`` outputs with the chunk's own data and tensors; output number ``seq`` of a request also
   carries ``payload(request_id, seq, payload_bytes)`` when that is not empty. A conversation ``data["messages"]`` is
   answered with its last message, as ``data["text"]``.
2. Chunks of several sources are taken in turn, one of each, whenever they came; a source that has ended has none.
3. A step serves one output of every request that has something to give, at the cost of one ``step_s``: that is what
   batching looks like from outside.
4. The last output of the chunk that ends the last open source is the request's last. A request without sources gives
   one empty last output.

A chunk can ask for a failure, with ``data["echo"]``, a mapping of

======== ================== =======================================================================================
stage    name               only at the stage of that name; without it at every echo stage that the chunk reaches
raise    "feed" or "step"   RuntimeError there: ends the worker
invalid  "feed" or "step"   InvalidRequest from ``feed``, or a StageFailure instead of the chunk's outputs
stderr   text               a line on stderr, before anything else the chunk asks for in ``step``
exit     code               ``os._exit(code)`` in ``step``
hang     true               ``step`` does not return
======== ================== =======================================================================================

What happens in ``step`` happens when the chunk's first output is due. Any other value of ``echo`` is refused.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from omni_actors.stages.base import (
    Chunk,
    InvalidRequest,
    RequestId,
    StageContext,
    StageFailure,
    StageOutput,
    StageRequest,
)
from omni_actors.stages.echo.options import EchoOptions
from omni_actors.stages.pausing import FlaggedPausing
from omni_actors.stages.refusal import request_work, validated
from ringbuf import Tensor

__all__ = ["EchoEngine", "payload"]

_STARTS = 4093


@functools.cache
def _noise(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(0).bytes(size + _STARTS), np.uint8)


def payload(request_id: RequestId, seq: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes that output ``seq`` of ``request_id`` carries: uint8 (size,), read-only.

    A window into one random block: neither producing nor checking a payload costs more than the copy under test.
    """
    start = (request_id * 131 + seq * 17) % _STARTS
    return _noise(size)[start : start + size]


class _Hooks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"raises": "raise"}):
    """``data["echo"]``: see the module."""

    stage: str | None = None
    raises: Literal["feed", "step"] | None = None
    invalid: Literal["feed", "step"] | None = None
    stderr: str = ""
    exit: Annotated[int, Meta(ge=0, le=255)] | None = None
    hang: bool = False


def _answered(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if not data.get("messages"):
        return data
    content = data["messages"][-1].get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return {**data, "text": "\n".join(part["text"] for part in parts if "text" in part)}


class _Pending(msgspec.Struct):
    data: Mapping[str, Any]
    tensors: dict[str, Tensor]
    hooks: _Hooks
    left: int


class _Request:
    def __init__(self, sources: tuple[str, ...]) -> None:
        self._turns = deque(sources)
        """The sources that have not ended, or whose chunks are not all taken; the first one's turn it is."""
        self._ended: set[str] = set()
        self._pending: dict[str, deque[_Pending]] = {source: deque() for source in sources}
        self.seq = 0
        self.paused = False

    def add(self, chunk: Chunk, pending: _Pending) -> None:
        self._pending[chunk.source].append(pending)
        if chunk.last:
            self._ended.add(chunk.source)

    @property
    def head(self) -> _Pending | None:
        """The chunk whose turn it is, where it is here."""
        pending = self._pending[self._turns[0]] if self._turns else None
        return pending[0] if pending else None

    def take(self) -> None:
        """The head is done with."""
        source = self._turns.popleft()
        self._pending[source].popleft()
        if self._pending[source] or source not in self._ended:
            self._turns.append(source)

    @property
    def over(self) -> bool:
        return not self._turns

    @property
    def ready(self) -> bool:
        return not self.paused and (self.over or self.head is not None)


class EchoEngine(FlaggedPausing):
    """See the module. Takes no model."""

    def __init__(self, context: StageContext) -> None:
        self._stage = context.stage
        self._options = msgspec.convert(context.options, EchoOptions)
        self._requests: dict[RequestId, _Request] = {}
        context.report("pretending to load")
        time.sleep(self._options.load_s)

    @property
    def busy(self) -> bool:
        return any(request.ready for request in self._requests.values())

    def start(self, request: StageRequest) -> None:
        self._requests[request.request_id] = _Request(request.sources)

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        try:
            pending = self._pending(chunk)
        except InvalidRequest:
            del self._requests[request_id]
            raise
        if pending.hooks.raises == "feed":
            raise RuntimeError("the chunk asked for a crash in feed")
        self._requests[request_id].add(chunk, pending)

    def abort(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        ready = [request_id for request_id, request in self._requests.items() if request.ready]
        self._spend()
        for request_id in ready:
            yield self._output(request_id)

    def close(self) -> None:
        self._requests.clear()

    def _output(self, request_id: RequestId) -> StageOutput | StageFailure:
        request = self._requests[request_id]
        tensors: dict[str, Any] = {}
        data: Mapping[str, Any] = {}
        if head := request.head:
            if head.left == self._options.fan_out and (failure := self._fail(head.hooks)):
                del self._requests[request_id]
                return StageFailure(request_id, failure)
            tensors, data = dict(head.tensors), head.data
            head.left -= 1
            if not head.left:
                request.take()
        if self._options.payload_bytes:
            tensors["payload"] = payload(request_id, request.seq, self._options.payload_bytes)
        request.seq += 1
        if request.over:
            del self._requests[request_id]
        return StageOutput(request_id, tensors, data, request.over)

    def _pending(self, chunk: Chunk) -> _Pending:
        """A copy of the chunk. Raises ``InvalidRequest``."""
        hooks = self._hooks(chunk.data)
        if hooks.invalid == "feed":
            raise InvalidRequest("the chunk asked to be refused", param="echo")
        with request_work("messages"):
            data = _answered(chunk.data)
        tensors = {name: Tensor(t.dtype, t.shape, bytes(t.data)) for name, t in chunk.tensors.items()}
        return _Pending(data, tensors, hooks, self._options.fan_out)

    def _hooks(self, data: Mapping[str, Any]) -> _Hooks:
        """What the chunk asks of this stage. Raises ``InvalidRequest``."""
        hooks = validated(data.get("echo") or {}, _Hooks)
        return hooks if hooks.stage in (None, self._stage) else _Hooks()

    def _fail(self, hooks: _Hooks) -> InvalidRequest | None:
        if hooks.stderr:
            print(hooks.stderr, file=sys.stderr, flush=True)
        if hooks.raises == "step":
            raise RuntimeError("the chunk asked for a crash in step")
        if hooks.exit is not None:
            os._exit(hooks.exit)
        while hooks.hang:
            time.sleep(3600)
        if hooks.invalid == "step":
            return InvalidRequest("the chunk asked to be refused", param="echo")
        return None

    def _spend(self) -> None:
        if not self._options.spin:
            time.sleep(self._options.step_s)
            return
        until = time.perf_counter() + self._options.step_s
        while time.perf_counter() < until:
            pass
