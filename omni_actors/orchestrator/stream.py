"""The stream that a request's client reads.

The stream is separate from the ``Request``, so that dropping the stream can abort the request: the orchestrator refers
to the ``Request`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from omni_actors.orchestrator.pieces import Piece
from omni_actors.orchestrator.readers import Readers
from omni_actors.orchestrator.request import Request


class OutputStream:
    """The outputs of one request: ``async for piece in stream``.

    The final piece comes when every stage has finished. Iteration raises the RequestError that ended the request, after
    the pieces that arrived before the error. Unread pieces are dropped if the request was aborted, exceeded its
    deadline, or was read too slowly. Cancellation: a piece is returned or stays queued. Dropping the stream aborts the
    request.
    """

    def __init__(self, request: Request, readers: Readers, abort: Callable[[Request], None]) -> None:
        self.request, self._readers, self._abort = request, readers, abort
        self._trio = trio.lowlevel.current_trio_token()

    def abort(self) -> None:
        """End the request now, in every stage, and drop its unread output. Does nothing when all output is read."""
        self._abort(self.request)

    def relay(self, *, whole: bool, paced: bool = False) -> None:
        """Declare, before the first piece is read, that this reader relays output to a connection or a file.

        ``paced`` may also change later.

        Args:
            whole: Whether it collects the whole answer first (``ReaderKind``).
            paced: Whether it reads a stream at a pace of its own. Such a request is not ended to make room for another
                one while its stages wait for the reader.
        """
        self.request.account.reader = "whole" if whole else "paced" if paced else "stream"

    @property
    def undelivered_bytes(self) -> int:
        """Bytes of output that this reader has read and its connection has not accepted."""
        return self.request.account.undelivered

    def delivered(self, size: int) -> None:
        """Record that the connection has accepted ``size`` of the undelivered bytes."""
        self._readers.deliver(self.request, size)

    @contextmanager
    def delivering(self) -> Iterator[trio.CancelScope]:
        """Surround a wait for the connection, which has to read at the minimum rate (``limits.read_bytes_s``).

        Yields a cancel scope. It is cancelled when the request is cut during the wait.

        Raises:
            RequestError: The request was cut before.
        """
        request = self.request
        if request.closed and request.error is not None:
            request.raise_error()
        with trio.CancelScope() as request.delivery:
            self._readers.set_sending(request, sending=True)
            try:
                yield request.delivery
            finally:
                request.delivery = None
                self._readers.set_sending(request, sending=False)

    @property
    def ready(self) -> bool:
        """Whether reading would not wait: a piece can be read, or the request has ended."""
        return self.request.readable or self.request.lifecycle.ended

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Piece:
        return await self._readers.next(self.request)

    def __del__(self) -> None:
        """Abort the request on the event loop, since the garbage collector may run in any thread."""
        if not self.request.closed:
            with suppress(trio.RunFinishedError):
                self._trio.run_sync_soon(self._abort, self.request)
