"""The stream that a request's client reads.

It is not the request's record, so that dropping the stream is noticed: the orchestrator holds only the record.
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

    The final piece comes once every stage has finished. Iteration raises the RequestError that ended the request, after
    the outputs that came before it; those of a request that was aborted, or whose time was up, or that was read too
    slowly, are dropped. Cancellation: a piece is returned or stays queued. Dropping the stream aborts.
    """

    def __init__(self, request: Request, readers: Readers, abort: Callable[[Request], None]) -> None:
        self.request, self._readers, self._abort = request, readers, abort
        self._trio = trio.lowlevel.current_trio_token()

    def abort(self) -> None:
        """End the request now, in every stage, and drop what is not read. Harmless once all of it is read."""
        self._abort(self.request)

    def hold(self, *, whole: bool) -> None:
        """Say, before the first piece is read, that this reader passes pieces on (see ``unread``).

        whole: it collects the whole answer first.
        """
        self.request.account.holds, self.request.account.whole = True, whole

    @property
    def held_bytes(self) -> int:
        """Bytes of output that this reader holds for its connection."""
        return self.request.account.held

    def delivered(self, size: int) -> None:
        """The connection has taken ``size`` bytes of the output that this reader holds."""
        self._readers.deliver(self.request, size)

    @contextmanager
    def delivering(self) -> Iterator[trio.CancelScope]:
        """A block that waits for the connection of a reader that passes pieces on. It has to read at the least rate.

        Raises the RequestError of a request that was cut. The block is cancelled when the request is cut meanwhile, and
        the scope tells so.
        """
        request = self.request
        if request.over and request.error is not None:
            raise request.error
        with trio.CancelScope() as request.delivery:
            self._readers.send(request, sending=True)
            try:
                yield request.delivery
            finally:
                request.delivery = None
                self._readers.send(request, sending=False)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Piece:
        await trio.lowlevel.checkpoint()
        return await self._readers.next(self.request)

    def __del__(self) -> None:
        """The collector may run anywhere, in another thread too: only the event loop touches a request."""
        if not self.request.over:
            with suppress(trio.RunFinishedError):
                self._trio.run_sync_soon(self._abort, self.request)
