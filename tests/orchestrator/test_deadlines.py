"""The deadlines of requests, on a virtual clock."""

from __future__ import annotations

import trio
import trio.testing

from omni_actors.orchestrator.deadlines import STALE, Deadlines
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.routes import Route
from omni_actors.protocol.messages import CLIENT

ROUTE = Route(("s",), {}, {"s": (CLIENT,)}, {})


def request(name: str) -> Request:
    return Request(name, ROUTE, {}, {}, deadline_s=1.0, submitted=0.0)


class Watched:
    """Deadlines, and which requests expired when."""

    def __init__(self) -> None:
        self.deadlines, self.expired = Deadlines(), list[tuple[str, float]]()

    def expire(self, request: Request) -> None:
        self.expired.append((request.name, trio.current_time()))


async def test_requests_expire_at_their_latest_deadline_in_order(autojump_clock: trio.testing.MockClock) -> None:
    watched, begin = Watched(), trio.current_time()
    first, second, moved, removed = map(request, ("first", "second", "moved", "removed"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.deadlines.run, watched.expire)
        watched.deadlines.set(second, begin + 20)
        watched.deadlines.set(moved, begin + 5)
        watched.deadlines.set(removed, begin + 6)
        await trio.sleep(1)
        watched.deadlines.set(first, begin + 10)
        watched.deadlines.set(moved, begin + 30)
        watched.deadlines.remove(removed)
        watched.deadlines.remove(removed)
        await trio.sleep(60)
        watched.deadlines.set(removed, begin + 62)
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    found = [(name, round(at - begin)) for name, at in watched.expired]
    assert found == [("first", 10), ("second", 20), ("moved", 30), ("removed", 62)]


async def test_a_deadline_that_moves_closer_wakes_the_task(autojump_clock: trio.testing.MockClock) -> None:
    watched, begin, only = Watched(), trio.current_time(), request("only")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.deadlines.run, watched.expire)
        watched.deadlines.set(only, begin + 1000)
        await trio.sleep(1)
        watched.deadlines.set(only, begin + 2)
        await trio.sleep(5)
        assert [name for name, _ in watched.expired] == ["only"]
        nursery.cancel_scope.cancel()


async def test_an_expired_request_may_end_others(autojump_clock: trio.testing.MockClock) -> None:
    deadlines, expired = Deadlines(), list[str]()
    both = [request("a"), request("b")]

    def expire(each: Request) -> None:
        expired.append(each.name)
        for other in both:
            deadlines.remove(other)

    async with trio.open_nursery() as nursery:
        for each in both:
            deadlines.set(each, trio.current_time() + 1)
        nursery.start_soon(deadlines.run, expire)
        await trio.sleep(2)
        nursery.cancel_scope.cancel()
    assert expired == ["a"]


async def test_entries_are_bounded_by_the_registered_requests() -> None:
    deadlines, kept = Deadlines(), request("kept")
    for number in range(10 * STALE):
        deadlines.set(kept, number)
        passing = request(str(number))
        deadlines.set(passing, number + 1e6)
        deadlines.remove(passing)
    assert len(deadlines._heap) <= 2 + STALE + 2
    assert len(deadlines._requests) == 1


async def test_requests_expire_in_order_after_stale_entries_were_removed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watched, begin, moving = Watched(), trio.current_time(), request("moving")
    for number in range(9, 0, -1):
        watched.deadlines.set(request(str(number)), begin + number)
    for number in range(3 * STALE):
        watched.deadlines.set(moving, begin + 1000 - number)
    assert len(watched.deadlines._heap) <= 2 * 10 + STALE
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.deadlines.run, watched.expire)
        await trio.sleep(9.5)
        nursery.cancel_scope.cancel()
    assert [(name, round(at - begin)) for name, at in watched.expired] == [(str(n), n) for n in range(1, 10)]
