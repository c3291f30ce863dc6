"""What engines share that keep a record of each request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from omni_actors.stages.base import REFUSALS, Chunk, InvalidRequest, RequestId, StageRequest

R = TypeVar("R")
NOT_COMMON = {
    "collective_rpc": "the engine has no workers of its own",
    "reset_prefix_cache": "the engine has no cache of prompt prefixes",
    "reset_mm_cache": "the engine keeps no processed media",
    "reset_encoder_cache": "the engine keeps no encoded media",
    "update_weights": "the engine loads its weights at the start only",
    "tokenize": "the engine has no tokenizer",
    "detokenize": "the engine has no tokenizer",
    "load_lora": "the engine has no layers for LoRA adapters",
    "sleep": "the weights stay on the engine's device: a CPU has them in host memory already; level 2 frees them",
}
"""Why an engine does not have these capabilities, unless a subclass has them."""


class Engine(Generic[R]):
    """A ``StageEngine`` without ``busy`` and ``step``. ``_requests`` has the records of the requests that go on.

    It implements ``base.Controllable``: a subclass adds its capabilities to ``_capabilities``.
    """

    def __init__(self) -> None:
        self._requests: dict[RequestId, R] = {}
        self._weights_version: str | None = None
        """The version of the weights; None: those that were loaded at the start."""
        self._capabilities: dict[str, Callable[..., Any] | str] = dict(NOT_COMMON)
        """The function of each capability, which takes the arguments of a call as keywords; or why there is none."""

    def capabilities(self) -> Mapping[str, str | None]:
        return {name: each if isinstance(each, str) else None for name, each in self._capabilities.items()}

    def call(self, capability: str, arguments: Mapping[str, Any]) -> Any:
        function = self._capabilities[capability]
        assert not isinstance(function, str), "the engine has the capability"
        try:
            bound = inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise InvalidRequest(f"{capability}: {error}") from error
        return function(*bound.args, **bound.kwargs)

    def _update_weights(self, files: Mapping[str, tuple[int, int]], version: str | None) -> dict[str, Any]:
        """Carry out ``update_weights``, for a subclass that has it and ``_replace_weights``."""
        if self._requests:
            raise InvalidRequest("requests are running, and would be computed with two versions", code="busy")
        done = self._replace_weights(files)
        self._weights_version = version
        reset = self._capabilities["reset_prefix_cache"]
        if not isinstance(reset, str):
            reset()
        return done

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        """Replace weights by those of safetensors files, and what was computed from them (see ``stages.weights``).

        Returns ``updated``, the number of tensors that were replaced, and ``complete``: whether these are all.
        Raises InvalidRequest: a file or a tensor is wrong; nothing has changed.
        """
        raise NotImplementedError

    def _new_request(self, request: StageRequest) -> R:
        """Make the record of a new request. Raises ``InvalidRequest``."""
        raise NotImplementedError

    def _take(self, request: R, chunk: Chunk) -> None:
        """Take a chunk, as ``StageEngine.feed`` does. If it raises one of ``REFUSALS``, the request is forgotten."""
        raise NotImplementedError

    def start(self, request: StageRequest) -> None:
        self._requests[request.request_id] = self._new_request(request)

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        try:
            self._take(self._requests[request_id], chunk)
        except REFUSALS:
            self.abort(request_id)
            raise

    def abort(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def close(self) -> None:
        self._requests.clear()


P = TypeVar("P", bound=Any)


class PausableEngine(Engine[P]):
    """An ``Engine`` that implements ``base.Pausable`` by a flag on each record.

    A record has the attributes ``paused``, which this class sets, and ``ready``: whether a step would compute something
    for the request. ``ready`` is false while ``paused`` is set. A step computes for ready requests only.
    """

    @property
    def busy(self) -> bool:
        return any(request.ready for request in self._requests.values())

    def pause(self, request_id: RequestId) -> None:
        self._requests[request_id].paused = True

    def resume(self, request_id: RequestId) -> None:
        self._requests[request_id].paused = False
