"""The identifier and the log line of each request.

Rules
1. A client may bring an identifier in the header ``X-Request-ID``. One of another form than ``_SANE`` is replaced, so
   that no client can write into the log. Every response has the identifier, errors too, except refusals by the
   connection itself, for example of what is not valid HTTP (``http.connection``). These have no log line either.
2. Log records and traces that a request causes have its identifier (``log_events.REQUEST_ID``).
3. The log line is written when the response has ended. It has the path as the client sent it, percent-encoded and
   without its query, which may have secrets. The id of a stored response is cut, because it may protect the response
   (``routes.common.request_name``). A quote is percent-encoded too: it would end the quoted part of the line.
"""

from __future__ import annotations

import re
import time
import uuid
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_actors.log_events import REQUEST_ID, RequestServed, record
from omni_actors.serve.routes.common import request_name

HEADER = b"x-request-id"
MAX_PATH, MAX_METHOD = 200, 20
"""In characters. A longer path or method is cut in the log."""
CLIENT_CLOSED = 499
"""The status in the log of a request whose client disconnected before the response began, as nginx has it."""

_SANE = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class RequestLog:
    """An ASGI application around another one.

    Args:
        app: the wrapped application.
        writes_lines: whether to write a log line for each request.
    """

    def __init__(self, app: ASGIApp, *, writes_lines: bool) -> None:
        self._app, self._writes_lines = app, writes_lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = request_id(scope)
        REQUEST_ID.set(id)  # not reset: the connection's records about this request follow
        began = time.monotonic()
        status, size = CLIENT_CLOSED, 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, size
            kind = message["type"]
            if kind in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
                status = message.get("status", 101)
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, id.encode())]}
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._writes_lines:
                client, port = scope["client"]
                seconds = round(time.monotonic() - began, 6)
                path = scope["raw_path"].decode("ascii").replace('"', "%22")
                path = "/".join(map(_without_id, path.split("/")))[:MAX_PATH]
                record(
                    RequestServed(
                        client=f"[{client}]:{port}" if ":" in client else f"{client}:{port}",
                        method=scope.get("method", "GET")[:MAX_METHOD],
                        path=path,
                        http_version=scope["http_version"],
                        status=status,
                        body_bytes=size,
                        seconds=seconds,
                        request_id=id,
                    )
                )


def request_id(scope: Scope) -> str:
    """Return the client's identifier of its request, or a new one."""
    given = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return given.decode("ascii") if _SANE.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _without_id(part: str) -> str:
    """Return a part of a path. If it is the id of a stored response, or ends with one, the id is cut.

    It may be percent-encoded, as well as a slash before it.
    """
    names = unquote(part).split("/")
    cut = [request_name(name) for name in names]
    return part if cut == names else quote("/".join(cut), safe="")
