"""Sending responses to connections that accept little or nothing, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from omni_actors.errors import RequestError, SlowConsumer
from omni_actors.generation import Generation
from omni_actors.serve.api.responses import JSONResponse, StreamedResponse, WholeResponse, collecting
from tests.support.simulated_system import PIECE, PIECES, WATCHDOG_S, SimulatedSystem, open_simulated_system


class Connection:
    """Accepts ``room`` parts of a response, and then nothing."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.sent: list[dict[str, Any]] = []
        self.room = room
        self.stuck = trio.Event()

    async def send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        if len(self.sent) == self.room:
            self.stuck.set()
            await trio.sleep_forever()
        self.sent.append(message)

    @property
    def complete(self) -> bool:
        return self.sent[-1]["type"] == "http.response.body" and not self.sent[-1].get("more_body")


async def stream(world: SimulatedSystem, **asked: Any) -> StreamedResponse:
    async def pieces(generation: Generation) -> AsyncGenerator[bytes, None]:
        async for output in generation:
            yield b"%d" % output.data["n"]

    generation = world.ask(**asked)
    return await StreamedResponse(generation, pieces(generation), "text/plain", lambda error: b"sorry").start()


async def whole(world: SimulatedSystem) -> WholeResponse:
    generation = world.ask()
    with collecting(generation):
        return WholeResponse(generation, JSONResponse([output.data["n"] async for output in generation]))


async def serve(answer: StreamedResponse | WholeResponse, connection: Connection) -> None:
    async def receive() -> Any:
        raise AssertionError("the request is read")

    with trio.fail_after(WATCHDOG_S):
        await answer({"type": "http"}, receive, connection.send)


@pytest.mark.parametrize("make", [stream, whole])
async def test_an_accepted_reply_is_complete_and_charges_nothing_afterwards(
    autojump_clock: MockClock, make: Any
) -> None:
    async with open_simulated_system() as world:
        connection = Connection()
        await serve(await make(world), connection)
        assert connection.complete
        assert (world.unread, world.ended("done")) == (0, 1)


async def test_a_stream_whose_connection_is_stuck_is_cut_without_an_end(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        connection = Connection(room=3)
        await serve(await stream(world), connection)
        assert [message.get("body") for message in connection.sent] == [None, b"0", b"1"]
        assert not connection.complete, "half an answer is not to be taken for a whole one"
        assert (world.unread, world.omni.in_flight, world.ended("SlowConsumer")) == (0, 0, 1)


async def test_a_stream_that_is_cut_while_its_connection_takes_a_piece_ends_with_the_error(
    autojump_clock: MockClock,
) -> None:
    class Slow(Connection):
        async def send(self, message: Any) -> None:
            with trio.CancelScope(shield=True):  # as a socket that has room
                await trio.sleep(1)
            self.sent.append(message)

    async with open_simulated_system() as world:
        connection = Slow()
        await serve(await stream(world, deadline_s=2.5), connection)
        assert [message.get("body") for message in connection.sent] == [None, b"0", b"1", b"sorry", b""]
        assert connection.complete


async def test_the_last_piece_is_charged_while_it_is_sent(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world, trio.open_nursery() as nursery:
        connection = Connection(room=PIECES)  # the head, and all but one
        nursery.start_soon(serve, await stream(world), connection)
        await connection.stuck.wait()
        await trio.sleep(1)
        assert PIECE < world.unread < 2 * PIECE
        assert world.ended("done") == 0
        nursery.cancel_scope.cancel()


async def test_a_whole_reply_is_charged_until_its_connection_has_it(autojump_clock: MockClock) -> None:
    async with open_simulated_system(max_requests=1) as world, trio.open_nursery() as nursery:
        connection = Connection(room=1)
        nursery.start_soon(serve, await whole(world), connection)
        await connection.stuck.wait()
        await trio.sleep(5)
        assert world.unread > PIECE * PIECES
        assert world.omni.in_flight == 1
        assert len([output async for output in world.ask(pieces=1)]) == 1, "it goes for a newcomer"
        assert (world.unread, world.ended("SlowConsumer")) == (0, 1)
    assert not connection.complete


async def test_a_whole_reply_that_is_not_accepted_is_cut(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world, trio.open_nursery() as nursery:
        connection = Connection(room=1)
        nursery.start_soon(serve, await whole(world), connection)
        await connection.stuck.wait()
        await trio.sleep(20)
        assert (world.unread, world.ended("SlowConsumer")) == (0, 1)
    assert not connection.complete


async def test_a_disconnect_during_a_whole_reply_frees_its_output(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        async with trio.open_nursery() as nursery:
            connection = Connection(room=1)
            nursery.start_soon(serve, await whole(world), connection)
            await connection.stuck.wait()
            nursery.cancel_scope.cancel()
        assert (world.unread, world.omni.in_flight) == (0, 0)


async def test_a_request_that_ends_before_its_reply_is_sent_is_an_error(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        generation = world.ask(deadline_s=50)
        with collecting(generation):
            answer = WholeResponse(generation, JSONResponse([output.data["n"] async for output in generation]))
        await trio.sleep(60)
        connection = Connection()
        with pytest.raises(RequestError) as caught:
            await serve(answer, connection)
        assert not isinstance(caught.value, SlowConsumer)
        assert connection.sent == []
