"""The stream of a request's outputs, tested without workers."""

from __future__ import annotations

import gc

import pytest
import trio
import trio.testing

from omni_actors.config import Limits
from omni_actors.errors import Aborted, RequestError
from omni_actors.orchestrator.deadlines import Deadlines
from omni_actors.orchestrator.lifecycle import Event
from omni_actors.orchestrator.pieces import Piece
from omni_actors.orchestrator.readers import PIECES_A_TURN, Readers
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.routes import Route
from omni_actors.orchestrator.stream import OutputStream
from omni_actors.protocol.messages import CLIENT


class Client:
    """A request with one stage, and what the orchestrator does to it."""

    def __init__(self) -> None:
        self.request = Request("r", Route(("s",), {}, {"s": (CLIENT,)}, {}), {}, {}, deadline_s=1.0, submitted=0.0)
        self.request.lifecycle.advance(Event.DISPATCH)
        self.aborted: list[Request] = []
        self.ended: list[Request] = []
        self.readers = Readers(Limits(), deadlines=Deadlines(), replicas={}, cut=self.cut, on_close=self.close)
        self.readers.admit(self.request)
        self.stream = OutputStream(self.request, self.readers, self.aborted.append)
        self._seq = 0

    def arrive(self, *, last: bool = False) -> None:
        self.request.lifecycle.advance(Event.OUTPUT)
        self.request.replay_state.output_arrived("s", last=last)
        self.readers.arrive(
            self.request, Piece(stage="s", data={"seq": self._seq}, tensors={}, last=last, arrived=0.0, nbytes=10)
        )
        self._seq += 1

    def end(self, event: Event, error: RequestError | None = None) -> None:
        self.request.lifecycle.advance(event)
        self.request.error = error
        self.request.output_wakeup.unpark_all()
        self.readers.end(self.request)

    def cut(self, request: Request, error: RequestError) -> None:
        raise AssertionError(f"{request.name} was cut: {error}")

    def close(self, request: Request) -> None:
        self.ended.append(request)

    async def read(self) -> int:
        return int((await anext(self.stream)).data["seq"])

    async def read_all(self, count: int) -> None:
        for _ in range(count):
            await self.read()


@pytest.fixture
async def client() -> Client:
    return Client()


async def test_the_final_piece_waits_for_the_statistics(client: Client) -> None:
    client.arrive()
    client.arrive(last=True)
    assert await client.read() == 0
    with trio.move_on_after(0) as scope:
        await client.read()
    assert scope.cancelled_caught
    client.end(Event.COMPLETE)
    assert await client.read() == 1
    assert client.request.account.charged == 0
    assert client.ended == [client.request]
    with pytest.raises(StopAsyncIteration):
        await client.read()


async def test_a_failure_is_raised_after_all_earlier_pieces_the_final_one_included(client: Client) -> None:
    client.arrive()
    client.arrive(last=True)
    client.end(Event.FAIL, Aborted())
    assert [await client.read(), await client.read()] == [0, 1]
    for _ in range(2):
        with pytest.raises(Aborted):
            await client.read()


async def test_a_cancelled_reader_loses_no_piece(client: Client) -> None:
    """The reader is cancelled before its wait, during it, and between a piece's arrival and the wake-up."""
    got: list[int] = []

    async def reader() -> None:
        got.append(await client.read())

    client.arrive()
    client.arrive()
    with trio.CancelScope() as before:
        before.cancel()
        await reader()
    assert got == []
    await reader()
    await reader()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        client.arrive()  # wakes the reader, which is cancelled before it runs
        nursery.cancel_scope.cancel()
    client.arrive()
    while len(got) < 4:
        with trio.fail_after(60):
            await reader()
    assert got == [0, 1, 2, 3]


async def test_a_prompt_reader_does_not_fall_behind_pieces_that_arrive_together(client: Client) -> None:
    """In each turn of the event loop, as many pieces arrive as the request has stages with output: here three."""
    stages, turns = 3, 100
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.read_all, stages * turns)
        for _ in range(turns):
            for _ in range(stages):
                client.arrive()
            assert len(client.request.pieces) <= 2 * stages, "those of this turn, and of the turn before"
            await trio.lowlevel.checkpoint()
        client.arrive()


async def test_other_tasks_run_while_a_reader_catches_up(client: Client) -> None:
    left: list[int] = []

    async def other() -> None:
        while len(client.request.pieces) > 1:
            left.append(len(client.request.pieces))
            await trio.lowlevel.checkpoint()

    for _ in range(8 * PIECES_A_TURN):
        client.arrive()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await client.read_all(8 * PIECES_A_TURN - 1)
    assert len(left) >= 6


async def test_two_readers_share_the_pieces_and_both_see_the_end(client: Client) -> None:
    got: list[int] = []
    ends: list[str] = []

    async def reader() -> None:
        async for piece in client.stream:
            got.append(piece.data["seq"])  # noqa: PERF401 - two readers, one list
        ends.append("end")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        nursery.start_soon(reader)
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            client.arrive()
        await trio.testing.wait_all_tasks_blocked()
        client.arrive(last=True)
        client.end(Event.COMPLETE)
    assert got == [0, 1, 2, 3]
    assert ends == ["end", "end"]


async def test_dropping_the_stream_aborts_from_the_event_loop(client: Client) -> None:
    request, aborted = client.request, client.aborted
    del client.stream
    assert not aborted, "the garbage collector may run anywhere: only the event loop aborts"
    await trio.testing.wait_all_tasks_blocked()
    assert aborted == [request]


async def test_a_stream_dropped_by_another_thread_aborts_from_the_event_loop(client: Client) -> None:
    request, aborted = client.request, client.aborted
    await trio.to_thread.run_sync(client.__dict__.pop, "stream")  # drops the last reference
    gc.collect()
    with trio.fail_after(60):
        while not aborted:  # noqa: ASYNC110 - the thread may still hold what it returned
            await trio.sleep(0.001)
    assert aborted == [request]


def test_a_stream_may_outlive_its_event_loop() -> None:
    async def make() -> Client:
        return Client()

    client = trio.run(make)
    del client.stream
    assert not client.aborted
