"""Applies the decisions of ``unread`` to requests: pauses their stages, and ends those that are read too slowly.

Rules
1. A request is registered here from its admission until its client has everything or the request was cut.
2. Every change of an account goes through this module. Its consequences follow in the same turn of the event loop:
   stages are paused or resumed, a connection's deadline moves, and requests that exceed a bound are cut.
3. Every stage that holds a paused request is sent ``Pause``, also a stage that starts it again. Each worker receives
   ``Pause`` and ``Resume`` in turn. A congested worker is sent no ``Pause`` until it has caught up.
4. A minimum rate is a deadline: the time at which the connection becomes too slow if it reads nothing more. There is no
   polling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from omni_actors.config import Limits
from omni_actors.errors import Aborted, RequestError, SlowConsumer
from omni_actors.orchestrator.deadlines import Deadlines
from omni_actors.orchestrator.pieces import Piece
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.unread import Account, Unread
from omni_actors.protocol.messages import Address, Pause, Resume
from omni_actors.supervisor.replica import Replica

PIECES_A_TURN = 16
"""The most queued pieces that a reader gets before other tasks run. In one turn of the event loop, a piece of each
stage may arrive: a reader that gets fewer than arrive would fall behind, however promptly it asks."""


class Readers:
    """The readers of all requests that are not closed.

    The output that a request's client does not have is at most ``limits.output_bytes``, and that of all requests
    together at most ``limits.unread_bytes``. A request that exceeds a bound is cut with ``SlowConsumer``.

    Args:
        limits: The bounds.
        deadlines: Those of the requests: that of the request itself or, if earlier, its connection's (rule 4).
        replicas: The replicas by address, once the pipeline has started.
        cut: Ends a request because of its reader, and drops its unread output.
        on_close: Called when a request has ended and its client has all output or was cut off.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        deadlines: Deadlines,
        replicas: Mapping[Address, Replica],
        cut: Callable[[Request, RequestError], None],
        on_close: Callable[[Request], None],
    ) -> None:
        self.unread = Unread(limits)
        """The accounts of unread output. Only this object changes them."""
        self._limits = limits
        self._deadlines, self._replicas, self._cut, self._on_close = deadlines, replicas, cut, on_close
        self._requests: dict[Account, Request] = {}

    # Called by the orchestrator.

    def admit(self, request: Request) -> None:
        """Register a new request."""
        self._requests[request.account] = request
        self._deadlines.set(request, request.expires)
        self.unread.open(request.account)

    def arrive(self, request: Request, piece: Piece) -> None:
        """Charge a piece of output and queue it for the reader. This may cut requests, including this one."""
        request.pieces.append(piece)
        self._apply(request, self.unread.arrive(request.account, piece.nbytes, trio.current_time()))
        if request.output_wakeup and request.readable:
            request.output_wakeup.unpark_all()
        if request.account.charged > self._limits.output_bytes:
            self._cut(request, self.slow_consumer(request, "output_bytes"))
        while self.unread.exceeded:
            victim = self._requests[self.unread.victim(trio.current_time())]
            self._cut(victim, self.slow_consumer(victim, "unread_bytes"))

    def started(self, request: Request, stage: str) -> None:
        """Handle that a stage was sent a repeated ``Start``: it is not paused there, whatever was posted before."""
        request.paused_stages.discard(stage)
        self._pace_stages(request)

    def end(self, request: Request) -> None:
        """Record that a request has ended. It is closed when its client has everything."""
        self._apply(request, self.unread.end(request.account, trio.current_time()))

    def drop(self, request: Request) -> None:
        """Free the output that the client does not have. A request that has ended is then closed.

        A wait for the connection is cancelled, unless the request was aborted: then the connection may still take the
        piece that is being sent, and the reason.
        """
        request.pieces.clear()
        if request.delivery is not None and not isinstance(request.error, Aborted):
            request.delivery.cancel()
        self._apply(request, self.unread.close(request.account, trio.current_time()))

    def make_room(self, count: int = 1) -> bool:
        """End the requests with the slowest readers to make room for ``count`` others, or none if there are fewer.

        Return whether there were as many. A request whose reader is paced is not ended: it may be slow although its
        client takes everything at once.
        """
        slow = self.unread.slow(trio.current_time())
        if len(slow) < count:
            return False
        for account in slow[:count]:
            self._cut(self._requests[account], self.slow_consumer(self._requests[account], "max_requests"))
        return True

    def slow_consumer(self, request: Request, limit: str) -> SlowConsumer:
        """Return the error for a request whose reader exceeds this limit."""
        account, now = request.account, trio.current_time()
        return SlowConsumer(
            limit=limit,
            bound=getattr(self._limits, limit),
            unread_bytes=account.charged,
            read_bytes_s=account.rate(now),
            waited_s=account.waited_s(now),
        )

    # Called by the reader.

    @trio.lowlevel.enable_ki_protection
    async def next(self, request: Request) -> Piece:
        """Return the next piece, and wait for it if necessary. Other tasks run after ``PIECES_A_TURN`` pieces.

        Cancellation: the piece is returned or stays queued.

        Raises:
            StopAsyncIteration: After the last piece.
            RequestError: The error that ended the request, after the pieces before it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if request.account.undelivered or request.account.paused:
            self._apply(request, self.unread.ask(request.account, trio.current_time()))
        while not request.readable:
            if request.error is not None:
                request.raise_error()
            if request.lifecycle.ended:
                raise StopAsyncIteration
            await request.output_wakeup.park()
            request.pieces_in_turn = 0
        piece = request.pieces.popleft()
        self._apply(request, self.unread.read(request.account, piece.nbytes, trio.current_time()))
        request.pieces_in_turn += 1
        if request.pieces_in_turn == PIECES_A_TURN:
            await trio.lowlevel.cancel_shielded_checkpoint()
            request.pieces_in_turn = 0
        return piece

    @trio.lowlevel.enable_ki_protection
    def set_sending(self, request: Request, *, sending: bool) -> None:
        """Record that the reader begins or ends a wait for its connection."""
        request.account.sending = sending
        self._watch_rate(request)

    @trio.lowlevel.enable_ki_protection
    def deliver(self, request: Request, size: int) -> None:
        """Record that the client has ``size`` of the undelivered bytes."""
        self._apply(request, self.unread.deliver(request.account, size, trio.current_time()))

    # Internal.

    def _apply(self, request: Request, changed: list[Account]) -> None:
        for account in changed:
            self._pace_stages(self._requests[account])
        if request.account.paused:
            self._pace_stages(request)  # a congested worker may have caught up
        if request.account.sending:
            self._watch_rate(request)
        if request.closed and request.account in self._requests:
            del self._requests[request.account]
            self._deadlines.remove(request)
            self.unread.close(request.account, trio.current_time())
            self._on_close(request)

    def _pace_stages(self, request: Request) -> None:
        """Post ``Pause`` or ``Resume`` to the stages of a request that need it (rule 3)."""
        if not (request.account.paused or request.paused_stages) or request.number is None or request.lifecycle.ended:
            return
        for stage, address in request.replay_state.placement.items():
            replica = self._replicas[address]
            is_paused = stage in request.paused_stages
            if request.account.paused and not is_paused and stage not in request.stats and not replica.congested:
                replica.post(Pause(request.number))
                request.paused_stages.add(stage)
            elif is_paused and not request.account.paused:
                replica.post(Resume(request.number))
                request.paused_stages.remove(stage)

    def _watch_rate(self, request: Request) -> None:
        if request.account in self._requests:
            self._deadlines.set(request, min(request.expires, self.unread.too_slow_at(request.account)))
