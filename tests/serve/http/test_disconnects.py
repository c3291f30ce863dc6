"""Clients that disconnect, that half-close their connection, and that read nothing."""

from __future__ import annotations

import contextlib
import socket
import struct
from itertools import count

import pytest
import trio
import trio.testing

from omni_actors.serve.http import buffered_socket, exchange
from tests.support.http_listener import POST, Server, read_answer, read_until_cut


async def test_a_pipelined_byte_does_not_hide_a_disconnect(server: Server) -> None:
    async with await server.connect() as stream:
        await stream.send_all(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\nG")
        await server.app.started.wait()
    await server.app.cancelled.wait()


async def test_too_many_pipelined_bytes_end_the_connection(server: Server) -> None:
    async with await server.connect() as stream:
        await stream.send_all(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(bytes(10_000_000))
        await server.app.cancelled.wait()


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_a_request_after_a_complete_answer_is_not_pipelined(server: Server, method: bytes) -> None:
    """The client has all bytes of its answer before the handler has returned. So its next request may be large."""
    body = bytes(1_000_000)
    async with await server.connect() as stream, trio.open_nursery() as nursery:
        await stream.send_all(method + b" /complete HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"hello" if method == b"GET" else b"\r\n\r\n"):
            answer += await stream.receive_some()
        nursery.start_soon(stream.send_all, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await trio.testing.wait_all_tasks_blocked(0.01)
        server.app.may_end.set()
        status, _, echoed = await read_answer(stream)
    assert (status, echoed) == (200, body)


async def test_a_send_is_cancelled_only_while_the_client_accepts_nothing() -> None:
    """A request may be cut at the moment when a piece is being sent. The client then still gets that piece."""
    ours, theirs = trio.socket.socketpair()
    with ours, theirs:
        connection = buffered_socket.BufferedSocket(ours)
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.send(b"piece")
        assert not scope.cancelled_caught
        assert await theirs.recv(100) == b"piece"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.send, bytes(100_000_000))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert nursery.cancel_scope.cancelled_caught


@pytest.mark.parametrize("path", [b"/wait", b"/stream"])
@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_disconnect_cancels_the_request(server: Server, path: bytes, way: str) -> None:
    """Also if the response has begun and pauses."""
    async with await server.connect() as stream:
        await stream.send_all(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.app.started.wait()
        while path == b"/stream" and b"data: 1" not in await stream.receive_some():
            pass  # so that closing does not reset
        if way == "reset":
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await server.app.cancelled.wait()


@pytest.mark.parametrize("path", [b"/wait", b"/stream", b"/sound"])
async def test_a_client_that_half_closes_gets_its_whole_answer(
    server: Server, path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probes (interim responses and comments) are not part of the response."""
    looks, enough = count(1), trio.Event()
    check_error = buffered_socket.BufferedSocket.check_error

    def look(self: buffered_socket.BufferedSocket) -> None:
        check_error(self)
        if next(looks) == 3:
            enough.set()

    monkeypatch.setattr(buffered_socket.BufferedSocket, "check_error", look)
    async with await server.connect() as stream:
        await stream.send_all(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.app.started.wait()
        await stream.send_eof()
        await enough.wait()  # the server knows of the half close, and has tested the connection three times
        assert not server.app.cancelled.is_set()
        server.app.may_end.set()
        status, _, body = await read_answer(stream)
        assert (status, body.replace(b":\n\n", b"")) == (
            200,
            b"the end" if path == b"/wait" else b"data: 1\n\ndata: 2\n\n",
        )
        assert (b":\n\n" in body) == (path == b"/stream")


async def test_a_half_closed_client_that_closes_later_cancels_its_request(server: Server) -> None:
    async with await server.connect() as stream:
        await stream.send_all(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.app.started.wait()
        await stream.send_eof()
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100")
        assert not server.app.cancelled.is_set()
    await server.app.cancelled.wait()


async def test_a_half_closed_http_1_0_client_has_limited_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await server.connect() as stream:
        await stream.send_all(b"GET /now HTTP/1.0\r\n\r\n")
        await stream.send_eof()
        assert (await read_answer(stream))[2] == b"hello"
    monkeypatch.setattr(exchange, "UNPROBED_S", 0.1)
    async with await server.connect() as stream:
        await stream.send_all(b"GET /wait HTTP/1.0\r\n\r\n")
        await stream.send_eof()
        await server.app.cancelled.wait()


async def test_a_client_that_reads_nothing_is_disconnected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_socket, "SEND_TIMEOUT_S", 0.2)
    closed, close = trio.Event(), buffered_socket.BufferedSocket.close

    def note(self: buffered_socket.BufferedSocket) -> None:
        close(self)
        closed.set()

    monkeypatch.setattr(buffered_socket.BufferedSocket, "close", note)
    size = 20_000_000
    async with await server.connect() as stream:
        await stream.send_all(POST + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        await closed.wait()
        assert len(await read_until_cut(stream)) < size
