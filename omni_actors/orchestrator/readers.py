"""Clients that read, and what their pace means for their requests: ``unread``'s decisions, applied.

Rules
1. A request is present here from its admission until its client has everything, or it was cut.
2. What changes an account goes through here, so that its consequences follow in the same turn of the event loop: stages
   pause or go on, the deadline of a connection moves, and what passes a bound is cut.
3. Every stage that holds a paused request is told so, one that starts it again too. It hears ``Pause`` and
   ``Resume`` in turn; a worker that is behind with its mail hears no ``Pause`` before it has caught up.
4. A least rate is a deadline: when a connection would be too slow unless it reads more. Nothing here polls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio

from omni_actors.config import Limits
from omni_actors.errors import Aborted, RequestError, SlowConsumer
from omni_actors.orchestrator.pieces import Piece
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.unread import Account, Unread
from omni_actors.protocol.messages import Address, Pause, Resume
from omni_actors.supervisor.replica import Replica


class Readers:
    """The clients of all requests that are not over.

    replica: the one at an address. cut: end a request for its client's pace, and drop its outputs.
    on_over: the client has everything of a request that its stages have ended.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        replica: Callable[[Address], Replica],
        cut: Callable[[Request, RequestError], None],
        on_over: Callable[[Request], None],
    ) -> None:
        self._limits, self._unread = limits, Unread(limits)
        self._replica, self._cut, self._on_over = replica, cut, on_over
        self._requests: dict[Account, Request] = {}

    # What the orchestrator says.

    def admit(self, request: Request) -> None:
        self._requests[request.account] = request
        self._unread.open(request.account)

    def arrive(self, request: Request, piece: Piece) -> None:
        """Charge a piece of output and queue it for the reader. This may cut requests, this one too."""
        request.pieces.append(piece)
        self._apply(request, self._unread.arrive(request.account, piece.nbytes, trio.current_time()))
        request.output_wakeup.unpark_all()
        if request.account.charged > self._limits.output_bytes:
            self._cut(request, self._slow(request, "output_bytes"))
        while self._unread.exceeded:
            victim = self._requests[self._unread.victim(trio.current_time())]
            self._cut(victim, self._slow(victim, "unread_bytes"))

    def started(self, request: Request, stage: str) -> None:
        """A ``Start`` was posted to a stage: whatever it was told before, it is not paused."""
        request.paused_stages.discard(stage)
        self._pace_stages(request)

    def complete(self, request: Request) -> None:
        """The stages have ended the request: it is over when its client has everything."""
        self._apply(request, self._unread.complete(request.account, trio.current_time()))

    def drop(self, request: Request) -> None:
        """Free all that the client does not have. The request is over, if it is complete.

        A connection that took too little is cut. One whose request was aborted may still take the piece under way, and
        hear the reason.
        """
        request.pieces.clear()
        if request.delivery is not None and not isinstance(request.error, Aborted):
            request.delivery.cancel()
        self._apply(request, self._unread.close(request.account, trio.current_time()))

    def make_room(self) -> bool:
        """End the request that has the slowest reader, where one is slow enough, for a request that finds no place."""
        account = self._unread.slowest(trio.current_time())
        if account is not None:
            self._cut(self._requests[account], self._slow(self._requests[account], "max_requests"))
        return account is not None

    def too_slow(self, request: Request) -> SlowConsumer:
        """The error of a request whose connection did not reach the least rate."""
        return self._slow(request, "read_bytes_s")

    # What a reader does.

    @trio.lowlevel.enable_ki_protection
    async def next(self, request: Request) -> Piece:
        """The next piece. Raises StopAsyncIteration at the end, and the request's error."""
        self._apply(request, self._unread.ask(request.account, trio.current_time()))
        while not request.readable:
            if request.error is not None:
                raise request.error
            if request.lifecycle.ended:
                raise StopAsyncIteration
            await request.output_wakeup.park()
        piece = request.pieces.popleft()
        self._apply(request, self._unread.read(request.account, piece.nbytes, trio.current_time()))
        return piece

    @trio.lowlevel.enable_ki_protection
    def send(self, request: Request, *, sending: bool) -> None:
        """The reader begins, or ends, to wait for its connection."""
        request.account.sending = sending
        self._watch_rate(request)

    @trio.lowlevel.enable_ki_protection
    def deliver(self, request: Request, size: int) -> None:
        """The client has ``size`` bytes of what the reader holds."""
        self._apply(request, self._unread.deliver(request.account, size, trio.current_time()))

    @trio.lowlevel.enable_ki_protection
    def close(self, request: Request) -> None:
        """The reader wants nothing more, of a request that is complete."""
        self._apply(request, self._unread.release(request.account, trio.current_time()))

    # What there is.

    @property
    def unread_bytes(self) -> int:
        """Bytes of output, of all requests, that their clients do not have."""
        return self._unread.total

    @property
    def paused(self) -> int:
        """Requests whose stages are paused."""
        return self._unread.paused

    def complete_requests(self) -> Iterator[Request]:
        """Those whose stages have ended, and whose clients do not have everything."""
        return (request for request in self._requests.values() if request.lifecycle.ended)

    @property
    def places(self) -> int:
        """How many complete requests count against admission."""
        return sum(self._unread.takes_place(request.account) for request in self.complete_requests())

    # Inside.

    def _apply(self, request: Request, changed: list[Account]) -> None:
        for account in changed:
            self._pace_stages(self._requests[account])
        if request.account.paused:
            self._pace_stages(request)  # a worker may have caught up with its mail
        self._watch_rate(request)
        if request.over and request.account in self._requests:
            del self._requests[request.account]
            self._unread.close(request.account, trio.current_time())
            self._on_over(request)

    def _pace_stages(self, request: Request) -> None:
        """Rule 3."""
        if request.number is None or request.lifecycle.ended:
            return
        for stage, address in request.placement.items():
            replica = self._replica(address)
            told = stage in request.paused_stages
            if request.account.paused and not told and stage not in request.stats and not replica.congested:
                replica.post(Pause(request.number))
                request.paused_stages.add(stage)
            elif told and not request.account.paused:
                replica.post(Resume(request.number))
                request.paused_stages.remove(stage)

    def _watch_rate(self, request: Request) -> None:
        request.lifetime.deadline = min(request.expires, self._unread.too_slow_at(request.account))

    def _slow(self, request: Request, limit: str) -> SlowConsumer:
        account, now = request.account, trio.current_time()
        rate = 0.0 if account.waits_since is None else account.rate(now)
        return SlowConsumer(limit, getattr(self._limits, limit), account.charged, rate, account.waited_s(now))
