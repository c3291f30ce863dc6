"""The request gate: what every request passes before a route handler runs.

Rules
1. The gate refuses a request on its head alone if it can: a wrong key, a body that is declared too large, a system
   that is full.
2. The gate reads a body completely before the handler starts, and counts it while it arrives. If no handler reads the
   body, the gate does not keep it. The gate keeps no reference to a body that its handler has taken.
3. A refusal is sent at once. The connection discards the rest of the body (``BufferedSocket.linger``).
4. A WebSocket is refused as an HTTP request is, with a status. Browsers cannot send the key in a header, so a client
   may send it as the subprotocol ``openai-insecure-api-key.KEY``. A subprotocol cannot hold every character that a key
   may have ("/", "=", …), so a client may also send ``omni-actors-base64url-api-key.KEY`` with the key in base64url.
   The key must be among the first ``MAX_SUBPROTOCOLS``.
5. A query of more than ``MAX_QUERY_BYTES`` is refused: parsing it would hold the event loop.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Collection, Iterable
from itertools import islice

import trio
from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_actors.serve.access.admission import SCOPE_KEY, AdmissionTicket
from omni_actors.serve.http.errors import HTTPError, forget_frames, quote_value

BODY_TIMEOUT_S = 60.0
"""From the head to the end of the body. No byte in between extends it."""
KEY_SUBPROTOCOL = "openai-insecure-api-key."
"""The beginning of the subprotocol by which a browser sends the key."""
ENCODED_KEY_SUBPROTOCOL = "omni-actors-base64url-api-key."
"""The beginning of the subprotocol by which a browser sends the key in base64url, without padding."""
MAX_SUBPROTOCOLS = 16
MAX_QUERY_BYTES = 4096


class RequestGate:
    """An ASGI application that wraps another one.

    Args:
        app: the wrapped application.
        registry: receives the counter of responses.
        api_key: the key that clients must send; None: no key.
        max_body_bytes: the limit of a request's body.
        public: the paths that need no key.
        routes: the paths that have a label of their own in the counter.
        websockets: the paths of WebSockets.
        admit: admits a request, by its path, and returns its ticket; None if no handler reads a body. Raises HTTPError.
    """

    def __init__(
        self,
        app: ASGIApp,
        registry: CollectorRegistry,
        *,
        api_key: str | None,
        max_body_bytes: int,
        public: Collection[str],
        routes: Collection[str],
        websockets: Collection[str],
        admit: Callable[[str], AdmissionTicket | None],
    ) -> None:
        self._app, self._key, self._max_body_bytes = app, api_key, max_body_bytes
        self._key_subprotocols = () if api_key is None else _key_subprotocols(api_key)
        self._public, self._routes, self._websockets, self._admit = public, routes, websockets, admit
        self._responses = Counter("omni_http_answers", "HTTP responses started", ["path", "status"], registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        label = path if path in self._routes else "other"
        ticket: AdmissionTicket | None = None
        unread: list[bytearray] = []  # the body, until the application receives it

        async def receive_body() -> Message:
            await trio.lowlevel.checkpoint()
            if not unread:
                await trio.sleep_forever()
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def counting_send(message: Message) -> None:
            status = message.get("status", 101 if message["type"] == "websocket.accept" else None)
            if status is not None:
                if ticket is not None:
                    ticket.release()  # before the client has its response and sends the next request
                self._responses.labels(label, str(status)).inc()
            await send(message)

        try:
            _check_query(scope)
            self._check_key(scope)
            if scope["type"] == "websocket":
                await self._open_websocket(scope, receive, counting_send)
                return
            ticket = scope[SCOPE_KEY] = self._admit(path)
            with trio.CancelScope() if ticket is None else ticket.arrival as arrival:
                unread.append(await self._read(scope, receive, ticket))
                if ticket is not None:
                    ticket.take_place()
                await self._app(scope, receive_body, counting_send)
            if arrival.cancelled_caught:
                error = HTTPError(503, "the server is shutting down", code="aborted")
                await error.response()(scope, receive, counting_send)
        except HTTPError as error:
            forget_frames(error)  # they hold the body that was read
            await error.response()(scope, receive, counting_send)
        finally:
            if ticket is not None:
                ticket.end()

    async def _open_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HTTPError 404, and as ``admit`` does."""
        if scope["path"] not in self._websockets:
            message = f"there is no WebSocket at {quote_value(scope['path'])}"
            raise HTTPError(404, message, code="unknown_url")
        self._admit(scope["path"])
        await self._app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        """Raises HTTPError 401."""
        if scope["path"] in self._public or has_valid_key(scope["headers"], self._key):
            return
        for offered in islice(scope.get("subprotocols", ()), MAX_SUBPROTOCOLS):
            if any(hmac.compare_digest(offered.encode(), each) for each in self._key_subprotocols):  # in constant time
                return
        message = "a valid API key is required: send it as 'Authorization: Bearer KEY'"
        raise HTTPError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def _read(self, scope: Scope, receive: Receive, ticket: AdmissionTicket | None) -> bytearray:
        """Return the body. Without a ticket the body is counted and not kept. Raises HTTPError."""
        if ticket is not None and _header(scope, b"content-encoding").lower() not in (b"", b"identity"):
            reason = "the body is compressed; accepted: a body without Content-Encoding"
            raise HTTPError(415, reason, code="unsupported_encoding", headers={"accept-encoding": "identity"})
        too_large = HTTPError(413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")
        if _declared_bytes(scope) > self._max_body_bytes:
            raise too_large
        body, size, more = bytearray(), 0, True
        upload = trio.CancelScope() if ticket is None else ticket.upload
        upload.deadline = trio.current_time() + BODY_TIMEOUT_S
        with upload:
            while more:
                message = await receive()
                piece, more = message["body"], message["more_body"]
                size += len(piece)
                if size > self._max_body_bytes:
                    raise too_large
                if ticket is not None:
                    ticket.add_bytes(len(piece))
                    body += piece
            if ticket is None or not ticket.was_ended:
                return body  # not as bytes: copying 32 MB takes 4 to 22 ms
        reason = f"within {BODY_TIMEOUT_S:g} s"
        if ticket is not None and ticket.was_ended:
            reason = "fast enough, and other requests need its memory"
        raise HTTPError(408, f"the body did not arrive {reason}", code="body_too_slow")


def has_valid_key(headers: Iterable[tuple[bytes, bytes]], key: str | None) -> bool:
    """Return whether the headers of a request carry ``key``. Always true if that is None."""
    if key is None:
        return True
    given = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    scheme, _, token = given.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key.encode())  # in constant time


def _key_subprotocols(key: str) -> tuple[bytes, bytes]:
    """Return the subprotocols that carry ``key``."""
    encoded = base64.urlsafe_b64encode(key.encode()).rstrip(b"=").decode()
    return (KEY_SUBPROTOCOL + key).encode(), (ENCODED_KEY_SUBPROTOCOL + encoded).encode()


def _check_query(scope: Scope) -> None:
    """Raises HTTPError 414."""
    if len(scope["query_string"]) > MAX_QUERY_BYTES:
        message = f"the query of the URL is larger than {MAX_QUERY_BYTES} bytes; send a long value in the body"
        raise HTTPError(414, message, code="query_too_large")


def _declared_bytes(scope: Scope) -> int:
    return int(_header(scope, b"content-length") or 0)


def _header(scope: Scope, name: bytes) -> bytes:
    """Return the value of a request's header; empty if there is none."""
    return next((value for found, value in scope["headers"] if found == name), b"")
