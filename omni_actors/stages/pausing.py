"""``Pausable`` for engines whose requests carry a flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_actors.stages.base import RequestId

__all__ = ["FlaggedPausing"]


class FlaggedPausing:
    """Sets ``paused`` on the engine's own record of a request; the engine's ``busy`` and ``step`` look at it.

    The flag ends with the record, so a request that has ended is not paused.
    """

    _requests: Mapping[RequestId, Any]

    def pause(self, request_id: RequestId) -> None:
        self._requests[request_id].paused = True

    def resume(self, request_id: RequestId) -> None:
        self._requests[request_id].paused = False
