"""Logs the replays of requests, and their ends for lack of one: one event for all requests after one death."""

from __future__ import annotations

from typing import Any

import trio

from omni_actors.errors import StageCrashed
from omni_actors.log_events import RequestsLost, RequestsReplayed, record

TOGETHER_S = 0.1
"""Replays and ends within this time after the first one are logged together."""


class ReplayLog:
    """Counts replays and lost requests by the death that they follow."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, int, int], RequestsReplayed] = {}
        """The events to log, by stage, replica and generation."""
        self._losses: dict[tuple[str, int, int, str | None, bool], RequestsLost] = {}
        """The losses to log, by the same, the reason and whether the requests may be sent again."""
        self._added = trio.lowlevel.ParkingLot()

    def add(self, crash: StageCrashed, after_s: float, *, is_resumed: bool, successor: int | None) -> None:
        """Count a replay.

        crash: the latest death that made it necessary, ``after_s`` seconds ago. is_resumed: whether a resumable stage
        starts again. successor: the replica of that death's stage that goes on with the request; None: the stage does
        not start again.
        """
        key = (crash.stage, crash.replica, crash.generation)
        earlier = self._events.get(key)
        successors = {*(earlier.successors if earlier else ())} | ({successor} if successor is not None else set())
        self._events[key] = RequestsReplayed(
            **_worker(crash),
            requests=1 + (earlier.requests if earlier else 0),
            resumed=is_resumed + (earlier.resumed if earlier else 0),
            replayed_after_s=max(round(after_s, 3), earlier.replayed_after_s if earlier else 0.0),
            successors=tuple(sorted(successors)),
        )
        self._added.unpark_all()

    def add_lost(self, crash: StageCrashed) -> None:
        """Count a request that ends with this error."""
        key = (crash.stage, crash.replica, crash.generation, crash.not_replayed, crash.retryable)
        earlier = self._losses.get(key)
        self._losses[key] = RequestsLost(
            **_worker(crash),
            requests=1 + (earlier.requests if earlier else 0),
            reason=crash.not_replayed,
            retryable=crash.retryable,
        )
        self._added.unpark_all()

    async def run(self) -> None:
        """Log the events until cancelled. What was counted before the cancellation is logged too."""
        try:
            while True:
                if not self._events and not self._losses:
                    await self._added.park()
                await trio.sleep(TOGETHER_S)
                self._flush()
        finally:
            self._flush()

    def _flush(self) -> None:
        for event in (*self._events.values(), *self._losses.values()):
            record(event)
        self._events.clear()
        self._losses.clear()


def _worker(crash: StageCrashed) -> dict[str, Any]:
    """Return the fields of a ``WorkerEnd`` that name the dead worker."""
    return {
        "stage": crash.stage,
        "replica": crash.replica,
        "generation": crash.generation,
        "pid": crash.pid,
        "node": crash.exit.node,
        "signal": crash.signal,
        "exit_code": crash.exit_code,
    }
