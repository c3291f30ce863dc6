"""Responses with the output of a generation.

Rules
1. ``StreamedResponse.start`` waits for the first piece: an error before it is an ordinary error response with its own
   status.
2. ``on_late_error`` ends the stream after a later error: with an event, if the format has events. Otherwise the
   connection is cut, so that a client cannot take a part of a response for all of it.
3. A response always aborts its generation when it ends. That has no effect on a generation that is complete.
4. Output that was read from a generation stays charged to its request until the connection has accepted it: a streamed
   response has one undelivered piece, a whole response all pieces. If the request is ended while the connection does
   not accept data, the delivery ends too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omni_actors.errors import RequestError
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.api.generations import Relayed
from omni_actors.serve.http.buffered_socket import PIECE_BYTES
from omni_actors.serve.http.errors import forget_frames
from omni_actors.serve.media import picture_json

SSE = "text/event-stream"
DONE = b"data: [DONE]\n\n"

Pieces = AsyncGenerator[bytes, None]


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event with ``data`` as JSON. name: of the event's type, if it has one."""
    return b"".join((_begin(name), msgspec.json.encode(data), b"\n\n"))


async def picture_event(data: Any, name: str | None = None) -> bytes:
    """Return as ``event`` does an event with pictures (``PictureText``) in its data."""
    return await picture_json.encode(data, _begin(name), b"\n\n")


def _begin(name: str | None) -> bytes:
    return b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "


def error_event(error: RequestError) -> bytes:
    """Return a server-sent event with OpenAI's error object."""
    return b"data: " + to_http_error(error).body() + b"\n\n"


class JSONResponse(Response):
    """A response with ``data`` as JSON."""

    def __init__(self, data: Any, status: int = 200) -> None:
        super().__init__(msgspec.json.encode(data), status, media_type="application/json")


async def picture_response(data: Any) -> Response:
    """Return a response with ``data`` as JSON, with pictures (``PictureText``) in it."""
    return Response(await picture_json.encode(data), media_type="application/json")


class StreamedResponse(Response):
    """A response that is sent while its generation makes it.

    Args:
        generation: the generation, or the generations, that ``pieces`` reads.
        pieces: the pieces of the body. A stream of server-sent events must yield complete events.
        media_type: the content type. The default is that of server-sent events.
        on_late_error: returns the last piece after an error. None: cut the connection.
    """

    def __init__(
        self,
        generation: Relayed,
        pieces: Pieces,
        media_type: str = SSE,
        on_late_error: Callable[[RequestError], bytes] | None = error_event,
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # for proxies: they must not collect the stream
        self._generation, self._pieces, self._on_late_error = generation, pieces, on_late_error
        generation.stream.relay(whole=False)
        self._first = b""

    async def start(self) -> StreamedResponse:
        """Wait for the first piece, and return self. Raises RequestError. Cancellation aborts the generation."""
        try:
            self._first = await anext(self._pieces, b"")
        except BaseException:
            self._generation.abort()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""

        async def send_piece(piece: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": more})

        piece: bytes | None = self._first
        try:
            async with aclosing(self._pieces):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                while piece is not None:
                    with self._generation.stream.delivering() as delivery:
                        await send_piece(piece)
                    if delivery.cancelled_caught:
                        return
                    piece = await anext(self._pieces, None)
        except RequestError as error:
            forget_frames(error)
            if self._on_late_error is None:
                return
            await send_piece(self._on_late_error(error))
        finally:
            self._generation.abort()
        await send_piece(b"", more=False)


class WholeResponse(Response):
    """A response that was made of all outputs of its generation; see rule 4."""

    def __init__(self, generation: Relayed, response: Response) -> None:
        super().__init__()
        self._generation, self._response = generation, response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response in pieces (ASGI). Each piece discharges its share of the collected output.

        Raises RequestError if the request was ended before the response began. If it ends later, the response is cut.
        """
        response, generation = self._response, self._generation
        size, body = generation.stream.undelivered_bytes, memoryview(bytes(response.body))
        started = False
        start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        try:
            with generation.stream.delivering() as delivery:
                await send(start)
            started = not delivery.cancelled_caught
            for at in range(0, len(body), PIECE_BYTES):
                piece = body[at : at + PIECE_BYTES]
                with generation.stream.delivering() as delivery:
                    await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
                if delivery.cancelled_caught:
                    return
                generation.stream.delivered(size * len(piece) // len(body))
        except RequestError as error:
            if started:
                forget_frames(error)
                return
            raise
        finally:
            generation.abort()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextmanager
def collecting(generation: Relayed) -> Iterator[None]:
    """Wrap reading a whole generation and making its response, which ``WholeResponse`` then sends.

    An exception in the block aborts the generation.
    """
    generation.stream.relay(whole=True)
    try:
        yield
    except BaseException:
        generation.abort()
        raise
