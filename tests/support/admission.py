"""What admission control needs of a system, without a pipeline."""

from __future__ import annotations

from typing import Any

from omni_actors.config import Limits
from omni_actors.serve.access.admission import AdmissionControl


class StubSystem:
    """A system with ``in_flight`` of ``max_requests`` requests, none of which has a slow reader."""

    retry_after_s = 6.2

    def __init__(self, max_requests: int) -> None:
        self.pipeline: Any = self
        self.limits = Limits(max_requests=max_requests)
        self.in_flight = 0

    def make_room(self, count: int = 1) -> bool:
        return False


def admission_control(*, max_bytes: int, max_request_bytes: int, max_requests: int = 9) -> AdmissionControl:
    system: Any = StubSystem(max_requests)
    return AdmissionControl(system, max_bytes=max_bytes, max_request_bytes=max_request_bytes)
