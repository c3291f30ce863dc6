"""One connection, byte by byte: real sockets, and a small app in this process behind the real listener."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from starlette.types import Message, Receive, Scope, Send

from omni_actors.serve import connection, exchange, wire
from omni_actors.serve.listener import Listener

GET = b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /body HTTP/1.1\r\nHost: x\r\n"


class App:
    """/now answers at once, /body with its body, /wait when it may, /stream with an event and the rest when it may."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.may_end, self.started, self.cancelled = trio.Event(), trio.Event(), trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["path"] == "/early":
            await answer(send, b"early", status=401)
            return
        body = b""
        while (message := await receive())["more_body"]:
            body += message["body"]
        body += message["body"]
        match scope["path"]:
            case "/now":
                await answer(send, b"hello")
            case "/body":
                await answer(send, body)
            case "/bug":
                raise ValueError("an app's bug")
            case "/half":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"half", "more_body": True})
            case "/wait" | "/stream" | "/sound":
                await self._slowly(scope["path"], send)
            case _:
                await answer(send, scope["path"].encode(), status=404)

    async def _slowly(self, path: str, send: Send) -> None:
        try:
            if path != "/wait":
                kind = b"text/event-stream" if path == "/stream" else b"audio/wav"
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            self.started.set()
            await self.may_end.wait()
        except trio.Cancelled:
            self.cancelled.set()
            raise
        if path == "/wait":
            await answer(send, b"the end")
        else:
            await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def answer(send: Send, body: bytes, status: int = 200) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    message: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(message)
    await send({"type": "http.response.body", "body": body})


class Server:
    """A listener with its app, for as long as the test lasts."""

    def __init__(self, app: App, address: tuple[str, int], stop: trio.Event) -> None:
        self.app, self.address, self.stop = app, address, stop
        self.requests_were_ended = trio.Event()

    async def connect(self, source: str = "127.0.0.1") -> trio.SocketStream:
        return await trio.open_tcp_stream(*self.address, local_address=source)

    async def ask(self, *pieces: bytes, source: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
        """The first answer to these bytes, whatever follows."""
        stream = await self.connect(source)
        async with stream:
            for piece in pieces:
                await stream.send_all(piece)
            return await read_answer(stream)


async def read_answer(stream: trio.SocketStream) -> tuple[int, dict[str, str], bytes]:
    def read() -> tuple[int, dict[str, str], bytes]:
        with socket.socket(fileno=socket.dup(stream.socket.fileno())) as copy:
            copy.settimeout(30)
            with contextlib.closing(http.client.HTTPResponse(copy)) as response:
                response.begin()
                return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    return await trio.to_thread.run_sync(read)


async def read_all(stream: trio.SocketStream) -> bytes:
    return b"".join([data async for data in stream])


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            app, stop = App(), trio.Event()
            with socket.create_server(("127.0.0.1", 0)) as sock:
                running = Server(app, sock.getsockname(), stop)
                listener = Listener(sock, app, max_connections=4, max_per_address=3)
                nursery.start_soon(listener.run, stop, 0.1, running.requests_were_ended.set)
                yield running
                stop.set()


def error_of(found: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    status, headers, body = found
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    [error] = json.loads(body).values()
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["code"]


# requests and answers


async def test_an_answer_is_dated_and_the_connection_is_kept(server: Server) -> None:
    async with await server.connect() as stream:
        for _ in range(2):
            await stream.send_all(GET)
            status, headers, body = await read_answer(stream)
            assert (status, body, "connection" in headers) == (200, b"hello", False)
            assert headers["date"].endswith("GMT")


async def test_the_scope_of_a_request(server: Server) -> None:
    target = b"/a%20%C3%A9/%FF%00?x=%41"
    await server.ask(b"PATCH " + target + b" HTTP/1.1\r\nHost: x\r\nX-Name: caf\xe9\r\n\r\n")
    [scope] = server.app.scopes
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == (
        "/a é/\ufffd\0",
        b"/a%20%C3%A9/%FF%00",
        b"x=%41",
    )
    assert (scope["method"], scope["http_version"], scope["scheme"]) == ("PATCH", "1.1", "http")
    assert (b"x-name", b"caf\xe9") in scope["headers"]
    assert scope["server"] == server.address


@pytest.mark.parametrize("target", [b"http://other/now?x=1", b"/now", b"//now", b"*", b"now"])
async def test_odd_targets(server: Server, target: bytes) -> None:
    status, _, body = await server.ask(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, body) in [(200, b"hello"), (404, target)]


async def test_requests_byte_by_byte_and_pipelined(server: Server) -> None:
    body = POST + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: 1\r\n\r\n"
    last = b"GET /now HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with await server.connect() as stream:
        for byte in body + b"\r\n" + last:
            await stream.send_all(bytes([byte]))
        both = await read_all(stream)
    assert both.count(b"HTTP/1.1 200") == 2
    assert both.index(b"abcde") < both.index(b"hello")


async def test_head_has_no_body_and_an_old_client_no_keep_alive(server: Server) -> None:
    async with await server.connect() as stream:
        await stream.send_all(b"HEAD /now HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /now HTTP/1.0\r\n\r\n")
        both = await read_all(stream)
    assert both.count(b"content-length: 5") == 2
    assert both.count(b"hello") == 1


async def test_an_upgrade_is_answered_as_an_ordinary_request(server: Server) -> None:
    for upgrade in (
        b"h2c\r\nHTTP2-Settings: \xff?",
        b"websocket\r\nSec-WebSocket-Protocol: \xe9\r\nSec-WebSocket-Key: x",
    ):
        async with await server.connect() as stream:
            await stream.send_all(b"GET /now HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: " + upgrade)
            await stream.send_all(b"\r\n\r\n" + GET)
            assert (await read_answer(stream))[0] == 200


# what is no request


@pytest.mark.parametrize(
    ("packet", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"G\xc3\x89T / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nna\xc3\xafve: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: \0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\na:" + b" " * 60000 + b"\x0b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % 2**80, 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcde", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\na:" + b" " * 60000 + b"\x0b\r\n\r\n", 431),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"CONNECT", 408),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 505),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"x" * 70000, 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 300 + b"\r\n", 431),
    ],
)
async def test_what_is_no_http_is_answered_and_closed(
    server: Server, packet: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once; and the next client is served."""
    monkeypatch.setattr(connection, "HEAD_S", 0.5 if packet == b"CONNECT" else 10)
    found = await server.ask(packet)
    assert error_of(found)[0] == status
    assert not server.app.scopes or server.app.scopes[0]["path"] == "/body"
    assert (await server.ask(GET))[0] == 200


async def test_an_exception_ends_its_connection_with_a_log_record(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with await server.connect() as other, await server.connect() as stream:
        await stream.send_all(b"GET /bug HTTP/1.1\r\nHost: x\r\n\r\n")
        assert error_of(await read_answer(stream)) == (500, "internal_error")
        await other.send_all(GET)
        assert (await read_answer(other))[0] == 200
        port = stream.socket.getsockname()[1]
    while not caplog.records:
        await trio.lowlevel.checkpoint()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert f"127.0.0.1:{port}" in record.getMessage()
    assert "an app's bug" in caplog.text


async def test_an_exception_in_the_connections_own_code_is_contained_too(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> None:
            raise UnicodeDecodeError("ascii", b"\xe9", 0, 1, "as a library does")

        patch.setattr(exchange, "_scope", broken)
        assert (await server.ask(GET))[0] == 500
        while not caplog.records:
            await trio.lowlevel.checkpoint()
    assert "as a library does" in caplog.text
    assert (await server.ask(GET))[0] == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_answer_that_stops_half_way_does_not_look_whole(server: Server, version: bytes) -> None:
    async with await server.connect() as stream:
        await stream.send_all(b"GET /half HTTP/" + version + b"\r\nHost: x\r\n\r\n")
        if version == b"1.0":
            with pytest.raises(trio.BrokenResourceError):
                await read_all(stream)
        else:
            with pytest.raises(http.client.IncompleteRead):
                await read_answer(stream)


# deadlines


async def test_a_byte_now_and_then_does_not_extend_the_time_for_a_head(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the first request nor of the next one."""
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    for before in (b"", GET):
        async with await server.connect() as stream, trio.open_nursery() as nursery:
            if before:
                await stream.send_all(before)
                await read_answer(stream)

            async def drip(stream: trio.SocketStream = stream) -> None:
                with contextlib.suppress(trio.BrokenResourceError):
                    for byte in GET * 100:
                        await stream.send_all(b"x" if byte == 13 else bytes([byte]))
                        await trio.sleep(0.02)

            nursery.start_soon(drip)
            assert error_of(await read_answer(stream)) == (408, "head_too_slow")
            nursery.cancel_scope.cancel()


async def test_connections_without_a_request_are_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept one has more time than a new one."""
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    monkeypatch.setattr(connection, "IDLE_S", 0.4)
    async with await server.connect() as new, await server.connect() as kept:
        await kept.send_all(GET)
        await read_answer(kept)
        began = trio.current_time()
        assert await read_all(new) == b""
        assert await read_all(kept) == b""
        assert trio.current_time() - began >= 0.2


def test_idle_connections_outlive_those_of_proxies() -> None:
    assert connection.IDLE_S > 60


# bodies


async def test_100_continue_is_sent_when_the_app_wants_the_body(server: Server) -> None:
    head = b" HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    async with await server.connect() as stream:
        await stream.send_all(b"POST /body" + head)
        assert await stream.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await stream.send_all(b"abcd")
        assert (await read_answer(stream))[2] == b"abcd"
    async with await server.connect() as stream:
        await stream.send_all(b"POST /early" + head)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 401")


async def test_half_a_body_and_a_closed_connection_end_the_request_at_once(server: Server) -> None:
    async with await server.connect() as stream:
        await stream.send_all(POST + b"Content-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        await stream.receive_some()
        await stream.send_all(b"ab")
        await stream.send_eof()
        with trio.fail_after(5):
            assert await read_all(stream) == b""


async def test_a_refused_upload_is_answered_at_once_and_ends_soon(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends on for a while still reads its answer; one that never ends is cut."""
    monkeypatch.setattr(wire, "LINGER_BYTES", 8_000_000)
    head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n"
    async with await server.connect() as stream:
        await stream.send_all(head + bytes(4_000_000))
        assert (await read_answer(stream))[::2] == (401, b"early")
    async with await server.connect() as stream:
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(head + bytes(99_000_000))


# clients that leave


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


@pytest.mark.parametrize("path", [b"/wait", b"/stream"])
@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_client_that_leaves_cancels_its_request(server: Server, path: bytes, way: str) -> None:
    """Also where the answer has begun and pauses."""
    async with await server.connect() as stream:
        await stream.send_all(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.app.started.wait()
        while path == b"/stream" and b"data: 1" not in await stream.receive_some():
            pass  # so that closing does not reset
        if way == "reset":
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with trio.fail_after(5):
        await server.app.cancelled.wait()


@pytest.mark.parametrize("path", [b"/wait", b"/stream", b"/sound"])
async def test_a_client_that_half_closes_gets_its_whole_answer(server: Server, path: bytes) -> None:
    """Interim answers and comments before it are no part of it, and it may close for good later."""
    async with await server.connect() as stream:
        await stream.send_all(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.app.started.wait()
        await stream.send_eof()
        await trio.sleep(0.2)  # some probes
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


async def test_an_old_client_that_half_closes_has_some_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await server.connect() as stream:
        await stream.send_all(b"GET /now HTTP/1.0\r\n\r\n")
        await stream.send_eof()
        assert (await read_answer(stream))[2] == b"hello"
    monkeypatch.setattr(exchange, "UNPROBED_S", 0.1)
    async with await server.connect() as stream:
        await stream.send_all(b"GET /wait HTTP/1.0\r\n\r\n")
        await stream.send_eof()
        await server.app.cancelled.wait()


async def test_a_client_that_takes_nothing_is_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "UNREAD_S", 0.2)
    size = 20_000_000
    async with await server.connect() as stream:
        await stream.send_all(POST + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        await trio.sleep(0.5)
        assert len(await read_until_cut(stream)) < size


async def read_until_cut(stream: trio.SocketStream) -> bytes:
    data = b""
    with contextlib.suppress(trio.BrokenResourceError):
        async for piece in stream:
            data += piece
    return data


# limits and the end


async def test_connections_above_a_limit_are_told_so(server: Server) -> None:
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


async def test_the_connection_that_is_idle_longest_makes_room(server: Server) -> None:
    """Idle ones never keep a client out, and one at work is not closed for it."""
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


async def test_running_out_of_descriptors_is_no_end(
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
    assert "cannot be accepted" in record.getMessage()


async def test_a_drain_closes_what_is_idle_and_lets_the_rest_end(server: Server) -> None:
    async with await server.connect() as idle, await server.connect() as busy, await server.connect() as endless:
        await idle.send_all(GET)
        await read_answer(idle)
        await busy.send_all(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.app.started.wait()
        await endless.send_all(POST + b"Content-Length: 4\r\n\r\n")
        server.stop.set()
        assert await read_all(idle) == b""
        server.app.may_end.set()
        status, headers, body = await read_answer(busy)
        assert (status, headers["connection"], body) == (200, "close", b"the end")
        assert not server.requests_were_ended.is_set()
        assert await read_until_cut(endless) == b""
        assert server.requests_were_ended.is_set()
