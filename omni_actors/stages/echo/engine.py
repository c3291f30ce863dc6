"""A deterministic engine for tests and benchmarks: it repeats its input at a configurable cost.

Rules
1. Each chunk gives ``fan_out`` outputs with the chunk's data and tensors. If ``payload_bytes`` is not 0, output number
   ``seq`` of a request also has the tensor ``payload``: see ``payload``. A conversation ``data["messages"]`` is
   answered with its last message as ``data["text"]``.
2. Chunks of several sources are taken in turn, one of each source that has not ended, independent of when they arrive.
3. A step gives one output of every ready request and costs ``step_s`` once: so batching looks from outside.
4. With a LoRA adapter, the stage adds ``[NAME DIGEST]`` to each text: the hash of the files that it has read. It
   checks the files as a real engine does.
5. New weights are read and checked, and change nothing but the version that each output has.
6. With ``steps``, an output takes so many steps, and each of them ends with a checkpoint: the number of steps made, and
   bytes that follow from it. A request goes on from its checkpoint without repeating steps.
7. The request's last output is the last one of the chunk that ends the last open source. A request without sources
   gives one empty output.
8. Outputs that no consumer needs any more after a death are put out empty, so that one that is sent after all is seen.

A chunk can cause a failure, with a mapping ``data["echo"]`` of

======== ================== =======================================================================================
stage    name               the failure happens at the stage of this name only; default: at every echo stage
raise    "feed" or "step"   a RuntimeError, which ends the worker
invalid  "feed" or "step"   InvalidRequest from ``feed``, or a StageFailure instead of the chunk's outputs
stderr   text               a line on stderr, before anything else that the chunk causes in ``step``
exit     code               ``os._exit(code)`` in ``step``
hang     true               ``step`` does not return
======== ================== =======================================================================================

A failure in ``step`` happens when the chunk's first output is due. Any other value of ``echo`` is refused.
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

from omni_actors.stages import base
from omni_actors.stages.adapters import files
from omni_actors.stages.adapters.options import KEEP, LOAD, Adapter, KeptAdapters
from omni_actors.stages.echo.options import EchoOptions, EchoParams
from omni_actors.stages.echo.weights import count_tensors
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.refusal import request_work, validated
from ringbuf import Tensor

_OFFSETS = 4093
CHECKPOINT_BYTES = 10_000


@functools.cache
def _noise(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(0).bytes(size + _OFFSETS), np.uint8)


def payload(request_id: base.RequestId, seq: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of the tensor ``payload`` in output ``seq`` of ``request_id``: uint8 (size,), read-only.

    It is a window into one random block, so that making and checking it cost no more than the copy under test.
    """
    start = (request_id * 131 + seq * 17) % _OFFSETS
    return _noise(size)[start : start + size]


def _steps_of(checkpoint: base.StageCheckpoint) -> int:
    """Return how many steps a checkpoint reflects. Raises RuntimeError: its bytes are not those of this request."""
    steps, state = checkpoint.data["steps"], checkpoint.tensors["state"]
    if bytes(state.data) != payload(checkpoint.request_id, steps, CHECKPOINT_BYTES).tobytes():
        raise RuntimeError(f"a corrupt checkpoint of request {checkpoint.request_id} after {steps} steps")
    return int(steps)


class _Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"raises": "raise"}):
    """The failures that a chunk causes, from its ``data["echo"]``; the module's docstring lists them."""

    stage: str | None = None
    raises: Literal["feed", "step"] | None = None
    invalid: Literal["feed", "step"] | None = None
    stderr: str = ""
    exit: Annotated[int, Meta(ge=0, le=255)] | None = None
    hang: bool = False


def _with_answer(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the text of a raw prompt, or of the last message, if ``data`` has one. Raises InvalidRequest."""
    if "prompt" in data:
        return {**data, "text": data["prompt"]}
    if not data.get("messages"):
        return data
    with request_work("messages"):
        content = data["messages"][-1].get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        return {**data, "text": "\n".join(part["text"] for part in parts if "text" in part)}


class _Pending(msgspec.Struct):
    data: Mapping[str, Any]
    tensors: dict[str, Tensor]
    failures: _Failures
    outputs_left: int


class _Request:
    def __init__(self, request: base.StageRequest, mark: str) -> None:
        self.request_id, self.needed_from = request.request_id, request.needed_from
        self.mark = mark
        """What the request's adapter adds to each text."""
        self.turns = deque(request.sources)
        """Sources with chunks to come or to be taken. The next chunk is taken from the first."""
        self._ended: set[str] = set()
        self._pending: dict[str, deque[_Pending]] = {source: deque() for source in request.sources}
        self.seq = 0
        self.steps = 0
        """How many steps were made for its outputs so far and the next one."""
        self.paused = False

    def add(self, chunk: base.Chunk, pending: _Pending) -> None:
        self._pending[chunk.source].append(pending)
        if chunk.last:
            self._ended.add(chunk.source)

    @property
    def head(self) -> _Pending | None:
        """The chunk to answer next. None: it has not arrived."""
        pending = self._pending[self.turns[0]] if self.turns else None
        return pending[0] if pending else None

    def remove_head(self) -> None:
        """Remove ``head``."""
        source = self.turns.popleft()
        self._pending[source].popleft()
        if self._pending[source] or source not in self._ended:
            self.turns.append(source)

    @property
    def ready(self) -> bool:
        return not self.paused and (not self.turns or bool(self._pending[self.turns[0]]))


class EchoEngine(PausableEngine[_Request]):
    """Repeats its input at a configurable cost, and fails when a chunk demands it. It has no model."""

    def __init__(self, context: base.StageContext) -> None:
        super().__init__()
        self._stage = context.stage
        self._options = msgspec.convert(context.options, EchoOptions)
        self._may_be_ready: set[base.RequestId] = set()
        """All ready requests, and some others. So a step costs nothing for requests that wait for input."""
        self._marks: dict[Adapter, str] = {}
        """What each adapter that requests may name adds to a text."""
        self._capabilities |= {LOAD: self._load_adapter, KEEP: self._keep_adapters}
        self._capabilities["update_weights"] = self._update_weights
        self._capabilities["sleep"] = "the engine has no weights; level 2 ends its worker"
        context.report("pretending to load")
        time.sleep(self._options.load_s)

    def _new_request(self, request: base.StageRequest) -> _Request:
        adapter = files.named(validated(request.params, EchoParams).lora)
        record = _Request(request, "" if adapter is None else self._mark(adapter))
        if request.checkpoint is not None:
            record.steps = _steps_of(request.checkpoint)
        self._may_be_ready.add(request.request_id)
        return record

    def _take(self, request: _Request, chunk: base.Chunk) -> None:
        pending = self._copy(chunk)
        if pending.failures.raises == "feed":
            raise RuntimeError("the chunk asked for a crash in feed")
        request.add(chunk, pending)
        self._may_be_ready.add(request.request_id)

    def _is_ready(self, request_id: base.RequestId) -> bool:
        return request_id in self._requests and self._requests[request_id].ready

    @property
    def busy(self) -> bool:
        return any(map(self._is_ready, self._may_be_ready))

    def resume(self, request_id: base.RequestId) -> None:
        super().resume(request_id)
        self._may_be_ready.add(request_id)

    def abort(self, request_id: base.RequestId) -> None:
        super().abort(request_id)
        self._may_be_ready.discard(request_id)

    def step(self) -> Iterator[base.StageOutput | base.StageFailure | base.StageCheckpoint]:
        self._may_be_ready = set(filter(self._is_ready, self._may_be_ready))
        self._spend_step()
        for request_id in sorted(self._may_be_ready):
            request = self._requests[request_id]
            needed = self._options.steps * (request.seq + 1)
            if request.steps < needed:
                request.steps += 1
                state = payload(request_id, request.steps, CHECKPOINT_BYTES)
                yield base.StageCheckpoint(request_id, {"state": state}, {"steps": request.steps})
            if request.steps >= needed:
                yield self._output(request_id)

    def _output(self, request_id: base.RequestId) -> base.StageOutput | base.StageFailure:
        request = self._requests[request_id]
        tensors: dict[str, Any] = {}
        data: Mapping[str, Any] = {}
        if head := request.head:
            if head.outputs_left == self._options.fan_out and (failure := self._inject(head.failures)):
                self.abort(request_id)
                return base.StageFailure(request_id, failure)
            tensors, data = dict(head.tensors), head.data
            if request.mark and data.get("text"):
                data = {**data, "text": data["text"] + request.mark}
            head.outputs_left -= 1
            if not head.outputs_left:
                request.remove_head()
        if self._options.payload_bytes:
            tensors["payload"] = payload(request_id, request.seq, self._options.payload_bytes)
        if partial := request.seq < request.needed_from:
            tensors, data = {}, {}
        request.seq += 1
        if last := not request.turns:
            self.abort(request_id)
        return base.StageOutput(request_id, tensors, data, last, partial=partial)

    def _mark(self, adapter: Adapter) -> str:
        """Return what an adapter adds to a text. Raises ``InvalidRequest``."""
        return self._marks.get(adapter) or f"[{adapter.name} {files.read_again(adapter).digest[:8]}]"

    def _load_adapter(self, adapter: Mapping[str, Any]) -> None:
        self._mark(validated(adapter, Adapter))

    def _keep_adapters(self, adapters: list[Any], pinned: list[str]) -> None:
        kept = validated({"adapters": adapters, "pinned": pinned}, KeptAdapters)
        marks = {}
        for adapter in kept.adapters:
            try:
                marks[adapter] = self._mark(adapter)
            except base.InvalidRequest as error:  # the requests that name it are refused
                print(error, file=sys.stderr, flush=True)
        self._marks = marks

    def _update_weights(self, files: Mapping[str, tuple[int, int]], version: str | None) -> dict[str, Any]:
        """Read files of weights and keep nothing of them: the worker adds the version to every output."""
        if self._requests:
            raise base.InvalidRequest("requests are running, and would get outputs of two versions", code="busy")
        return {"updated": count_tensors(files), "complete": True}

    def _copy(self, chunk: base.Chunk) -> _Pending:
        """Copy a chunk. Raises InvalidRequest."""
        failures = validated(chunk.data.get("echo") or {}, _Failures)
        if failures.stage not in (None, self._stage):
            failures = _Failures()
        if failures.invalid == "feed":
            raise base.InvalidRequest("the chunk asked to be refused", param="echo")
        data = _with_answer(chunk.data)
        tensors = {name: Tensor(t.dtype, t.shape, bytes(t.data)) for name, t in chunk.tensors.items()}
        return _Pending(data, tensors, failures, self._options.fan_out)

    def _inject(self, failures: _Failures) -> base.InvalidRequest | None:
        """Cause the failures of ``step``. Return the error of a refusal."""
        if failures.stderr:
            print(failures.stderr, file=sys.stderr, flush=True)
        if failures.raises == "step":
            raise RuntimeError("the chunk asked for a crash in step")
        if failures.exit is not None:
            os._exit(failures.exit)
        while failures.hang:
            time.sleep(3600)
        if failures.invalid == "step":
            return base.InvalidRequest("the chunk asked to be refused", param="echo")
        return None

    def _spend_step(self) -> None:
        if not self._options.step_s:
            return  # even ``sleep(0)`` takes 80 µs
        if not self._options.spin:
            time.sleep(self._options.step_s)
            return
        until = time.perf_counter() + self._options.step_s
        while time.perf_counter() < until:
            pass
