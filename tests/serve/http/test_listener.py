"""The connections of a listener: limits, lack of descriptors, the drain."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
import trio

from omni_actors.serve.http import listener
from tests.support.http_listener import GET, POST, Server, error_of, listening, read_all, read_answer, read_until_cut

REFUSED = "omni_http_refused_connections_total"


async def test_connections_above_a_limit_are_refused_and_counted(server: Server) -> None:
    async with contextlib.AsyncExitStack() as held:
        uploads = [await held.enter_async_context(await server.connect()) for _ in range(3)]
        for stream in uploads:
            await stream.send_all(POST + b"Content-Length: 4\r\n\r\n")
        assert error_of(await server.ask()) == (503, "too_many_connections")
        elsewhere = await held.enter_async_context(await server.connect("127.0.0.2"))
        await elsewhere.send_all(POST + b"Content-Length: 4\r\n\r\n")
        assert error_of(await server.ask(source="127.0.0.3")) == (503, "too_many_connections")
        await uploads[0].aclose()
        while (await server.ask(GET))[0] != 200:  # until the server has seen it
            await trio.lowlevel.checkpoint()
        refusals = {
            limit: server.registry.get_sample_value(REFUSED, {"limit": limit}) for limit in ("total", "address")
        }
        assert refusals["total"] == 1
        assert (refusals["address"] or 0) >= 1


async def test_addresses_that_count_as_one_share_its_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a /64 of IPv6 do; here, those of a /24 of IPv4."""
    monkeypatch.setattr(listener, "counted_address", lambda host: host.rpartition(".")[0])
    async with contextlib.AsyncExitStack() as held:
        streams = [await held.enter_async_context(await server.connect(f"127.0.0.{n}")) for n in (1, 2, 3)]
        for stream in streams:
            await stream.send_all(POST + b"Content-Length: 1\r\n\r\n")
        assert error_of(await server.ask(source="127.0.0.4")) == (503, "too_many_connections")
        assert server.registry.get_sample_value(REFUSED, {"limit": "address"}) == 1
        await streams[1].send_all(b"x")
        assert (await read_answer(streams[1]))[2] == b"x"
        answer = await server.ask(GET, source="127.0.0.4")
        assert answer[0] == 200, "an idle connection of the same network makes room"


async def test_the_longest_idle_connection_makes_room(server: Server) -> None:
    """Idle connections never keep a client out, and a connection with a request in progress is not closed."""
    async with contextlib.AsyncExitStack() as held:
        streams = [await held.enter_async_context(await server.connect(f"127.0.0.{n}")) for n in (1, 2, 3, 4)]
        for stream in streams:
            await stream.send_all(GET)
            assert (await read_answer(stream))[0] == 200
        await streams[0].send_all(POST + b"Content-Length: 1\r\n\r\n")
        while len(server.app.scopes) < 5:
            await trio.lowlevel.checkpoint()
        assert (await server.ask(GET, source="127.0.0.5"))[0] == 200
        assert await read_all(streams[1]) == b""
        await streams[0].send_all(b"x")
        assert (await read_answer(streams[0]))[2] == b"x"
        await streams[3].send_all(GET)
        assert (await read_answer(streams[3]))[0] == 200


async def test_a_lack_of_descriptors_does_not_end_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept: Callable[[socket.socket], Any] = socket.socket.accept
    failures = [OSError(24, "Too many open files"), OSError(23, "Too many open files in system")]

    def sometimes(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", sometimes)
    assert (await server.ask(GET))[0] == 200
    [record] = caplog.records
    assert "cannot accept a connection" in record.getMessage()


async def test_a_drain_closes_idle_connections_and_lets_requests_end() -> None:
    async with (
        listening(drain_s=1000.0) as server,
        await server.connect() as idle,
        await server.connect() as busy,
    ):
        await idle.send_all(GET)
        await read_answer(idle)
        await busy.send_all(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.app.started.wait()
        server.stop.set()
        assert await read_all(idle) == b""
        server.app.may_end.set()
        status, headers, body = await read_answer(busy)
        assert (status, headers["connection"], body) == (200, "close", b"the end")
        assert not server.requests_were_ended.is_set()


async def test_a_drain_ends_a_request_that_takes_too_long(server: Server) -> None:
    async with await server.connect() as endless:
        await endless.send_all(POST + b"Content-Length: 4\r\n\r\n")
        while not server.app.scopes:
            await trio.lowlevel.checkpoint()
        server.stop.set()
        assert await read_until_cut(endless) == b""
        assert server.requests_were_ended.is_set()


async def test_a_connection_that_arrives_with_the_stop_is_not_taken_for_a_lost_socket() -> None:
    for _ in range(20):  # trio chooses at random whether the socket is closed before it is accepted from
        async with listening() as server:
            await trio.testing.wait_all_tasks_blocked()
            with socket.create_connection(server.address):
                server.stop.set()
                await trio.testing.wait_all_tasks_blocked()
