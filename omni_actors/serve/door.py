"""The door: what every request passes before a handler sees it, and the watch for clients that leave.

Rules
1. Who may not enter is told so from the head of the request alone.
2. A body is read whole, and counted while it comes, before its handler starts; where no handler reads it, it is not
   kept. One that is refused is read on for a while and thrown away, since a client that is still sending does not see
   the answer. Nothing here holds on to a body that its handler has taken.
3. While a handler runs, only the door listens to the client. One that leaves cancels the handler, unless its answer is
   complete: then "disconnect" only means that the exchange is over, and the server is still at work on its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import trio
from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_actors.serve.arrivals import SCOPE_KEY, Arrival
from omni_actors.serve.keys import holds_key
from omni_actors.serve.problems import Problem

BODY_S = 60.0
"""A body that is not here by then is given up."""
DISCARD_S = 5.0


class _Gone(Exception):
    """The client left before its request was whole."""


class Door:
    """An ASGI app around another.

    api_key: None lets everyone in. public: paths that need no key. routes: the paths that are counted by name.
    admit: called with a request's path; gives None where no handler reads a body. Raises Problem where there is no
    service now.
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
        admit: Callable[[str], Arrival | None],
    ) -> None:
        self._app, self._key, self._max_body_bytes = app, api_key, max_body_bytes
        self._public, self._routes, self._admit = public, routes, admit
        self._answers = Counter("omni_http_answers", "HTTP answers begun", ["path", "status"], registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        counted_as = path if path in self._routes else "other"
        arrival: Arrival | None = None

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                if arrival is not None:
                    arrival.leave()  # before the client sees its answer, and may come again
                self._answers.labels(counted_as, str(message["status"])).inc()
            await send(message)

        incoming = _Incoming(receive)
        app, unread = self._app, [b""]
        try:
            try:
                self._require_key(scope)
                arrival = scope[SCOPE_KEY] = self._admit(path)
                unread = [await self._read(incoming, arrival)]
            except Problem as problem:
                if arrival is not None:
                    arrival.leave()
                app = problem.response()
                await incoming.discard()
            await _listening(app, scope, unread, receive, counting_send)
        except _Gone:
            return
        finally:
            if arrival is not None:
                arrival.leave()

    def _require_key(self, scope: Scope) -> None:
        """Raises Problem 401."""
        if scope["path"] in self._public or holds_key(scope["headers"], self._key):
            return
        message = "a valid API key is needed: send it as 'Authorization: Bearer KEY'"
        raise Problem(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def _read(self, incoming: _Incoming, arrival: Arrival | None) -> bytes:
        """The body; without an arrival it is counted and not kept. Raises Problem, _Gone."""
        body, size = bytearray(), 0
        with trio.move_on_after(BODY_S):
            while incoming.more:
                piece = await incoming.next()
                size += len(piece)
                if size > self._max_body_bytes:
                    message = f"the body is larger than {self._max_body_bytes} bytes"
                    raise Problem(413, message, code="body_too_large")
                if arrival is not None:
                    arrival.hold(len(piece))
                    body += piece
            return bytes(body)
        raise Problem(408, f"the body did not come within {BODY_S:g} s", code="body_too_slow")


class _Incoming:
    """A request's body, as it comes. more: whether there is some yet."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.more = receive, True

    async def next(self) -> bytes:
        """Raises _Gone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        self.more = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def discard(self) -> None:
        """Raises _Gone."""
        with trio.move_on_after(DISCARD_S):
            while self.more:
                await self.next()


async def _listening(app: ASGIApp, scope: Scope, unread: list[bytes], receive: Receive, send: Send) -> None:
    """Run ``app`` on a body that is here already, until it is done or the client leaves. unread: the body, alone."""
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
