"""What engines on transformers share that serve LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from omni_actors.errors import InvalidAdapter
from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.adapters.options import KEEP, LOAD, Adapter, KeptAdapters
from omni_actors.stages.base import RequestId, StageRequest
from omni_actors.stages.engine import Engine
from omni_actors.stages.refusal import validated

R = TypeVar("R", bound=Any)


class AdaptedEngine(Engine[R]):
    """An ``Engine`` whose requests may have an adapter each: ``adapter`` of their records, which may be None."""

    _adapters: BatchedAdapters

    def __init__(self) -> None:
        super().__init__()
        self._capabilities |= {LOAD: self._load_adapter, KEEP: self._keep_adapters}

    def start(self, request: StageRequest) -> None:
        super().start(request)
        if (adapter := self._requests[request.request_id].adapter) is not None:
            try:
                self._adapters.use(adapter, self._adapters_in_use())
            except InvalidAdapter:
                del self._requests[request.request_id]
                raise

    def abort(self, request_id: RequestId) -> None:
        super().abort(request_id)
        if self._adapters.loaded:
            self._adapters.trim(self._adapters_in_use())

    def _load_adapter(self, adapter: Mapping[str, Any]) -> None:
        """Carry out ``LOAD``."""
        self._adapters.use(validated(adapter, Adapter), self._adapters_in_use())

    def _keep_adapters(self, adapters: Sequence[Any], pinned: Sequence[str]) -> None:
        """Carry out ``KEEP``."""
        kept = validated({"adapters": adapters, "pinned": pinned}, KeptAdapters)
        self._adapters.keep(kept, self._adapters_in_use())

    def _adapters_in_use(self) -> set[Adapter]:
        return {request.adapter for request in self._requests.values() if request.adapter is not None}
