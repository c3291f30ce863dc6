"""The engine loop's side of calls: a capability of the engine or of the loop itself is used, and the answer encoded."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from omni_actors.errors import InvalidRequest, Unsupported
from omni_actors.protocol import messages
from omni_actors.protocol.messages import Call, CallAnswer, CallRefusal, Desired
from omni_actors.stages.base import Controllable, StageEngine, StageOutput
from omni_actors.worker.profiler import WorkerProfiler

LARGEST_VALUE = 100 * 1024
"""Most bytes of an encoded value: it travels in one control message."""


class WorkerCalls:
    """The capabilities of one worker: those of its engine, and those of every worker (``_OWN``).

    stage: its stage.
    requests: returns the number of requests that are active in the worker.
    """

    def __init__(self, stage: str, requests: Callable[[], int]) -> None:
        self._stage, self._requests = stage, requests
        self._profiler = WorkerProfiler(stage)
        self._weights_version = messages.FIRST_VERSION
        """The version of the engine's weights."""
        self.calling: str | None = None
        """The capability that is called; it keeps its value if that call raises, other than ``InvalidRequest``."""
        self.establishing: int | None = None
        """Which part of the desired state a new engine is brought to; it keeps its value if that raises."""
        self.frozen = False
        """Whether the loop makes no steps. It receives, and answers, as always."""

    def with_version(self, output: StageOutput) -> dict[str, Any]:
        """Return the data of an output and, unless it is for downstream stages only, the version of the weights."""
        for_client = output.data or output.tensors or output.last
        return {**output.data, "weights_version": self._weights_version} if for_client else {}

    def answer(self, engine: StageEngine, call: Call) -> CallAnswer:
        """Carry a call out and return the answer. Raises what the call raises, other than ``InvalidRequest``."""
        try:
            return CallAnswer(call.number, _encoded(self._call(engine, call)))
        except Unsupported as error:
            refusal = CallRefusal(messages.sendable(error.why), unsupported=error.capability)
        except InvalidRequest as error:
            param = None if error.param is None else messages.sendable(error.param)
            refusal = CallRefusal(messages.sendable(error.message), param=param, code=error.code)
        return CallAnswer(call.number, refusal=refusal)

    def establish(self, engine: StageEngine, desired: Sequence[Desired]) -> None:
        """Bring a new engine to the desired state of its stage. Raises Unsupported, and what the engine raises."""
        for self.establishing, each in enumerate(desired):
            self._call(engine, each)
        self.establishing = None

    def _call(self, engine: StageEngine, call: Call | Desired) -> Any:
        self.calling = call.capability
        try:
            if call.capability in _OWN:
                value = self._call_own(engine, call)
            else:
                value = self._supporting(engine, call.capability).call(call.capability, call.arguments)
        except InvalidRequest:
            self.calling = None
            raise
        self.calling = None
        if call.capability == "update_weights":
            self._weights_version = call.arguments.get("version") or messages.FIRST_VERSION
        return value

    def _call_own(self, engine: StageEngine, call: Call | Desired) -> Any:
        """Use a capability of every worker. Raises InvalidRequest, too, for arguments that it does not take."""
        own = _OWN[call.capability]
        try:
            inspect.signature(own).bind(self, engine, **call.arguments)
        except TypeError as error:
            raise InvalidRequest(f"{call.capability}: {error}") from error
        types = get_type_hints(own)
        for name, value in call.arguments.items():
            if not isinstance(value, types[name]):
                raise InvalidRequest(f"{call.capability}: {name} must be {_WORDS[types[name]]}", param=name)
        return own(self, engine, **call.arguments)

    def _supporting(self, engine: StageEngine, capability: str) -> Controllable:
        """Return the engine, if it has the capability. Raises Unsupported."""
        capabilities = engine.capabilities() if isinstance(engine, Controllable) else {}
        why = capabilities.get(capability, "its engine has no such capability")
        if why is not None:
            raise Unsupported(self._stage, capability, why)
        assert isinstance(engine, Controllable)
        return engine

    def _supports(self, engine: StageEngine, capability: str) -> bool:
        if capability not in _OWN:
            self._supporting(engine, capability)
        return True

    def _freeze(self, engine: StageEngine, frozen: bool) -> None:
        self.frozen = frozen

    def _start_profile(self, engine: StageEngine) -> None:
        self._profiler.start()

    def _stop_profile(self, engine: StageEngine, folder: str) -> dict[str, Any]:
        return self._profiler.stop(folder)

    def _status(self, engine: StageEngine) -> dict[str, int]:
        return {"requests": self._requests(), **memory()}


_OWN: dict[str, Callable[..., Any]] = {
    "freeze": WorkerCalls._freeze,
    "start_profile": WorkerCalls._start_profile,
    "stop_profile": WorkerCalls._stop_profile,
    "supports": WorkerCalls._supports,
    "worker_status": WorkerCalls._status,
}
_WORDS = {bool: "true or false", str: "text"}
"""What arguments of these types must be."""


_NESTED = b"\x91" * 100
"""An array in an array, and so on. The parent decodes an answer with a deeper stack than its worker."""


def _encoded(value: Any) -> msgspec.Raw:
    """Encode the value of an answer. Raises InvalidRequest: it cannot be sent, or could not be decoded."""
    try:
        encoded = msgspec.msgpack.encode(value)
        if len(encoded) > LARGEST_VALUE:
            message = f"the answer has {len(encoded)} bytes; at most {LARGEST_VALUE} can be sent"
            raise InvalidRequest(message, code="answer_too_large")
        msgspec.msgpack.decode(_NESTED + encoded)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the value cannot be sent: {error}", code="answer_not_encodable") from error
    return msgspec.Raw(encoded)


def memory() -> dict[str, int]:
    """Return what this process occupies: ``rss_bytes`` of memory, ``device_bytes`` of CUDA devices as torch counts."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    device_bytes = 0
    torch = sys.modules.get("torch")  # an engine without torch has nothing there
    if torch is not None and torch.cuda.is_initialized():
        device_bytes = sum(torch.cuda.memory_reserved(each) for each in range(torch.cuda.device_count()))
    return {"rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "device_bytes": device_bytes}
