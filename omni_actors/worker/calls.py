"""The engine loop's side of calls: a capability of the engine or of the loop itself is used, and the answer encoded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.errors import InvalidRequest, Unsupported
from omni_actors.protocol.messages import Answer, Call, CallRefusal, Desired
from omni_actors.stages.base import Controllable, StageEngine

LARGEST_VALUE = 100 * 1024
"""Most bytes of an encoded value: it travels in one control message."""
LONGEST_REASON = 16_384


class WorkerCalls:
    """The capabilities of one worker: those of its engine, and ``freeze`` and ``worker_status``, which all have.

    requests: returns the number of requests that are active in the worker.
    """

    def __init__(self, requests: Callable[[], int]) -> None:
        self._requests = requests
        self.frozen = False
        """Whether the loop makes no steps. It receives, and answers, as always."""

    def answer(self, engine: StageEngine, call: Call) -> Answer:
        """Carry a call out and return the answer. Raises what the engine raises, other than ``InvalidRequest``."""
        if (why := self._why_unsupported(engine, call.capability)) is not None:
            return Answer(call.number, refusal=CallRefusal(why[:LONGEST_REASON], unsupported=True))
        try:
            value = self._call(engine, call)
        except InvalidRequest as error:
            refusal = CallRefusal(error.message[:LONGEST_REASON], param=error.param, code=error.code)
            return Answer(call.number, refusal=refusal)
        try:
            encoded = msgspec.msgpack.encode(value)
        except (TypeError, ValueError) as error:
            message = f"the value cannot be sent: {error}"[:LONGEST_REASON]
            return Answer(call.number, refusal=CallRefusal(message, code="answer_not_encodable"))
        if len(encoded) > LARGEST_VALUE:
            message = f"the answer has {len(encoded)} bytes; at most {LARGEST_VALUE} can be sent"
            return Answer(call.number, refusal=CallRefusal(message, code="answer_too_large"))
        return Answer(call.number, msgspec.Raw(encoded))

    def establish(self, engine: StageEngine, stage: str, desired: Sequence[Desired]) -> None:
        """Bring a new engine to the desired state of its stage. Raises Unsupported, and what the engine raises."""
        for each in desired:
            if (why := self._why_unsupported(engine, each.capability)) is not None:
                raise Unsupported(stage, each.capability, why)
            self._call(engine, each)

    def _why_unsupported(self, engine: StageEngine, capability: str) -> str | None:
        """Return None if the worker has the capability, otherwise the reason."""
        if capability in _OWN:
            return None
        capabilities = engine.capabilities() if isinstance(engine, Controllable) else {}
        unknown = f"its engine {type(engine).__name__} does not offer it"
        return capabilities.get(capability, unknown)

    def _call(self, engine: StageEngine, call: Call | Desired) -> Any:
        if (own := _OWN.get(call.capability)) is not None:
            return own(self, **call.arguments)
        assert isinstance(engine, Controllable)
        return engine.call(call.capability, call.arguments)

    def _freeze(self, frozen: bool) -> None:
        self.frozen = frozen

    def _status(self) -> dict[str, int]:
        return {"requests": self._requests(), **memory()}


_OWN: dict[str, Callable[..., Any]] = {"freeze": WorkerCalls._freeze, "worker_status": WorkerCalls._status}


def memory() -> dict[str, int]:
    """Return what this process occupies: ``rss_bytes`` of memory, ``device_bytes`` of CUDA devices as torch counts."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    device_bytes = 0
    torch = sys.modules.get("torch")  # an engine without torch has nothing there
    if torch is not None and torch.cuda.is_initialized():
        device_bytes = sum(torch.cuda.memory_reserved(each) for each in range(torch.cuda.device_count()))
    return {"rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "device_bytes": device_bytes}
