"""The stream of the live state with a clock of the test."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import trio

from omni_actors.serve.state_feed import StateFeed
from omni_actors.system import LiveState


def _document(piece: bytes) -> dict[str, Any]:
    """Return the data of the first event of a piece of the stream."""
    line = next(line for line in piece.decode().splitlines() if line.startswith("data: "))
    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return found


async def test_a_new_viewer_of_an_idle_system_gets_its_time_now(autojump_clock: trio.testing.MockClock) -> None:
    def read() -> LiveState:
        return LiveState(
            at=trio.current_time(),
            pipeline="idle",
            ready=True,
            errored=False,
            in_flight=0,
            waiting=0,
            max_requests=1,
            stages={},
            rings={},
            requests={},
        )

    feed = StateFeed(read, lambda: False)
    async with aclosing(feed.events("a")) as first:
        began = _document(await anext(first))["at"]
        await trio.sleep(5000)
        async with aclosing(feed.events("a")) as second:
            assert _document(await anext(second))["at"] == began + 5000
