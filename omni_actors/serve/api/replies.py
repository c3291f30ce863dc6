"""Answers that are sent while they are made.

Rules
1. ``begun`` waits for the first piece: what fails before it is an ordinary error, with a status of its own.
2. What fails later ends the stream by ``farewell``: an event where the format has events, else the connection is cut,
   so that nobody takes half an answer for a whole one.
3. However an answer ends, its generation is aborted: that is harmless when it was complete.
4. What was read of a generation stays charged to its request until the connection has taken it: a stream holds one
   piece, and a whole answer all of it. A request that is cut while the connection does not take more cuts that too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omni_actors.errors import RequestError
from omni_actors.generation import Generation
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.http.buffered_socket import PIECE_BYTES

SSE = "text/event-stream"
DONE = b"data: [DONE]\n\n"

Pieces = AsyncGenerator[bytes, None]


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_event(error: RequestError) -> bytes:
    return b"data: " + to_http_error(error).body() + b"\n\n"


class JSONReply(Response):
    """A whole answer."""

    def __init__(self, data: Any, status: int = 200) -> None:
        super().__init__(msgspec.json.encode(data), status, media_type="application/json")


class StreamedReply(Response):
    """See the module. on_late_error: the last piece for an error, or None to cut the connection."""

    def __init__(
        self,
        generation: Generation,
        pieces: Pieces,
        media_type: str,
        on_late_error: Callable[[RequestError], bytes] | None,
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # a proxy in between must not collect it
        self._generation, self._pieces, self._on_late_error = generation, pieces, on_late_error
        generation.hold(whole=False)
        self._first = b""

    async def start(self) -> StreamedReply:
        """Wait for the first piece. Raises RequestError."""
        try:
            self._first = await anext(self._pieces, b"")
        except BaseException:
            self._generation.abort()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_piece(piece: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": more})

        async def deliver(piece: bytes) -> None:
            with self._generation.delivering() as scope:
                await send_piece(piece)
            if scope.cancelled_caught:
                raise _DeliveryCancelled

        try:
            async with aclosing(self._pieces):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await deliver(self._first)
                async for piece in self._pieces:
                    await deliver(piece)
        except _DeliveryCancelled:
            return
        except RequestError as error:
            if self._on_late_error is None:
                return
            await send_piece(self._on_late_error(error))
        finally:
            self._generation.abort()
        await send_piece(b"", more=False)


class WholeReply(Response):
    """A whole answer, made of all that its generation gave; see rule 4."""

    def __init__(self, generation: Generation, answer: Response) -> None:
        super().__init__()
        self._generation, self._answer = generation, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer in pieces. With each one the client gets its share of the output that was collected.

        Raises RequestError where the request was cut before. One that is cut later ends before its answer is whole.
        """
        answer, generation = self._answer, self._generation
        held, body = generation.held_bytes, memoryview(bytes(answer.body))
        begun = False
        try:
            with generation.delivering():
                await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
            begun = True
            for at in range(0, len(body), PIECE_BYTES):
                piece = body[at : at + PIECE_BYTES]
                with generation.delivering() as delivery:
                    await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
                if delivery.cancelled_caught:
                    return
                generation.delivered(held * len(piece) // len(body))
        except RequestError:
            if begun:
                return
            raise
        finally:
            generation.abort()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextmanager
def collecting(generation: Generation) -> Iterator[None]:
    """Around reading a generation and making its whole answer, which ``WholeReply`` is to send."""
    generation.hold(whole=True)
    try:
        yield
    except BaseException:
        generation.abort()
        raise


class _DeliveryCancelled(Exception):
    """The request was cut while its connection did not take more."""
