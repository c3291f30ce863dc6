"""A listener in this process, on a real socket, with a small app: for tests that look at single bytes."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from omni_actors.serve.http.listener import HTTPListener

MAX_BODY_BYTES, MAX_MESSAGE_BYTES = 1 << 30, 1 << 20
GET = b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /body HTTP/1.1\r\nHost: x\r\n"


class App:
    """/now answers at once, /body with its body, /wait once ``may_end`` is set.

    /stream sends an event at once, and the rest once ``may_end`` is set. /complete sends all bytes of its answer, and
    ends it once ``may_end`` is set.

    Of WebSockets, /echo sends each message back and closes with 4000 at "close"; /closed refuses, /denied answers with
    403 and a body, /bug raises, /quiet is /echo once ``may_end`` is set. /unread sends until ``may_end`` is set, then
    closes, and sets ``closed``. ``disconnects`` has the codes with which they ended.
    """

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.disconnects: list[int] = []
        self.may_end, self.started, self.cancelled = trio.Event(), trio.Event(), trio.Event()
        self.closed = trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["type"] == "websocket":
            await self._talk(scope["path"], receive, send)
            return
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
            case "/complete":
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
                await send({"type": "http.response.body", "body": b"hello", "more_body": True})
                await self.may_end.wait()
                await send({"type": "http.response.body", "body": b""})
            case "/wait" | "/stream" | "/sound":
                await self._slowly(scope["path"], send)
            case _:
                await answer(send, scope["path"].encode(), status=404)

    async def _talk(self, path: str, receive: Receive, send: Send) -> None:
        assert await receive() == {"type": "websocket.connect"}
        if path == "/closed":
            await send({"type": "websocket.close"})
            return
        if path == "/denied":
            await send({"type": "websocket.http.response.start", "status": 429, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b"not now"})
            return
        await send({"type": "websocket.accept", "subprotocol": None})
        self.started.set()
        if path == "/quiet":
            await self.may_end.wait()
        if path == "/unread":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_endlessly, send)
                await self.may_end.wait()
                nursery.cancel_scope.cancel()
            await send({"type": "websocket.close"})
            self.closed.set()
            return
        if path == "/bug":
            raise ValueError("an app's bug")
        while (message := await receive())["type"] == "websocket.receive":
            if message.get("text") == "close":
                await send({"type": "websocket.close", "code": 4000, "reason": "asked"})
            else:
                with contextlib.suppress(OSError):
                    await send({**message, "type": "websocket.send"})
        self.disconnects.append(message["code"])

    async def _send_endlessly(self, send: Send) -> None:
        while True:
            await send({"type": "websocket.send", "bytes": bytes(100_000)})

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
        self.registry = CollectorRegistry()
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


@asynccontextmanager
async def listening(drain_s: float = 0.1, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Four connections at a time, three of one address. tls: the context of the server."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            with socket.create_server(("127.0.0.1", 0)) as sock:
                running = Server(App(), sock.getsockname(), trio.Event())
                limits = {"max_connections": 4, "max_per_address": 3, "max_body_bytes": MAX_BODY_BYTES}
                limits["max_message_bytes"] = MAX_MESSAGE_BYTES
                listener = HTTPListener(sock, running.app, running.registry, tls=lambda: tls, **limits)
                nursery.start_soon(listener.run, running.stop, drain_s, running.requests_were_ended.set)
                yield running
                running.stop.set()


def error_of(found: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    status, headers, body = found
    assert headers["connection"].endswith("close")
    assert headers["content-type"] == "application/json"
    [error] = json.loads(body).values()
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["code"]


async def read_until_cut(stream: trio.SocketStream) -> bytes:
    data = b""
    with contextlib.suppress(trio.BrokenResourceError):
        async for piece in stream:
            data += piece
    return data
