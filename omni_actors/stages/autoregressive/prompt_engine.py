"""What text-generating engines share before the first forward: a request collects its input, then enters the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from omni_actors.stages.autoregressive.options import TextParams
from omni_actors.stages.base import Chunk, InvalidRequest, RequestId, StageFailure, StageOutput, StageRequest
from omni_actors.stages.refusal import request_work, validated

__all__ = ["Collector", "PromptEngine", "PromptRequest"]


class Collector(Protocol):
    """Collects the input chunks of one request."""

    def feed(self, chunk: Chunk) -> bool:
        """Copy what the chunk brings; return whether the input is complete. Raises ``InvalidRequest``."""
        ...


C = TypeVar("C", bound=Collector)


class PromptRequest(Generic[C]):
    """One request. The engine deletes ``collector``, which may be large, when the request enters the batch."""

    def __init__(self, request: StageRequest, params: Any, collector: C) -> None:
        self.id, self.params, self.collector = request.request_id, params, collector
        self.downstream = request.downstream
        """Whether a downstream stage takes part in the request."""


R = TypeVar("R", bound=PromptRequest[Any])


class PromptEngine(Generic[R]):
    """The input side of a ``StageEngine``. A subclass has the batch: ``_admit``, ``busy``, ``step``."""

    PARAMS: ClassVar[type[msgspec.Struct]] = TextParams

    def __init__(self) -> None:
        self._requests: dict[RequestId, R] = {}

    def _open(self, request: StageRequest, params: Any) -> R:
        """Make the record of a new request. params: a ``PARAMS``. Raises ``InvalidRequest``."""
        raise NotImplementedError

    def _encode(self, request: R) -> Any:
        """Turn the complete input into the prompt that ``_admit`` takes. Any exception ends this request only."""
        raise NotImplementedError

    def _admit(self, request: R, prompt: Any) -> None:
        """Put the request into the batch. Raises ``InvalidRequest``."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        raise NotImplementedError

    def start(self, request: StageRequest) -> None:
        self._requests[request.request_id] = self._open(request, validated(request.params, self.PARAMS))

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        request = self._requests[request_id]
        try:
            with request_work("messages"):
                complete = request.collector.feed(chunk)
            if complete:
                self._complete(request)
        except InvalidRequest:
            self.abort(request_id)
            raise

    def _complete(self, request: R) -> None:
        """Handle the end of the request's input. Raises ``InvalidRequest``."""
        with request_work("messages"):
            prompt = self._encode(request)
        self._admit(request, prompt)

    def abort(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        raise NotImplementedError

    def close(self) -> None:
        self._requests.clear()
