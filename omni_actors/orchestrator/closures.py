"""The stages that sleep, and whether the system shuts down: new requests that need them are refused."""

from __future__ import annotations

from omni_actors.errors import StageAsleep, SystemClosed
from omni_actors.orchestrator.routes import Route


class Closures:
    """Refuses new requests for sleeping stages, and all new requests while the system shuts down."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        """The stages that sleep: requests that need one are refused."""
        self.draining = False
        """Whether no more requests are admitted, because the system is shutting down."""

    def require_open(self, route: Route) -> None:
        """Raise SystemClosed or StageAsleep if a request on this route is to be refused."""
        if self.draining:
            raise SystemClosed("the system is shutting down")
        if self.asleep:
            for stage in route.stages:
                if stage in self.asleep:
                    raise StageAsleep(stage)
