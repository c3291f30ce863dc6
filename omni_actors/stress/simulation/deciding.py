"""An engine that repeats its input like ``echo``, in pieces that it cuts at random, and records what they depend on.

Rules
1. Each output has a part of the text of one chunk; the last part has the chunk's tensors. ``data["more"]`` says that
   more parts follow. With several sources it takes one whole text of each in turn. So the parts together are what
   ``echo`` puts out.
2. With ``decides``, each output needs a decision: how much text it has, and a number that nothing follows from. A new
   incarnation decides differently, unless it has the journal.
3. ``data["trail"]`` has, for this stage and those that it depends on, a record: the stage, the number of its output,
   and a digest of everything that it had decided and used before this output, and one after it. All outputs of an
   answer must agree on these.
4. With ``steps``, each output takes so many steps, and each of them ends with a checkpoint. ``work`` counts them.
5. Outputs that no consumer needs any more are put out empty. One that is sent after all ends the worker that gets it.
6. ``random`` follows from the seed of a simulated schedule. In a worker process it is seeded by the system.

A chunk can cause a failure, as for ``echo``: ``data["echo"]`` with ``stage`` and one of ``raise`` and ``invalid``.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from omni_actors.stages import base
from omni_actors.stress.simulation.work import WORK
from ringbuf import Tensor

__all__ = ["DecidingEngine"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """decides: whether outputs depend on decisions. recorded: whether the trail has records of this stage.

    steps: how many steps an output takes; 0: one, without checkpoints.
    """

    decides: bool = True
    recorded: bool = True
    steps: int = 0


@dataclass
class _Part:
    """A chunk of input. text: what is left of its text."""

    data: Mapping[str, Any]
    tensors: dict[str, Tensor]
    text: str
    untouched: bool = True


class _Request:
    def __init__(self, request: base.StageRequest) -> None:
        self.journal, self.needed_from = deque(request.journal), request.needed_from
        self.turns = deque(request.sources)
        """The sources that have not ended. The next chunk is taken from the first."""
        self.ended: set[str] = set()
        self.pending: dict[str, deque[_Part]] = {source: deque() for source in request.sources}
        self.outputs = self.digest = 0
        self.steps = 0 if request.checkpoint is None else int(request.checkpoint.data["steps"])
        """How many steps were made for its outputs so far and the next one."""
        self.paused = False

    @property
    def ready(self) -> bool:
        return not self.paused and bool(self.pending[self.turns[0]])

    def remove_head(self) -> None:
        """Remove the chunk that is taken. After the last part of a text, it is the next source's turn."""
        source = self.turns[0]
        head = self.pending[source].popleft()
        if not head.data.get("more"):
            self.turns.rotate(-1)
        if source in self.ended and not self.pending[source]:
            self.turns.remove(source)


class DecidingEngine:
    """See the module. It has no model."""

    def __init__(self, context: base.StageContext) -> None:
        self._requests: dict[base.RequestId, _Request] = {}
        self._stage = context.stage
        self._options = msgspec.convert(context.options, Options)

    @property
    def busy(self) -> bool:
        return any(request.ready for request in self._requests.values())

    def start(self, request: base.StageRequest) -> None:
        if request.checkpoint is not None and request.checkpoint.data["of"] != [self._stage, request.request_id]:
            raise RuntimeError(f"a checkpoint of {request.checkpoint.data['of']}")
        WORK.started(self._stage, request.request_id)
        self._requests[request.request_id] = _Request(request)

    def abort(self, request_id: base.RequestId) -> None:
        self._requests.pop(request_id, None)

    def pause(self, request_id: base.RequestId) -> None:
        self._requests[request_id].paused = True

    def resume(self, request_id: base.RequestId) -> None:
        self._requests[request_id].paused = False

    def close(self) -> None:
        self._requests.clear()

    def feed(self, request_id: base.RequestId, chunk: base.Chunk) -> None:
        request = self._requests[request_id]
        if self._failure(chunk.data, "raise") == "feed":
            raise RuntimeError("the chunk asked for a crash in feed")
        if self._failure(chunk.data, "invalid") == "feed":
            del self._requests[request_id]
            raise base.InvalidRequest("the chunk asked to be refused", param="echo")
        tensors = {name: Tensor(t.dtype, t.shape, bytes(t.data)) for name, t in chunk.tensors.items()}
        request.pending[chunk.source].append(_Part(chunk.data, tensors, chunk.data["text"]))
        if chunk.last:
            request.ended.add(chunk.source)

    def step(self) -> Iterator[base.StageOutput | base.StageFailure | base.StageCheckpoint]:
        for request_id in [request_id for request_id, request in self._requests.items() if request.ready]:
            request = self._requests[request_id]
            needed = self._options.steps * (request.outputs + 1)
            if request.steps < needed:
                WORK.made(self._stage, request_id, request.steps)
                request.steps += 1
                state = np.full(32, request.steps)
                yield base.StageCheckpoint(
                    request_id, {"state": state}, {"steps": request.steps, "of": [self._stage, request_id]}
                )
            if request.steps >= needed:
                yield self._output(request_id)

    def _output(self, request_id: base.RequestId) -> base.StageOutput | base.StageFailure:
        request = self._requests[request_id]
        head = request.pending[request.turns[0]][0]
        if head.untouched and self._failure(head.data, "raise") == "step":
            raise RuntimeError("the chunk asked for a crash in step")
        if head.untouched and self._failure(head.data, "invalid") == "step":
            del self._requests[request_id]
            return base.StageFailure(request_id, base.InvalidRequest("the chunk asked to be refused", param="echo"))
        decisions = self._decide(request, len(head.text))
        length = decisions[0] if decisions else len(head.text)
        part, head.text, head.untouched = head.text[:length], head.text[length:], False
        trail = [list(record) for record in head.data.get("trail", ())]
        before, request.digest = (
            request.digest,
            zlib.crc32(msgspec.msgpack.encode((request.digest, decisions, part, trail))),
        )
        if self._options.recorded:
            trail.append([self._stage, request.outputs, before, request.digest])
        request.outputs += 1
        data = {**head.data, "text": part, "trail": trail, "more": bool(head.text or head.data.get("more"))}
        tensors = {} if head.text else head.tensors
        if partial := request.outputs <= request.needed_from:  # its number is one less
            tensors, data = {}, {}
        if not head.text:
            request.remove_head()
        if not request.turns:
            del self._requests[request_id]
        return base.StageOutput(request_id, tensors, data, not request.turns, decisions=decisions, partial=partial)

    def _decide(self, request: _Request, length: int) -> base.Decisions:
        """Decide how much of a text of this length an output has. The journal comes first."""
        if request.journal:
            return request.journal.popleft()
        if not self._options.decides:
            return ()
        part = random.choice((length, length, length, max(1, length // 2)))
        return part, random.getrandbits(60)

    def _failure(self, data: Mapping[str, Any], kind: str) -> str | None:
        """Return where a chunk asks for a failure of this kind."""
        asked = data.get("echo") or {}
        where: str | None = asked.get(kind) if asked.get("stage", self._stage) == self._stage else None
        return where
