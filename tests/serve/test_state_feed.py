"""The stream of the live state with a clock of the test."""

from __future__ import annotations

import itertools
import json
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import trio

from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.state_feed import KEPT, MAX_VIEWERS_PER_ADDRESS, StateFeed
from omni_actors.system import LiveState


def _document(piece: bytes) -> dict[str, Any]:
    """Return the data of the first event of a piece of the stream."""
    line = next(line for line in piece.decode().splitlines() if line.startswith("data: "))
    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return found


def _state(waiting: int = 0) -> LiveState:
    return LiveState(
        at=trio.current_time(),
        pipeline="idle",
        ready=True,
        errored=False,
        in_flight=0,
        waiting=waiting,
        max_requests=1,
        stages={},
        rings={},
        requests={},
    )


async def test_a_new_viewer_of_an_idle_system_gets_its_time_now(autojump_clock: trio.testing.MockClock) -> None:
    feed = StateFeed(_state, lambda: False)
    async with aclosing(feed.events("a")) as first:
        began = _document(await anext(first))["at"]
        await trio.sleep(5000)
        async with aclosing(feed.events("a")) as second:
            assert _document(await anext(second))["at"] == began + 5000


async def test_all_addresses_of_a_network_have_the_viewers_of_one() -> None:
    feed = StateFeed(_state, lambda: False)
    async with AsyncExitStack() as viewers:
        for number in range(MAX_VIEWERS_PER_ADDRESS):
            await anext(await viewers.enter_async_context(aclosing(feed.events(f"2001:db8::{number:x}"))))
        with pytest.raises(HTTPError, match="viewers of this address"):
            await anext(feed.events("2001:db8::ffff"))
        await anext(await viewers.enter_async_context(aclosing(feed.events("2001:db8:0:1::1"))))


@pytest.mark.parametrize("changes", [3, KEPT, KEPT + 1])
@pytest.mark.parametrize("seen", [0, 1])
async def test_a_viewer_misses_no_change_while_it_reads_and_another_one_watches(
    autojump_clock: trio.testing.MockClock, changes: int, seen: int
) -> None:
    """seen: how many changes the slow viewer has been sent when it begins to read slowly."""
    reads = itertools.count()
    feed = StateFeed(lambda: _state(waiting=next(reads)), lambda: False)
    async with aclosing(feed.events("a")) as slow, aclosing(feed.events("b")) as other:
        for _ in range(1 + seen):
            known = _document(await anext(slow))["waiting"]
        await anext(other)
        for _ in range(changes):
            await anext(other)
        found = await anext(slow)
        waiting = [json.loads(line.removeprefix(b"data: "))["waiting"] for line in found.splitlines() if b"{" in line]
        if b"event: state" in found:
            assert changes >= KEPT
        else:
            assert waiting == list(range(known + 1, known + 1 + len(waiting)))
        assert waiting[-1] == next(reads) - 1
