"""An implementation of ``base.Pausable`` by a flag on each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_actors.stages.base import RequestId

__all__ = ["FlaggedPausing"]


class FlaggedPausing:
    """A mixin for engines. It sets ``paused`` on a request's record; the engine's ``busy`` and ``step`` read the flag.

    The engine has a mapping ``_requests`` of records with the attribute ``paused``. The flag ends with the record.
    """

    _requests: Mapping[RequestId, Any]

    def pause(self, request_id: RequestId) -> None:
        self._requests[request_id].paused = True

    def resume(self, request_id: RequestId) -> None:
        self._requests[request_id].paused = False
