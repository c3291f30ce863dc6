"""The client's end of an edge: what it sends at once, and what waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from omni_actors.supervisor.edges import InputEdge
from ringbuf import Consumer, Ring

RING_BYTES = 64 * 1024
WATCHDOG_S = 10.0


class Edge:
    """An edge and the other end of its ring."""

    def __init__(self) -> None:
        self.ring, self.killed = Ring.create(RING_BYTES), list[str]()
        self.edge = InputEdge(self.ring.claim_producer(), self.killed.append)
        self.consumer: Consumer = self.ring.claim_consumer()

    def received(self) -> list[bytes]:
        found = []
        while (frame := self.consumer.try_recv()) is not None:
            with frame:
                found.append(bytes(frame.data))
        return found


@contextmanager
def opened() -> Iterator[Edge]:
    there = Edge()
    yield there
    there.edge.close()
    there.consumer.close()
    there.ring.close()


def of(letter: bytes, size: int) -> list[memoryview]:
    return [memoryview(letter * size)]


async def test_a_message_with_room_is_sent_at_once() -> None:
    with opened() as there:
        assert there.edge.try_send([*of(b"a", 3), *of(b"b", 2)]) == 5
        assert there.received() == [b"aaabb"]


async def test_a_message_that_passes_in_fragments_is_not_sent_at_once() -> None:
    with opened() as there:
        assert there.edge.try_send(of(b"a", RING_BYTES)) is None
        assert there.received() == []


async def test_a_message_without_room_is_not_sent_at_once_and_waits() -> None:
    with opened() as there:
        size = RING_BYTES // 4
        filled = 0
        while there.edge.try_send(of(b"f", size)) is not None:
            filled += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(there.edge.send, of(b"w", size))
            await trio.testing.wait_all_tasks_blocked()
            with there.consumer.try_recv() or pytest.fail("nothing was sent"):
                pass  # there is room again
        assert there.received() == [b"f" * size] * (filled - 1) + [b"w" * size]
        assert there.edge.try_send(of(b"o", size)) == size


async def test_closing_an_edge_ends_a_send_that_waits_for_room() -> None:
    with opened() as there:
        while there.edge.try_send(of(b"f", RING_BYTES // 4)) is not None:
            pass

        async def send() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await there.edge.send(of(b"w", RING_BYTES // 4))

        with trio.fail_after(WATCHDOG_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await trio.testing.wait_all_tasks_blocked()
                there.edge.close()
                there.ring.close()  # as the supervisor does: no bell rings after that


async def test_a_send_to_a_dead_worker_says_so() -> None:
    with opened() as there:
        there.consumer.close()
        with pytest.raises(trio.ClosedResourceError):
            there.edge.try_send(of(b"a", 1))
        assert there.killed == []
