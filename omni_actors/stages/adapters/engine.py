"""What engines on transformers share that serve LoRA adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from omni_actors.errors import InvalidAdapter
from omni_actors.stages.adapters.options import KEEP, LOAD, Adapter, KeptAdapters
from omni_actors.stages.base import RequestId, StageRequest
from omni_actors.stages.engine import Engine
from omni_actors.stages.refusal import validated

R = TypeVar("R", bound=Any)


class AdapterStore(Protocol):
    """The adapters that an engine has in memory. in_use: those of all requests of the engine, which stay."""

    @property
    def loaded(self) -> Collection[Adapter]:
        """The adapters in memory."""
        ...

    def use(self, adapter: Adapter, in_use: Collection[Adapter]) -> None:
        """Load an adapter, for a request or to check it. Raises InvalidAdapter."""
        ...

    def keep(self, kept: KeptAdapters, in_use: Collection[Adapter]) -> None:
        """Load the adapters that requests may name from now on, and free the others.

        An adapter that cannot be loaded is reported on stderr, because a worker that starts again must still serve
        the other requests. The requests that name it are refused.
        """
        ...

    def trim(self, in_use: Collection[Adapter]) -> None:
        """Free the adapters that need not stay."""
        ...


A = TypeVar("A", bound=AdapterStore)


class AdaptedEngine(Engine[R], Generic[R, A]):
    """An ``Engine`` whose requests may have an adapter each: ``adapter`` of their records, which may be None."""

    _adapters: A

    def __init__(self) -> None:
        super().__init__()
        self._capabilities |= {LOAD: self._load_adapter, KEEP: self._keep_adapters}

    def start(self, request: StageRequest) -> None:
        super().start(request)
        if (adapter := self._requests[request.request_id].adapter) is not None:
            try:
                self._load_adapter(adapter)
            except InvalidAdapter:
                del self._requests[request.request_id]
                raise

    def abort(self, request_id: RequestId) -> None:
        super().abort(request_id)
        if self._adapters.loaded:
            self._adapters.trim(self._adapters_in_use())

    def _load_adapter(self, adapter: Adapter | Mapping[str, Any]) -> None:
        """Carry out ``LOAD``, also for a request that begins. Raises InvalidAdapter."""
        wanted = adapter if isinstance(adapter, Adapter) else validated(adapter, Adapter)
        if isinstance(why := self._capabilities[LOAD], str):
            raise InvalidAdapter(wanted.name, why)
        self._adapters.use(wanted, self._adapters_in_use())

    def _keep_adapters(self, adapters: Sequence[Any], pinned: Sequence[str]) -> None:
        """Carry out ``KEEP``."""
        kept = validated({"adapters": adapters, "pinned": pinned}, KeptAdapters)
        self._adapters.keep(kept, self._adapters_in_use())

    def _adapters_in_use(self) -> set[Adapter]:
        return {request.adapter for request in self._requests.values() if request.adapter is not None}
