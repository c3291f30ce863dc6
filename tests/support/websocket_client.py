"""A WebSocket's client end on a trio stream, for tests that look at single frames: wsproto as the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from wsproto import ConnectionType, WSConnection, events

from tests.support.http_listener import Server


class Client:
    """A client whose handshake was accepted."""

    def __init__(self, stream: trio.SocketStream, frames: WSConnection) -> None:
        self.stream, self._frames = stream, frames

    async def send(self, *sent: events.Event) -> None:
        await self.stream.send_all(b"".join(map(self._frames.send, sent)))

    async def receive(self) -> events.Event:
        """Return the next event. Parts of one message are joined."""
        parts: list[str] = []
        while True:
            for event in self._frames.events():
                if isinstance(event, events.TextMessage):
                    parts.append(event.data)
                    if not event.message_finished:
                        continue
                    return events.TextMessage("".join(parts))
                return event
            self._frames.receive_data(await self.stream.receive_some() or None)


def head(path: str, *, key: str = "dGhlIHNhbXBsZSBub25jZQ==", version: int = 13, more: str = "") -> bytes:
    """The head of a request for a WebSocket."""
    lines = ["Host: x", "Connection: keep-alive, Upgrade", "Upgrade: WebSocket", f"Sec-WebSocket-Version: {version}"]
    lines += [f"Sec-WebSocket-Key: {key}"] if key else []
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, more]).encode() + (b"\r\n\r\n" if more else b"\r\n")


@asynccontextmanager
async def connected(server: Server, path: str) -> AsyncIterator[Client]:
    stream = await server.connect()
    async with stream:
        frames = WSConnection(ConnectionType.CLIENT)
        await stream.send_all(frames.send(events.Request(host="x", target=path)))
        client = Client(stream, frames)
        assert isinstance(await client.receive(), events.AcceptConnection)
        yield client
