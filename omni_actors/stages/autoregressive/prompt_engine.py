"""What text-generating engines share before the first forward: a request collects its input, then enters the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from omni_actors.stages.adapters.files import named
from omni_actors.stages.base import Chunk, StageFailure, StageOutput, StageRequest
from omni_actors.stages.engine import Engine
from omni_actors.stages.refusal import request_work


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
        self.adapter = named(params.lora)
        self.downstream = request.downstream
        """Whether a downstream stage takes part in the request."""


R = TypeVar("R", bound=PromptRequest[Any])


class PromptEngine(Engine[R]):
    """The input side of a ``StageEngine``. A subclass has the batch: ``_join_batch``, ``busy``, ``step``."""

    def _encode(self, request: R) -> Any:
        """Turn the complete input into the prompt that ``_join_batch`` takes. Any exception ends this request only."""
        raise NotImplementedError

    def _join_batch(self, request: R, prompt: Any) -> None:
        """Put the request into the batch. Raises ``InvalidRequest``."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        raise NotImplementedError

    def _take(self, request: R, chunk: Chunk) -> None:
        with request_work("messages"):
            complete = request.collector.feed(chunk)
        if complete:
            self._complete(request)

    def _complete(self, request: R) -> None:
        """Handle the end of the request's input. Raises ``InvalidRequest``."""
        with request_work("messages"):
            prompt = self._encode(request)
        self._join_batch(request, prompt)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        raise NotImplementedError
