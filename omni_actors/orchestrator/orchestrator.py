"""Admits requests, and follows them to their end.

All state belongs to the event loop and is changed by synchronous calls.

Rules
1. A request ends once, in ``Orchestrator._end``: it gets its outcome, its client is woken, and every stage that still
   has work or chunks of it gets an ``Abort``. Then it gives back its place, as soon as its client lacks little output
   (``unread``). Its deadline counts until the client has everything (``readers``).
2. Nothing here waits for a worker.
3. Bounded are: requests (``max_requests``), outputs that clients do not have yet (``output_bytes`` per request,
   ``unread_bytes`` in all), time (the deadline), and the chunks retained for a replay (``retain_bytes`` per stage and
   request, ``worker_retain_bytes`` per worker).

``dispatch`` places and starts requests, ``worker_events`` takes what workers report of them, ``replay_execution``
carries out what a death means for them, ``suspects`` finds those that cause deaths, and ``readers`` accounts for what
their clients have not read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any

import trio

from omni_actors import errors
from omni_actors.config import Limits
from omni_actors.orchestrator.closures import Closures
from omni_actors.orchestrator.deadlines import Deadlines
from omni_actors.orchestrator.dispatch import Dispatcher
from omni_actors.orchestrator.inputs import InputMover, encode_params
from omni_actors.orchestrator.lifecycle import Event
from omni_actors.orchestrator.pieces import Inputs
from omni_actors.orchestrator.placement import Placement
from omni_actors.orchestrator.pools import Pools
from omni_actors.orchestrator.readers import Readers
from omni_actors.orchestrator.replay_execution import ReplayExecution
from omni_actors.orchestrator.request import OnFailure, Request
from omni_actors.orchestrator.retry_after import RetryAfterEstimator
from omni_actors.orchestrator.routes import Route
from omni_actors.orchestrator.stream import OutputStream
from omni_actors.orchestrator.suspects import Suspects
from omni_actors.orchestrator.trials import Trials
from omni_actors.orchestrator.worker_events import WorkerEvents
from omni_actors.protocol import messages
from omni_actors.supervisor.edges import Edges
from omni_actors.supervisor.replica import Replica

DROPPING_ERRORS = (errors.Aborted, errors.DeadlineExceeded, errors.SlowConsumer)
"""Errors after which unread output is dropped."""


class Orchestrator:
    """Owns the requests of one pipeline. ``events`` is the supervisor's ``Listener``.

    edges: the rings between the parent and the workers.
    limits: the pipeline's limits.
    deterministic_stages: the stages that give the same output chunks for the same input chunks.
    resumable_stages: the stages that go on from their decisions.
    on_end: called once for each request, when it has ended and its client has everything or was cut off.
    """

    def __init__(
        self,
        edges: Edges,
        *,
        limits: Limits,
        deterministic_stages: Set[str],
        resumable_stages: Set[str],
        on_end: Callable[[Request], None],
    ) -> None:
        self._limits, self._on_end = limits, on_end
        trials = Trials()
        placement = self._placement = Placement(reserved=trials.running.keys())
        self._deadlines = Deadlines()
        self.readers = Readers(
            limits, deadlines=self._deadlines, replicas=placement.replicas, cut=self._cut, on_close=self._closed
        )
        self._inputs = InputMover(
            edges,
            limits,
            end=self._end,
            require_admissible=lambda request: self._suspects.require_admissible_input(request),
        )
        dispatcher = self._dispatcher = Dispatcher(
            limits,
            placement=placement,
            readers=self.readers,
            trials=trials,
            send_input=self._inputs.send,
            resumable=resumable_stages,
        )
        self._suspects = Suspects(limits, dispatcher, self._end)
        self._replays = ReplayExecution(
            limits,
            dispatcher,
            suspects=self._suspects,
            end=self._end,
            recoverable=deterministic_stages | resumable_stages,
        )
        self.closures, self.wait_ended, self.using = Closures(), dispatcher.wait_ended, dispatcher.using
        self.failed_stages: Mapping[str, errors.StageFailed] = self._replays.failed_stages
        """Stages without a replica left, in the order in which they were given up."""
        self.pools = Pools(dispatcher, self._suspects, self._replays.failed_stages, self._end)
        self.events = WorkerEvents(
            dispatcher,
            suspects=self._suspects,
            replays=self._replays,
            readers=self.readers,
            pools=self.pools,
            end=self._end,
            retry_after_s=lambda: self.retry_after_s,
        )
        self._names = map("req-{}".format, itertools.count(1))
        self.open_requests: dict[str, Request] = {}
        """The requests that are not closed, by name; the oldest first."""
        self._retry_after = RetryAfterEstimator()

    @trio.lowlevel.enable_ki_protection
    async def run(self, replicas: Iterable[Replica], task_status: trio.TaskStatus[None]) -> None:
        """Serve requests on these replicas until cancelled; then abort the requests that are left."""
        for replica in replicas:
            self._placement.add(replica)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._deadlines.run, self._expire)
                nursery.start_soon(self._suspects.run)
                nursery.start_soon(self._dispatcher.replay_log.run)
                self._inputs.nursery = nursery
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:
                    self._inputs.nursery = None  # a nursery that closes takes no more tasks
        finally:
            self.abort_all()

    # Called for clients. A Ctrl-C is for the user's task, not for the middle of these calls.

    @trio.lowlevel.enable_ki_protection
    def submit(
        self,
        inputs: Inputs,
        route: Route,
        params: Mapping[str, Mapping[str, Any]],
        deadline_s: float,
        name: str | None = None,
        on_failure: OnFailure = "replay",
        priority: int = 0,
        waited_s: float = 0.0,
        work: float = 1.0,
        session: str | None = None,
    ) -> OutputStream:
        """Admit a request and return the stream of its outputs. Does not wait.

        inputs: pieces by kind; they must not change before the request ends. Live input is read while it runs.
        route: from ``routes.plan``.
        params: parameters for each stage of the route.
        deadline_s: seconds until the request ends with DeadlineExceeded.
        name: a name that no other request in flight has; None makes one.
        on_failure: "replay" or "fail", after the death of a worker that the request needs.
        priority: a lower number is dispatched first, and in a full system takes the place of a higher one that waits.
        waited_s: seconds that the request waited before this call; its order and its metrics count them.
        work: how much the request is to do, compared with others on its route.
        session: requests with the same one prefer the same replicas.

        Raises InvalidRequest (parameters, a name in use), Overloaded, Quarantined, StageAsleep, StageUnavailable, and
        SystemClosed unless ``run`` is running.
        """
        if self._inputs.nursery is None:
            raise errors.SystemClosed
        encoded_params, now = encode_params(params), time.monotonic()
        self._require_admissible(route, name)
        request = Request(
            name=name or self._new_name(),
            route=route,
            inputs=inputs,
            params=encoded_params,
            deadline_s=deadline_s,
            submitted=now,
            arrived=now - waited_s,
            priority=priority,
            work=work,
            session=session,
            on_failure=on_failure if self._limits.replays else "fail",
            expires=trio.current_time() + deadline_s,
        )
        self._suspects.require_admissible(request)
        if self.in_flight >= self._limits.max_requests and not (self.readers.make_room() or self._displace(request)):
            raise self._overloaded()
        self._admit(request)
        return OutputStream(request, self.readers, self.abort)

    def _new_name(self) -> str:
        while (name := next(self._names)) in self.open_requests:
            pass
        return name

    def _admit(self, request: Request) -> None:
        self._inputs.admit(request)
        self.open_requests[request.name] = request
        self.readers.admit(request)
        self._dispatcher.admit(request)
        self._suspects.join(request)
        self._dispatcher.try_dispatch(request)

    def _displace(self, request: Request) -> bool:
        """End a request that waits for its first dispatch with a higher number than ``request``, if there is one."""
        victim = self._dispatcher.displaceable(request.priority)
        if victim is None:
            return False
        self._end(victim, Event.FAIL, self._overloaded())
        return True

    def _overloaded(self, congested: str | None = None) -> errors.Overloaded:
        return errors.Overloaded(self._limits.max_requests, self.retry_after_s, congested)

    def _require_admissible(self, route: Route, name: str | None) -> None:
        if name in self.open_requests:
            raise errors.InvalidRequest(f"a request named {name!r} is in flight", param="request_id")
        self.closures.require_open(route)
        if self.failed_stages:
            for stage in route.stages:
                if stage in self.failed_stages:
                    raise self._replays.unavailable(stage)
        if (congested := self._placement.congested(route.stages)) is not None:
            raise self._overloaded(congested)

    @property
    def in_flight(self) -> int:
        """The number of places taken: requests that have not ended, and ended ones with much unread output."""
        return len(self._dispatcher.queued) + len(self._dispatcher.dispatched) + self.readers.unread.places

    @property
    def queued(self) -> int:
        """The number of admitted requests that wait for a ready replica, to be dispatched or replayed."""
        return self._dispatcher.waiting

    @property
    def retry_after_s(self) -> float:
        """An estimate of the seconds until a place is free."""
        requests, next_ends_s = self.open_requests.values(), self._placement.next_ends_s()
        return self._retry_after.retry_after_s(requests, time.monotonic(), next_ends_s)

    # Pausing

    @property
    def is_dispatch_paused(self) -> bool:
        """Whether new requests are admitted and wait, because generation is paused."""
        return self._dispatcher.dispatch_paused

    @trio.lowlevel.enable_ki_protection
    def set_dispatch_paused(self, *, paused: bool, frozen: bool = False) -> None:
        """Let requests that were not dispatched yet wait, or dispatch them.

        frozen: whether workers make no steps, from now until dispatch is not paused any more.
        """
        self._dispatcher.dispatch_paused = paused
        self._suspects.set_frozen(frozen=paused and (frozen or self._suspects.frozen))
        if not paused:
            self._suspects.advance()
            self._dispatcher.dispatch_waiting()

    # The end of requests

    def abort_named(self, name: str) -> Collection[messages.Address] | None:
        """Abort the request of this name. Return the replicas that held it; None: no such request is in flight."""
        if (request := self.open_requests.get(name)) is None:
            return None
        held_by = () if request.lifecycle.ended else tuple(request.replay_state.placement.values())
        self.abort(request)
        return held_by

    @trio.lowlevel.enable_ki_protection
    def abort(self, request: Request) -> None:
        """End a request, or drop the unread output of one that has ended. Does nothing if it was read to its end."""
        if not request.lifecycle.ended:
            self._end(request, Event.ABORT, errors.Aborted())
        elif request.pieces:
            self._cut(request, errors.Aborted())
        else:
            self.readers.deliver(request, request.account.undelivered)  # its reader reads no more

    @trio.lowlevel.enable_ki_protection
    def abort_all(self, reason: str | None = None, stages: Collection[str] | None = None) -> None:
        """End every request that has not ended, and that uses one of ``stages`` (None: any), with ``Aborted``."""
        for request in self._dispatcher.using(stages):
            self._end(request, Event.ABORT, errors.Aborted(reason))

    def _expire(self, request: Request) -> None:
        """End a request whose deadline has come, or whose connection reads less than the minimum rate."""
        if trio.current_time() >= request.expires:
            self._cut(request, errors.DeadlineExceeded(request.deadline_s))
        else:
            self._cut(request, self.readers.slow_consumer(request, "read_bytes_s"))

    def _end(self, request: Request, event: Event, error: errors.RequestError | None) -> None:
        request.lifecycle.advance(event)
        request.error = error
        self._inputs.close(request)
        request.finished = time.monotonic()
        if isinstance(error, errors.StageCrashed):
            self._dispatcher.replay_log.add_lost(error)
        self._retry_after.add(request)
        self._dispatcher.remove(request)
        if request.output_wakeup:
            request.output_wakeup.unpark_all()
        if isinstance(error, DROPPING_ERRORS):
            self.readers.drop(request)
        else:
            self.readers.end(request)
        self._suspects.request_ended(request, done=event is Event.COMPLETE)

    def _cut(self, request: Request, error: errors.RequestError) -> None:
        """End a request if it has not ended, and drop the output that its client does not have."""
        if not request.lifecycle.ended:
            self._end(request, Event.FAIL, error)
        else:
            request.error = error
            request.output_wakeup.unpark_all()
            self.readers.drop(request)

    def _closed(self, request: Request) -> None:
        """The request has ended and its client has everything, or was cut off."""
        del self.open_requests[request.name]
        self._on_end(request)
