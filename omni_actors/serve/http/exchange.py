"""One request and its answer: h11's events on one side, ASGI on the other.

Rules
1. Each request has an h11 connection of its own. It gets the head, which ``connection`` has checked, then the body in
   small pieces: nothing that a peer sends costs h11 more than some milliseconds at a time.
2. ``receive`` reads from the socket only what the app asks for, and sends "100 Continue" only then.
3. A peer that leaves cancels the handler. There is no "http.disconnect" message.
4. Once the request is whole, the exchange watches for its peer. Pipelined bytes are kept, up to ``PIPELINED_BYTES``; a
   peer that sends more is dropped.

**A peer that has closed, or only half of its connection.** Both look the same at first: the end of what it sends. They
differ in what the peer's kernel says to data: it resets a connection that was closed, and takes the data of one that
was half closed. So after that end the exchange sends something without a meaning, again and again at growing intervals:
before the answer begins an interim "100 Continue", which a client of HTTP/1.1 has to skip; in a stream of server-sent
events a comment (each piece of such a stream has to be whole events). A reset cancels the handler; otherwise the peer
gets its answer. In any other stream the answer's next piece is the test. HTTP/1.0 has no interim answers: its peer gets
``UNPROBED_S`` for the answer to begin.
"""

from __future__ import annotations

import re
from email.utils import formatdate
from typing import NoReturn
from urllib.parse import unquote

import h11
import trio
from starlette.types import ASGIApp, Message, Scope

from omni_actors.serve.http.buffered_socket import PIECE_BYTES, BufferedSocket, ClientDisconnected
from omni_actors.serve.http.errors import HTTPError

CHUNKED_BYTES, CHUNKED_PIECES = 1024, 8
"""h11 gets a chunked body in such pieces, and so many in one turn of the event loop: it takes quadratic time for some
trailers, and some microseconds for each chunk. A chunk's head, and the trailer, may be as long as one piece."""
PIPELINED_BYTES = 64 * 1024
PROBE_S, PROBE_MAX_S = 0.01, 1.0
"""Between two probes of a peer that sends no more: at first, and at last."""
UNPROBED_S = 5.0
_SSE_COMMENT = b":\n\n"
_CHUNK_SIZE = re.compile(rb"[\r\n]*([0-9A-Fa-f]+)([^\n]*\n)?")
"""The declared size at the beginning of a chunk, and the rest of its line once that has arrived."""


class Exchange:
    """A request whose head is here. is_last: the connection is to be closed after the answer.

    max_chunk_bytes: the largest size that a chunk of the body may declare. Raises h11.RemoteProtocolError, HTTPError.
    """

    def __init__(self, sock: BufferedSocket, head: bytes, *, is_last: bool, max_chunk_bytes: int) -> None:
        self._socket, self._is_last, self._max_chunk_bytes = sock, is_last, max_chunk_bytes
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=CHUNKED_BYTES)
        self._h11.receive_data(head)
        request = self._h11.next_event()
        assert isinstance(request, h11.Request), "the head is whole"
        _require_sound(request)
        self._scope = _scope(request, sock)
        self._expects_chunk_size = _has(request, b"transfer-encoding")
        self._piece_bytes = CHUNKED_BYTES if self._expects_chunk_size else PIECE_BYTES
        self._has_bodiless_answer = request.method == b"HEAD"
        self._whole = trio.Event()
        """Set when the request's body is here."""
        self._parse()
        self._is_received = False
        """Whether the app has the last of the body."""
        self._handler, self._watching = trio.CancelScope(), trio.CancelScope()
        self._turn = trio.Lock()
        """The handler and the watch for the peer hold it while they send."""
        self._head = b""
        """The answer's head, until its first piece is sent along."""
        self._is_sse = self._has_left = False
        self.response_started = self.complete = False
        """Whether the answer has response_started, and whether all of it was sent."""

    @property
    def is_whole(self) -> bool:
        """Whether the request's body is here."""
        return self._whole.is_set()

    @property
    def may_go_on(self) -> bool:
        """Whether another request may follow on this connection."""
        return self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    @property
    def looks_whole_when_cut(self) -> bool:
        """Whether the answer was cut, and its client knows its end by the connection's alone."""
        return self.response_started and not self.complete and self._scope["http_version"] == "1.0"

    def stop(self) -> None:
        """Close the connection after the answer, if that has not response_started."""
        self._is_last = True

    async def run(self, app: ASGIApp) -> None:
        """Let ``app`` answer. Raises ClientDisconnected, h11.RemoteProtocolError, and what ``app`` raises."""
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            self._handler = nursery.cancel_scope
            nursery.start_soon(self._watch)
            try:
                await app(self._scope, self.receive, self.send)
            except Exception as error:  # noqa: BLE001
                failure = error  # raised below as it is, not inside the nursery's exception group
            nursery.cancel_scope.cancel()
        if self._has_left:
            raise ClientDisconnected
        if failure is not None:
            raise failure
        if not self.response_started:
            raise RuntimeError("the app has not answered")

    # the request

    async def receive(self) -> Message:
        """The next piece of the body. After the last one it waits until it is cancelled."""
        await trio.lowlevel.checkpoint()
        if self._is_received:
            await trio.sleep_forever()
        try:
            if self._h11.they_are_waiting_for_100_continue:
                await self._interim()
            while not (body := self._parse_buffer()) and not self._whole.is_set():
                if not await self._socket.fill():
                    await self._leave()
        except ClientDisconnected:
            await self._leave()
        self._is_received = self._whole.is_set()
        return {"type": "http.request", "body": body, "more_body": not self._is_received}

    def _parse_buffer(self) -> bytes:
        """The next part of the body that is here. Raises h11.RemoteProtocolError."""
        body = bytearray()
        for _ in range(CHUNKED_PIECES):
            if self._whole.is_set() or not self._socket.buffer:
                break
            self._h11.receive_data(self._socket.take(self._piece_bytes))
            body += self._parse()
        return bytes(body)

    def _parse(self) -> bytes:
        """What h11 has of the body now. Raises h11.RemoteProtocolError, HTTPError."""
        body = bytearray()
        while not self._whole.is_set():
            self._check_chunk_size()
            match self._h11.next_event():
                case h11.Data(data=data, chunk_end=chunk_end):
                    body += data
                    self._expects_chunk_size = chunk_end
                case h11.EndOfMessage():
                    self._whole.set()
                    self._socket.put_back(self._h11.trailing_data[0])
                case _:
                    break
        return bytes(body)

    def _check_chunk_size(self) -> None:
        """Refuse a chunk by the size that it declares: h11 would wait for all of it. Raises HTTPError."""
        if not self._expects_chunk_size:
            return
        found = _CHUNK_SIZE.match(self._h11.trailing_data[0])
        if found is None:
            return
        if int(found[1], 16) > self._max_chunk_bytes:
            message = f"a chunk of the body is larger than {self._max_chunk_bytes} bytes"
            raise HTTPError(413, message, code="body_too_large")
        self._expects_chunk_size = found[2] is None

    async def _leave(self) -> NoReturn:
        """The peer is gone: end the handler. Does not return."""
        self._has_left = True
        self._handler.cancel()
        await trio.sleep_forever()
        raise AssertionError

    # the answer

    async def send(self, message: Message) -> None:
        """Take a message of the answer. Returns when the kernel has it; the head goes with the first piece."""
        more = message.get("more_body", False)
        async with self._turn:
            if message["type"] == "http.response.start":
                self._begin(message["status"], message.get("headers", ()))
                return
            body = b"" if self._has_bodiless_answer else message.get("body", b"")
            pieces = self._take_head()
            if body:
                pieces += self._h11.send_with_data_passthrough(h11.Data(data=body)) or []
            if not more:
                pieces.append(self._h11.send(h11.EndOfMessage()))
                self._watching.cancel()
            await self._write(*pieces)
            self.complete = not more

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        named = {name.lower(): value for name, value in headers}
        added = [(b"date", formatdate(usegmt=True).encode())]
        if self._is_last or not self._whole.is_set():
            added.append((b"connection", b"close"))
        self._head = self._h11.send(h11.Response(status_code=status, headers=[*headers, *added]))
        self._is_sse = named.get(b"content-type", b"").startswith(b"text/event-stream")
        self._has_bodiless_answer |= status in (204, 304)
        self.response_started = True

    def _take_head(self) -> list[bytes]:
        head, self._head = self._head, b""
        return [head]

    async def _interim(self) -> None:
        await self._write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))

    async def _write(self, *pieces: bytes) -> None:
        try:
            await self._socket.write(*pieces)
        except ClientDisconnected:
            await self._leave()

    # the peer

    async def _watch(self) -> None:
        """Cancel the handler when the peer leaves after its request is whole, and before its answer is."""
        with self._watching:
            await self._whole.wait()
            try:
                while await self._socket.fill():
                    if len(self._socket.buffer) > PIPELINED_BYTES:
                        await self._leave()
                await self._wait_gone()
            except ClientDisconnected:
                pass
            await self._leave()

    async def _wait_gone(self) -> None:
        """Until a peer that sends no more has closed its connection for good. Raises ClientDisconnected for a reset."""
        pause_s = PROBE_S
        until = trio.current_time() + UNPROBED_S
        while self.response_started or self._scope["http_version"] != "1.0" or trio.current_time() < until:
            await self._probe()
            await trio.sleep(pause_s)
            self._socket.require_no_error()
            pause_s = min(2 * pause_s, PROBE_MAX_S)

    async def _probe(self) -> None:
        """Send what has no meaning, where such a thing exists and the handler is not sending anyway."""
        if self._turn.locked():
            return
        async with self._turn:
            if self.response_started and self._is_sse and not self._has_bodiless_answer:
                data = self._h11.send_with_data_passthrough(h11.Data(data=_SSE_COMMENT)) or []
                await self._write(*self._take_head(), *data)
            elif not self.response_started and self._scope["http_version"] != "1.0":
                await self._interim()


def _require_sound(request: h11.Request) -> None:
    """Refuse what h11 lets pass. Raises HTTPError."""
    if request.http_version[:1] != b"1":
        message = f"HTTP/{request.http_version.decode()} is not spoken here; accepted: HTTP/1.1"
        raise HTTPError(505, message, code="unsupported_http_version")
    if request.method == b"CONNECT":
        raise HTTPError(405, "this server is not a proxy", code="method_not_allowed")
    if _has(request, b"transfer-encoding") and (
        _has(request, b"content-length") or request.http_version < b"1.1"  # the two lengths may differ
    ):
        raise HTTPError(400, "the body has two lengths: Content-Length and Transfer-Encoding", code="invalid_http")


def _has(request: h11.Request, name: bytes) -> bool:
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
        "scheme": "http",
        "path": unquote(target.decode("ascii")),
        "raw_path": target,
        "query_string": query,
        "root_path": "",
        "headers": list(request.headers),
        "client": sock.client,
        "server": sock.server,
    }
