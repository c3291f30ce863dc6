"""The door: what every request passes before a handler sees it, and the watch for clients that leave.

Rules
1. Who may not enter is told so from the head of the request alone.
2. A body is read whole, and counted while it comes, before its handler starts. One that is refused is read on for a
   while and thrown away, since a client that is still sending does not see the answer.
3. While a handler runs, only the door listens to the client. One that leaves cancels the handler, unless its answer is
   complete: then "disconnect" only means that the exchange is over, and the server is still at work on its end.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection

import trio
from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_actors.serve.problems import Problem

BODY_S = 60.0
"""A body that is not here by then is given up."""
DISCARD_S = 5.0


class _Gone(Exception):
    """The client left before its request was whole."""


class Door:
    """An ASGI app around another.

    api_key: None lets everyone in. public: paths that need no key. routes: the paths that are counted by name.
    refuse: a Problem for a path that cannot be served now.
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
        refuse: Callable[[str], Problem | None],
    ) -> None:
        self._app, self._key, self._max_body_bytes = app, api_key, max_body_bytes
        self._public, self._routes, self._refuse = public, routes, refuse
        self._answers = Counter("omni_http_answers", "HTTP answers begun", ["path", "status"], registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        counted_as = path if path in self._routes else "other"

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers.labels(counted_as, str(message["status"])).inc()
            await send(message)

        try:
            problem = self._forbidden(scope) or self._refuse(path)
            body = await self._read(receive, 0 if problem else self._max_body_bytes)
            if body is None:
                problem = problem or Problem(
                    413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large"
                )
        except _Gone:
            return
        except trio.TooSlowError:
            body, problem = None, Problem(408, f"the body did not come within {BODY_S:g} s", code="body_too_slow")
        app = problem.response() if problem else self._app
        await _listening(app, scope, body or b"", receive, counting_send)

    def _forbidden(self, scope: Scope) -> Problem | None:
        if self._key is None or scope["path"] in self._public:
            return None
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        # Bytes of any length, compared in constant time.
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key.encode()):
            return None
        message = "a valid API key is needed: send it as 'Authorization: Bearer KEY'"
        return Problem(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def _read(self, receive: Receive, limit: int) -> bytes | None:
        """The body, or None where it is larger than ``limit``. Raises _Gone, TooSlowError."""
        body, more = bytearray(), True
        with trio.fail_after(BODY_S):
            while more:
                piece, more = await _next_piece(receive)
                body += piece
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        body.clear()
        with trio.move_on_after(DISCARD_S):
            while more:
                _, more = await _next_piece(receive)
        return None


async def _next_piece(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _Gone
    return message.get("body", b""), message.get("more_body", False)


async def _listening(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run ``app`` on a body that is here already, until it is done or the client leaves."""
    unread = [body]
    answered = False

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await trio.sleep_forever()
        raise AssertionError

    async def noting_send(message: Message) -> None:
        nonlocal answered
        answered = message["type"] == "http.response.body" and not message.get("more_body", False)
        await send(message)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not answered:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await app(scope, replay, noting_send)
        nursery.cancel_scope.cancel()
