"""Logs the replays of requests: one event for all requests that are replayed together after one death."""

from __future__ import annotations

import trio

from omni_actors.errors import StageCrashed
from omni_actors.log_events import RequestsReplayed, record

TOGETHER_S = 0.1
"""Replays that begin within this time after the first one are logged together."""


class ReplayLog:
    """Counts replays by the death that they follow."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, int, int], RequestsReplayed] = {}
        """By stage, replica and generation."""
        self._added = trio.lowlevel.ParkingLot()

    def add(self, crash: StageCrashed, lost_s: float, *, is_resumed: bool) -> None:
        """Count a replay.

        crash: the latest death that made it necessary, ``lost_s`` seconds ago. is_resumed: whether a resumable stage
        starts again.
        """
        key = (crash.stage, crash.replica, crash.generation)
        earlier = self._events.get(key)
        self._events[key] = RequestsReplayed(
            stage=crash.stage,
            replica=crash.replica,
            generation=crash.generation,
            pid=crash.pid,
            node=crash.exit.node,
            signal=crash.signal,
            exit_code=crash.exit_code,
            requests=1 + (earlier.requests if earlier else 0),
            resumed=is_resumed + (earlier.resumed if earlier else 0),
            lost_s=max(round(lost_s, 3), earlier.lost_s if earlier else 0.0),
        )
        self._added.unpark_all()

    async def run(self) -> None:
        """Log the replays until cancelled. What was counted before the cancellation is logged too."""
        try:
            while True:
                if not self._events:
                    await self._added.park()
                await trio.sleep(TOGETHER_S)
                self._flush()
        finally:
            self._flush()

    def _flush(self) -> None:
        for event in self._events.values():
            record(event)
        self._events.clear()
