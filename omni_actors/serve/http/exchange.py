"""One request and its response: h11's events on one side, ASGI on the other.

Rules
1. Each request has an h11 connection of its own. It receives the head, which ``connection`` has checked, then the body
   in small pieces, so that no client can make h11 compute for more than a few milliseconds at a time.
2. ``receive`` reads from the socket only what the application asks for, and sends "100 Continue" only then.
3. A client that disconnects cancels the handler. There is no "http.disconnect" message.
4. Between the end of the request and the last byte of the response, the exchange watches the client. Pipelined bytes
   are kept, up to ``PIPELINED_BYTES``; a client that sends more counts as disconnected.

**Closed and half-closed connections** look the same at first: the client's data ends. They differ when the server
sends: the client's kernel resets a closed connection, and accepts the data of a half-closed one. So after that end the
exchange probes the client at growing intervals. Before the response begins, a probe is an interim "100 Continue", which
an HTTP/1.1 client must skip. In a stream of server-sent events it is a comment, which requires that each piece of the
stream is made of complete events. A reset cancels the handler; otherwise the client receives its response. In any other
response the next piece is the probe. HTTP/1.0 has no interim responses: its client gets ``UNPROBED_S`` for the response
to begin.
"""

from __future__ import annotations

import re
from email.utils import formatdate
from typing import Literal, NoReturn, TypeAlias
from urllib.parse import unquote

import h11
import trio
from starlette.types import ASGIApp, Message, Scope

from omni_actors.serve.http.buffered_socket import PIECE_BYTES, BufferedSocket, ClientDisconnected
from omni_actors.serve.http.errors import HTTPError

CHUNKED_BYTES, CHUNKED_PIECES = 1024, 8
"""The size of the pieces of a chunked body that h11 gets, and how many it gets between two turns of the event loop: it
needs quadratic time for some trailers, and some microseconds per chunk. A chunk's size line, and the trailer, may be as
long as one piece."""
PIPELINED_BYTES = 64 * 1024
PROBE_S, PROBE_MAX_S = 0.01, 1.0
"""The first and the longest pause between two probes."""
UNPROBED_S = 5.0
_SSE_COMMENT = b":\n\n"
_CHUNK_SIZE = re.compile(rb"[\r\n]*([0-9A-Fa-f]+)([^\n]*\n)?")
"""The declared size at the beginning of a chunk, and the rest of its line once that has arrived."""


ResponseState: TypeAlias = Literal["pending", "started", "complete"]
"""pending: the application has not started the response. complete: the kernel has the last byte."""


class Exchange:
    """A request whose head has arrived, and its response.

    Args:
        sock: the connection.
        head: the request's head.
        is_last: whether the connection closes after the response.
        max_chunk_bytes: the largest size that a chunk of the body may declare.

    Raises h11.RemoteProtocolError, HTTPError.
    """

    def __init__(self, sock: BufferedSocket, head: bytes, *, is_last: bool, max_chunk_bytes: int) -> None:
        self._socket, self._is_last, self._max_chunk_bytes = sock, is_last, max_chunk_bytes
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=CHUNKED_BYTES)
        self._h11.receive_data(head)
        request = self._h11.next_event()
        assert isinstance(request, h11.Request), "the head is complete"
        _check_request(request)
        self.scope = _scope(request, sock)
        self._is_http_1_0 = request.http_version == b"1.0"
        self._expects_chunk_size = _has_header(request, b"transfer-encoding")
        self._piece_bytes = CHUNKED_BYTES if self._expects_chunk_size else PIECE_BYTES
        self._response_has_no_body = request.method == b"HEAD"
        self._request_complete = trio.Event()
        self._parse()
        self._is_delivered = False
        """Whether the application has the last piece of the body."""
        self._handler, self._watching = trio.CancelScope(), trio.CancelScope()
        self._sending = trio.Lock()
        """Held by the handler and by the probes while they send."""
        self._response_head = b""
        """The response's head, until it is sent with the first piece."""
        self._unsent: int | None = None
        """How many bytes of the response's body are not sent yet; None if the response has no declared length."""
        self._accepts_comments = False
        """Whether the body of the response is a stream of server-sent events, which has begun."""
        self._is_disconnected = False
        self.response: ResponseState = "pending"

    @property
    def request_complete(self) -> bool:
        """Whether all of the request's body has arrived."""
        return self._request_complete.is_set()

    @property
    def may_continue(self) -> bool:
        """Whether another request may follow on this connection."""
        return self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    @property
    def looks_complete_when_cut(self) -> bool:
        """Whether the response was cut, and only the end of the connection tells the client where it ends."""
        return self.response == "started" and self._is_http_1_0

    def stop(self) -> None:
        """Close the connection after the response, unless the response has begun."""
        self._is_last = True

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has disconnected, which cancelled the handler."""
        return self._is_disconnected

    def handle_in(self, scope: trio.CancelScope) -> None:
        """Cancel this scope when the client disconnects, in place of what ``run`` would start."""
        self._handler = scope

    async def switch_protocols(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send "101 Switching Protocols" as the response. The socket's buffer has the bytes after the request.

        Raises ClientDisconnected.
        """
        response = h11.InformationalResponse(status_code=101, headers=headers, reason=b"Switching Protocols")
        self.response = "complete"
        await self._socket.send(self._h11.send(response))

    async def run(self, app: ASGIApp) -> None:
        """Let ``app`` answer the request.

        Raises ClientDisconnected, h11.RemoteProtocolError, and what ``app`` raises. A disconnect cancels ``app``.
        """
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            self._handler = nursery.cancel_scope
            nursery.start_soon(self._watch)
            try:
                await app(self.scope, self.receive, self.send)
            except Exception as error:  # noqa: BLE001
                failure = error  # raised below, outside the nursery's exception group
            nursery.cancel_scope.cancel()
        if self._is_disconnected:
            raise ClientDisconnected
        if failure is not None:
            raise failure
        if self.response == "pending":
            raise RuntimeError("the application returned without a response")

    # the request

    async def receive(self) -> Message:
        """Return the next piece of the body (ASGI). After the last one, wait until cancelled."""
        await trio.lowlevel.checkpoint()
        if self._is_delivered:
            await trio.sleep_forever()
        try:
            if self._h11.they_are_waiting_for_100_continue:
                await self._send_interim()
            while not (body := self._parse_buffer()) and not self.request_complete:
                if not await self._socket.fill():
                    await self._disconnect()
        except ClientDisconnected:
            await self._disconnect()
        except h11.RemoteProtocolError as error:  # so the response is one as any other, and so is its line in the log
            raise HTTPError(error.error_status_hint, str(error), code="invalid_http") from error
        self._is_delivered = self.request_complete
        return {"type": "http.request", "body": body, "more_body": not self._is_delivered}

    def _parse_buffer(self) -> bytes:
        """Return the next part of the body that has arrived. Raises h11.RemoteProtocolError, HTTPError."""
        body = bytearray()
        for _ in range(CHUNKED_PIECES):
            if self.request_complete or not self._socket.buffer:
                break
            self._h11.receive_data(self._socket.take(self._piece_bytes))
            body += self._parse()
        return bytes(body)

    def _parse(self) -> bytes:
        """Return what h11 has of the body. Raises h11.RemoteProtocolError, HTTPError."""
        body = bytearray()
        while not self.request_complete:
            self._check_chunk_size()
            match self._h11.next_event():
                case h11.Data(data=data, chunk_end=chunk_end):
                    body += data
                    self._expects_chunk_size = chunk_end
                case h11.EndOfMessage():
                    self._request_complete.set()
                    self._socket.put_back(self._h11.trailing_data[0])
                case _:
                    break
        return bytes(body)

    def _check_chunk_size(self) -> None:
        """Refuse a chunk by the size that it declares, because h11 would wait for all of it. Raises HTTPError."""
        if not self._expects_chunk_size:
            return
        found = _CHUNK_SIZE.match(self._h11.trailing_data[0])
        if found is None:
            return
        if int(found[1], 16) > self._max_chunk_bytes:
            message = f"a chunk of the body is larger than {self._max_chunk_bytes} bytes"
            raise HTTPError(413, message, code="body_too_large")
        self._expects_chunk_size = found[2] is None

    async def _disconnect(self) -> NoReturn:
        """Cancel the handler, because the client has disconnected. Does not return."""
        self._is_disconnected = True
        self._handler.cancel()
        await trio.sleep_forever()
        raise AssertionError

    # the response

    async def send(self, message: Message) -> None:
        """Send a message of the response (ASGI). Returns once the kernel has it; the head waits for the first piece."""
        more = message.get("more_body", False)
        async with self._sending:
            if message["type"] == "http.response.start":
                self._start_response(message["status"], message.get("headers", ()))
                return
            body = b"" if self._response_has_no_body else message.get("body", b"")
            is_cut = more and self._response_has_no_body  # what follows would not be sent, and may never end
            more = more and not is_cut
            pieces = self._take_head()
            if body:
                pieces += self._h11.send_with_data_passthrough(h11.Data(data=body)) or []
            if self._unsent is not None:
                self._unsent -= len(body)
            if not more:
                pieces.append(self._h11.send(h11.EndOfMessage()))
            if not more or self._unsent == 0:  # the client then sends its next request, even if the handler still runs
                self._watching.cancel()
            await self._send(*pieces)
            if not more:
                self.response = "complete"
            if is_cut:
                self._handler.cancel()

    def _start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        named = {name.lower(): value for name, value in headers}
        added = [(b"date", formatdate(usegmt=True).encode())]
        if self._is_last or not self.request_complete:
            added.append((b"connection", b"close"))
        self._response_head = self._h11.send(h11.Response(status_code=status, headers=[*headers, *added]))
        self._response_has_no_body |= status in (204, 304)
        if self._response_has_no_body:
            self._unsent = 0
        else:
            self._accepts_comments = named.get(b"content-type", b"").startswith(b"text/event-stream")
            if b"content-length" in named:
                self._unsent = int(named[b"content-length"])
        self.response = "started"

    def _take_head(self) -> list[bytes]:
        head, self._response_head = self._response_head, b""
        return [head]

    async def _send_interim(self) -> None:
        await self._send(self._h11.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))

    async def _send(self, *pieces: bytes) -> None:
        try:
            await self._socket.send(*pieces)
        except ClientDisconnected:
            await self._disconnect()

    # the client

    async def _watch(self) -> None:
        """Cancel the handler if the client disconnects between the end of its request and the end of the response."""
        with self._watching:
            await self._request_complete.wait()
            try:
                while await self._socket.fill():
                    if len(self._socket.buffer) > PIPELINED_BYTES:
                        await self._disconnect()
                await self._wait_disconnected()
            except ClientDisconnected:
                pass
            await self._disconnect()

    async def _wait_disconnected(self) -> None:
        """Wait until a client that sends no more has closed its connection for good. Raises ClientDisconnected."""
        pause_s = PROBE_S
        until = trio.current_time() + UNPROBED_S
        while not self._is_http_1_0 or self.response != "pending" or trio.current_time() < until:
            await self._probe()
            await trio.sleep(pause_s)
            self._socket.check_error()
            pause_s = min(2 * pause_s, PROBE_MAX_S)

    async def _probe(self) -> None:
        """Send data without a meaning, if the protocol has such data and the handler is not sending anyway."""
        if self._sending.locked():
            return
        async with self._sending:
            if self._accepts_comments:
                data = self._h11.send_with_data_passthrough(h11.Data(data=_SSE_COMMENT)) or []
                await self._send(*self._take_head(), *data)
            elif self.response == "pending" and not self._is_http_1_0:
                await self._send_interim()


def _check_request(request: h11.Request) -> None:
    """Refuse what h11 accepts and this server does not. Raises HTTPError."""
    if request.http_version[:1] != b"1":
        message = f"HTTP/{request.http_version.decode()} is not supported; accepted: HTTP/1.1"
        raise HTTPError(505, message, code="unsupported_http_version")
    if request.method == b"CONNECT":
        raise HTTPError(405, "this server is not a proxy", code="method_not_allowed")
    if _has_header(request, b"transfer-encoding") and (
        _has_header(request, b"content-length") or request.http_version < b"1.1"  # the two lengths may differ
    ):
        raise HTTPError(400, "the body has two lengths: Content-Length and Transfer-Encoding", code="invalid_http")


def _has_header(request: h11.Request, name: bytes) -> bool:
    return any(found == name for found, _ in request.headers)


def _scope(request: h11.Request, sock: BufferedSocket) -> Scope:
    target, _, query = request.target.partition(b"?")
    if not target.startswith(b"/") and b"://" in target:  # the form for proxies: http://host/path
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.5"},
        "http_version": "1.0" if request.http_version == b"1.0" else "1.1",
        "method": request.method.decode("ascii"),
        "scheme": sock.scheme,
        "path": unquote(target.decode("ascii")),
        "raw_path": target,
        "query_string": query,
        "root_path": "",
        "headers": list(request.headers),
        "client": sock.client,
        "server": sock.server,
    }
