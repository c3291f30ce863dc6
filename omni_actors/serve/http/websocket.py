"""One WebSocket: wsproto's frames on one side, ASGI on the other.

Rules
1. One task reads frames, and one writes them. The application hands a whole message to the writer, so cancelling the
   application never cuts a frame. Both wait for the application, so backpressure reaches the client. The writer sends a
   long message in fragments, because wsproto computes long for a long frame. There is a checkpoint after each fragment,
   and no other frame between them.
2. A message is refused when it exceeds ``max_message_bytes`` (close code 1009), not when it is complete. wsproto gets
   ``PARSED_BYTES`` at a time, so that no client can make it compute for more than a few milliseconds without a pause.
   There are no extensions: a compressed message could be larger than it looks.
3. A client that sends nothing for ``PING_S`` is sent a ping. If ``PING_S`` later nothing has arrived, it counts as
   disconnected (1006), unless the application is not receiving: then the pong may be unread.
4. What breaks the framing ends the connection with a close code. The application's exceptions end it with 1011.
5. After a close frame, the server closes its side and discards what arrives (``BufferedSocket.linger``).

The scope has the key ``DRAIN``: what the application learns of the drain (``Drain``). It should then close with 1001.
If it does not, the server does so.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import trio
from starlette.types import ASGIApp, Message, Scope
from wsproto import events
from wsproto.connection import Connection, ConnectionType
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, generate_accept_token

from omni_actors.serve.http.buffered_socket import BufferedSocket, ClientDisconnected
from omni_actors.serve.http.errors import HTTPError, bad_request
from omni_actors.serve.http.exchange import Exchange

DRAIN = "omni_actors.drain"
"""The key of the scope; see above."""
CLOSE_S = 2.0
"""The time that a client has to take what was sent before a close frame, and to answer it."""
PING_S = 20.0
PARSED_BYTES = 4096
FRAGMENT = 1 << 16
"""The characters or bytes of a fragment."""
_VERSION = b"13"
_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")


def asks_for_websocket(scope: Scope) -> bool:
    """Return whether the client asks to continue with the WebSocket protocol."""
    if scope["method"] != "GET" or scope["http_version"] != "1.1":
        return False
    return "websocket" in _tokens(scope, b"upgrade") and "upgrade" in _tokens(scope, b"connection")


class Drain:
    """The drain of the server, for the application of a WebSocket.

    begun: set when it begins; what is in progress may end. over: set when the time for that is over; what is still in
    progress is to be ended with an error now.
    """

    def __init__(self) -> None:
        self.begun, self.over = trio.Event(), trio.Event()


class WebSocket:
    """A WebSocket that a client asks for. Raises HTTPError if the request is not a valid handshake.

    Args:
        sock: the connection.
        exchange: the request. Its response is the handshake, or what refuses the connection.
        max_message_bytes: the limit of a message, in bytes; of text in UTF-8.
    """

    def __init__(self, sock: BufferedSocket, exchange: Exchange, *, max_message_bytes: int) -> None:
        self._socket, self._exchange, self._max_message_bytes = sock, exchange, max_message_bytes
        self._accept_token = _accept_token(exchange)
        self.drain = Drain()
        subprotocols = [token for token in _tokens(exchange.scope, b"sec-websocket-protocol", lower=False) if token]
        self._scope = {
            **{name: value for name, value in exchange.scope.items() if name != "method"},
            "type": "websocket",
            "scheme": "wss" if sock.scheme == "https" else "ws",
            "subprotocols": subprotocols,
            "extensions": {"websocket.http.response": {}},
            DRAIN: self.drain,
        }
        self._frames = Connection(ConnectionType.SERVER)
        self._nursery: trio.Nursery | None = None
        self._writer, self._outgoing = trio.open_memory_channel[events.Event](0)
        self._messages, self._incoming = trio.open_memory_channel[Message](0)
        self._is_connected = self._is_accepted = False
        """Whether the application has received "websocket.connect", and has accepted the connection."""
        self._ended = trio.Event()
        """Set when a close frame is sent, or the client has disconnected."""
        self._last: Message = {"type": "websocket.disconnect", "code": int(CloseReason.ABNORMAL_CLOSURE)}
        """The last message for the application."""
        self._waits_for_application = self._is_writing = False
        self._arrivals = 0
        """How often data has arrived."""
        self._partial: io.StringIO | io.BytesIO | None = None
        self._partial_bytes = 0
        """The beginning of a message whose end has not arrived."""

    async def run(self, app: ASGIApp) -> None:
        """Let ``app`` use the WebSocket, and close it afterwards.

        Raises ClientDisconnected (during the handshake), and what ``app`` raises.
        """
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._exchange.handle_in(nursery.cancel_scope)
                try:
                    await app(self._scope, self.receive, self.send)
                except Exception as error:  # noqa: BLE001
                    failure = error  # raised below, outside the nursery's exception group
                if self._is_accepted:
                    await self._close(CloseReason.INTERNAL_ERROR if failure else CloseReason.NORMAL_CLOSURE)
                nursery.cancel_scope.cancel()
        finally:
            if self._is_accepted and not self._ended.is_set() and not self._is_writing:
                self._socket.try_send(self._frames.send(events.CloseConnection(CloseReason.GOING_AWAY)))
        if self._is_accepted:
            await self._socket.linger()
        if failure is not None:
            raise failure
        if self._exchange.is_disconnected:
            raise ClientDisconnected
        if self._exchange.response == "pending":
            raise RuntimeError("the application returned without accepting or refusing the WebSocket")

    # ASGI

    async def receive(self) -> Message:
        """Return the next message (ASGI). After "websocket.disconnect", return that again."""
        await trio.lowlevel.checkpoint()
        if not self._is_connected:
            self._is_connected = True
            return {"type": "websocket.connect"}
        with suppress(trio.EndOfChannel):
            return await self._incoming.receive()
        return self._last

    async def send(self, message: Message) -> None:
        """Take a message of the application (ASGI), and wait for the writer. Raises OSError if the WebSocket has ended.

        Cancellation: the message is sent whole, or not at all.
        """
        match message["type"]:
            case "websocket.accept":
                await self._accept(message)
            case "websocket.send":
                data = message.get("text")
                data = message["bytes"] if data is None else data
                await self._write(events.TextMessage(data) if isinstance(data, str) else events.BytesMessage(data))
            case "websocket.close" if self._is_accepted:
                await self._close(message.get("code", CloseReason.NORMAL_CLOSURE), message.get("reason"))
            case "websocket.close":
                await self._refuse(HTTPError(403, "the WebSocket was refused", code="refused"))
            case _:
                await self._exchange.send({**message, "type": message["type"].removeprefix("websocket.")})

    async def _accept(self, message: Message) -> None:
        headers = [
            (b"upgrade", b"websocket"),
            (b"connection", b"Upgrade"),
            (b"sec-websocket-accept", self._accept_token),
            *message.get("headers", ()),
        ]
        if (subprotocol := message.get("subprotocol")) is not None:
            headers.append((b"sec-websocket-protocol", subprotocol.encode("ascii")))
        await self._exchange.switch_protocols(headers)
        self._is_accepted = True
        assert self._nursery is not None
        for task in (self._read_frames, self._write_frames, self._ping):
            self._nursery.start_soon(task)

    async def _refuse(self, error: HTTPError) -> None:
        response = error.response()
        start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        await self._exchange.send(start)
        await self._exchange.send({"type": "http.response.body", "body": response.body})

    async def _write(self, event: events.Event) -> None:
        """Hand an event to the writer. Raises OSError if the WebSocket has ended."""
        try:
            await self._writer.send(event)
        except trio.BrokenResourceError as error:
            raise BrokenPipeError("the WebSocket has ended") from error

    async def _close(self, code: int, reason: str | None = None) -> None:
        """Send a close frame, unless the WebSocket has ended, and end it: a client has ``CLOSE_S`` to answer."""
        with trio.move_on_after(CLOSE_S):
            with suppress(OSError):
                await self._write(events.CloseConnection(code, reason))
            await self._ended.wait()
        self._set_ended()

    # the tasks

    async def _read_frames(self) -> None:
        """Read frames until the client closes or breaks the protocol."""
        with suppress(OSError, ClientDisconnected, trio.ClosedResourceError):
            while True:
                while data := self._socket.take(PARSED_BYTES):
                    await trio.lowlevel.checkpoint()
                    self._frames.receive_data(data)
                    for event in self._frames.events():
                        await self._handle(event)
                if not await self._socket.fill():
                    break
                self._arrivals += 1
        self._set_ended()

    async def _handle(self, event: events.Event) -> None:
        """Do what an event asks. Raises OSError: the WebSocket has ended, and what follows is not for wsproto."""
        match event:
            case events.Message():
                await self._collect(event)
            case events.Ping():
                await self._write(event.response())
            case events.CloseConnection(code=code, reason=reason):  # the client's, or wsproto's for a broken frame
                self._last = {"type": "websocket.disconnect", "code": int(code), "reason": reason or ""}
                await self._write(event.response())
                await self._ended.wait()
                raise BrokenPipeError("the WebSocket has ended")

    async def _collect(self, event: events.Message[Any]) -> None:
        """Add a part of a message, and give a complete message to the application. Raises OSError: it is too large."""
        if self._partial is None:
            self._partial = io.StringIO() if isinstance(event, events.TextMessage) else io.BytesIO()
            self._partial_bytes = 0
        self._partial_bytes += len(event.data.encode() if isinstance(event, events.TextMessage) else event.data)
        if self._partial_bytes > self._max_message_bytes:
            self._partial = None
            await self._close(CloseReason.MESSAGE_TOO_BIG, f"a message is larger than {self._max_message_bytes} bytes")
            raise BrokenPipeError("the WebSocket has ended")
        self._partial.write(event.data)
        if not event.message_finished:
            return
        data, self._partial = self._partial.getvalue(), None
        self._waits_for_application = True
        name = "text" if isinstance(data, str) else "bytes"
        await self._messages.send({"type": "websocket.receive", name: data})
        self._waits_for_application = False

    async def _write_frames(self) -> None:
        """Write what the application and the other tasks hand over, up to a close frame."""
        with suppress(ClientDisconnected, trio.ClosedResourceError):
            async for event in self._outgoing:
                with suppress(LocalProtocolError):  # the client has closed meanwhile
                    for fragment in _fragments(event):
                        data = self._frames.send(fragment)
                        self._is_writing = True
                        await self._socket.send(data)
                self._is_writing = False
                if isinstance(event, events.CloseConnection):
                    break
        self._set_ended()

    async def _ping(self) -> None:
        """End the WebSocket when the client does not answer a ping."""
        with suppress(OSError):
            is_pinged, arrivals = False, self._arrivals
            while True:
                await trio.sleep(PING_S)
                is_silent = self._arrivals == arrivals and not self._waits_for_application
                if is_silent and is_pinged:
                    break
                is_pinged, arrivals = is_silent, self._arrivals
                if is_silent:
                    await self._write(events.Ping())
        self._set_ended()

    def _set_ended(self) -> None:
        """From now on, ``receive`` returns the last message, and ``send`` raises OSError."""
        self._ended.set()
        self._outgoing.close()
        self._messages.close()


def _fragments(event: events.Event) -> Iterator[events.Event]:
    """Yield a message in fragments, and any other event as it is."""
    if not isinstance(event, events.Message) or len(event.data) <= FRAGMENT:
        yield event
        return
    for at in range(0, len(event.data), FRAGMENT):
        is_last = at + FRAGMENT >= len(event.data)
        yield type(event)(event.data[at : at + FRAGMENT], message_finished=is_last)


def _tokens(scope: Scope, name: bytes, *, lower: bool = True) -> list[str]:
    """Return the items of the comma-separated headers of this name."""
    values = [value.decode("latin-1") for found, value in scope["headers"] if found == name]
    return [token.strip().lower() if lower else token.strip() for value in values for token in value.split(",")]


def _accept_token(exchange: Exchange) -> bytes:
    """Return the answer to the client's key. Raises HTTPError: the request is not a valid handshake."""
    headers = dict(exchange.scope["headers"])
    if headers.get(b"sec-websocket-version") != _VERSION:
        message = "this server has version 13 of the WebSocket protocol"
        headers = {"upgrade": "websocket", "connection": "Upgrade, close", "sec-websocket-version": _VERSION.decode()}
        raise HTTPError(426, message, code="unsupported_websocket_version", headers=headers)
    key = headers.get(b"sec-websocket-key", b"")
    if not _KEY.fullmatch(key):
        raise bad_request("the header Sec-WebSocket-Key is missing or is not 16 bytes in base64", code="invalid_http")
    if not exchange.request_complete:
        raise bad_request("a request for a WebSocket has no body", code="invalid_http")
    return generate_accept_token(key)
