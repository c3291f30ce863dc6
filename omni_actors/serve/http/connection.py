"""One connection: requests one after the other, each with its deadline, until either side closes.

Rules
1. The first head must arrive within ``HEAD_TIMEOUT_S`` of the accept, and the handshake of TLS too; each further head
   within ``HEAD_TIMEOUT_S`` of its first byte. No byte in between extends that. An idle connection is kept for
   ``IDLE_TIMEOUT_S``.
2. A head has bounded size, and no control character for which h11 would need quadratic time, before h11 sees it.
3. A request that is not valid HTTP gets a response with a status and OpenAI's error object. Then the connection closes.
4. If the client may still be sending its request, the response is followed by a lingering close and not by a reset.
5. A request for a WebSocket is the last one of its connection.
"""

from __future__ import annotations

import logging
import re
import ssl
from email.utils import formatdate
from http import HTTPStatus

import h11
import trio
from starlette.types import ASGIApp

from omni_actors.serve.http.buffered_socket import BufferedSocket, ClientDisconnected
from omni_actors.serve.http.errors import HTTPError, internal_error
from omni_actors.serve.http.exchange import Exchange
from omni_actors.serve.http.tls_socket import TLSSocket
from omni_actors.serve.http.websocket import WebSocket, asks_for_websocket

HEAD_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 75.0
"""Longer than the usual 60 s of proxies: a proxy must not reuse a connection that the server is closing."""
MAX_HEAD_BYTES, MAX_HEAD_LINES = 64 * 1024, 256

_ILLEGAL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)")

log = logging.getLogger("omni_actors.serve")


class Connection:
    """Serves an ASGI application on one connected socket.

    max_body_bytes: the largest size that a chunk of a request's body may declare. max_message_bytes: the limit of a
    message of a WebSocket. Raises OSError if the socket is not connected any more.
    """

    def __init__(
        self,
        sock: trio.socket.SocketType,
        app: ASGIApp,
        *,
        tls: ssl.SSLContext | None,
        max_body_bytes: int,
        max_message_bytes: int,
    ) -> None:
        self._socket, self._app = BufferedSocket(sock) if tls is None else TLSSocket(sock, tls), app
        self._max_body_bytes, self._max_message_bytes = max_body_bytes, max_message_bytes
        self._idle = trio.CancelScope()
        """The scope of the wait for a request's first byte."""
        self.idle_since: float | None = None
        """Trio's time; None during a request, and after ``stop``."""
        self._is_stopping = False
        self._exchange: Exchange | None = None
        """The request in progress, or the previous one."""
        self._websocket: WebSocket | None = None

    @property
    def client(self) -> tuple[str, int]:
        """The client's address and port."""
        return self._socket.client

    def close(self) -> None:
        """Close the socket, after ``serve`` has returned."""
        self._socket.close()

    def stop(self) -> None:
        """Close the connection after the response to the request in progress; at once if there is none.

        The application of a WebSocket is told that the server drains.
        """
        self._is_stopping, self.idle_since = True, None
        self._idle.cancel()
        if self._websocket is not None:
            self._websocket.drain.begun.set()
        if self._exchange is not None:
            self._exchange.stop()

    def end_drain(self) -> None:
        """Tell the application of a WebSocket that the time of the drain is over."""
        if self._websocket is not None:
            self._websocket.drain.over.set()

    async def serve(self) -> None:
        """Answer requests until either side closes. Raises what the application raises."""
        try:
            await self._serve()
        except ClientDisconnected:
            pass
        except HTTPError as error:
            await self._refuse(error)
        except h11.RemoteProtocolError as error:
            await self._refuse(HTTPError(error.error_status_hint, str(error), code="invalid_http"))
        except Exception:
            await self._refuse(internal_error())
            raise
        finally:
            if self._exchange is not None and self._exchange.looks_complete_when_cut:
                self._socket.reset_on_close()

    async def _serve(self) -> None:
        """Raises ClientDisconnected, HTTPError, h11.RemoteProtocolError, and what the application raises."""
        timeout_s = HEAD_TIMEOUT_S
        began = trio.current_time()
        accepted: float | None = began
        if not await self._handshake(began + HEAD_TIMEOUT_S):
            return
        while await self._wait_first_byte(timeout_s):
            head = await self._read_head((accepted or trio.current_time()) + HEAD_TIMEOUT_S)
            exchange = self._exchange = Exchange(
                self._socket, head, is_last=self._is_stopping, max_chunk_bytes=self._max_body_bytes
            )
            if asks_for_websocket(exchange.scope):
                self._websocket = WebSocket(self._socket, exchange, max_message_bytes=self._max_message_bytes)
                if self._is_stopping:
                    self._websocket.drain.begun.set()
                await self._websocket.run(self._app)
                return
            await exchange.run(self._app)
            if not exchange.may_continue:
                if exchange.response == "complete" and (self._socket.buffer or not exchange.request_complete):
                    await self._socket.linger()
                return
            timeout_s, accepted = IDLE_TIMEOUT_S, None

    async def _handshake(self, deadline: float) -> bool:
        """Return False if TLS is not ready in time. Until then the connection is idle.

        Raises ClientDisconnected, HTTPError.
        """
        self.idle_since = trio.current_time()
        with trio.CancelScope(deadline=deadline) as self._idle:
            await self._socket.handshake()
            return True
        return False

    async def _wait_first_byte(self, timeout_s: float) -> bool:
        """Return whether a request begins. Some clients send an empty line behind a body: it begins none.

        Raises ClientDisconnected.
        """
        if self._is_stopping or self._socket.skip_empty_lines():
            return not self._is_stopping
        self.idle_since = trio.current_time()
        with trio.move_on_after(timeout_s) as self._idle:
            while await self._socket.fill():
                if self._socket.skip_empty_lines():
                    return True
        return False

    async def _read_head(self, deadline: float) -> bytes:
        """Raises HTTPError, ClientDisconnected."""
        self._exchange = self.idle_since = None
        with trio.CancelScope(deadline=deadline):
            while (head := self._socket.take_head()) is None:
                if len(self._socket.buffer) > MAX_HEAD_BYTES:
                    break
                if not await self._socket.fill():
                    raise ClientDisconnected
            if head is None or len(head) > MAX_HEAD_BYTES or head.count(b"\n") > MAX_HEAD_LINES:
                message = f"the request's head is larger than {MAX_HEAD_BYTES} bytes or {MAX_HEAD_LINES} lines"
                raise HTTPError(431, message, code="head_too_large")
            if _ILLEGAL.search(head):
                raise HTTPError(400, "the request's head contains a control character", code="invalid_http")
            return head
        raise HTTPError(408, f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s", code="head_too_slow")

    async def _refuse(self, error: HTTPError) -> None:
        self.idle_since = None
        if self._exchange is None or self._exchange.response == "pending":
            log.info("refused a request from %s:%d: %s", *self.client, error)
            try:
                await self._socket.send(error_response(error))
            except ClientDisconnected:
                return
            await self._socket.linger()


def error_response(error: HTTPError) -> bytes:
    """Return a complete response that ends its connection."""
    body = error.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "date": formatdate(usegmt=True),
        "connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
