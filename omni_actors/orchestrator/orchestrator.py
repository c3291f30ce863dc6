"""Runs requests: admission, dispatch, settlement. Everything here is one task's worth of state, changed by plain calls.

Rules
1. A request number is given at dispatch, so numbers reach every worker in increasing order.
2. ``Start`` is posted to every stage of a route, last stage first, before any input moves (prewarm).
3. What a death means for a request is decided in ``decide_replay`` alone; whenever the facts change, it is asked again.
4. A stage that starts again is sent nothing before it has said ``Started``; then its sources send from the first chunk.
5. Requests that may have ended their worker are replayed on trial; one that used up its replays by that is refused
   when it is sent again (``suspects``).
6. A request ends once, in ``_end``: its outcome is set, its client woken, every stage that still holds it told. It is
   over, and gives back its place, when its client has everything too; its deadline counts until then (``readers``).
7. Nothing here waits on a worker. Bounded are: requests (``max_requests``), outputs that clients do not have yet
   (``output_bytes`` a request, ``unread_bytes`` in all), time (the deadline), and what is retained for a replay
   (``retain_bytes`` a stage and request, ``worker_retain_bytes`` a worker).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import trio

from omni_actors.config import Limits
from omni_actors.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Quarantined,
    RequestError,
    SlowConsumer,
    StageCrashed,
    StageFailed,
    StageUnavailable,
    WorkerExit,
)
from omni_actors.orchestrator.inputs import encode_params, send_input
from omni_actors.orchestrator.lifecycle import Event, State
from omni_actors.orchestrator.pieces import Input, Piece
from omni_actors.orchestrator.placement import Placement
from omni_actors.orchestrator.readers import Readers
from omni_actors.orchestrator.replay import Facts, Fail, Replay, Unavailable, Untouched, decide_replay, idle
from omni_actors.orchestrator.request import OnFailure, Request
from omni_actors.orchestrator.retry_after import RetryAfterEstimator
from omni_actors.orchestrator.routes import Route
from omni_actors.orchestrator.stream import OutputStream
from omni_actors.orchestrator.suspects import Suspects
from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import ChunkSequence, ReplayDiverged
from omni_actors.protocol.messages import (
    CLIENT,
    CLIENT_ADDRESS,
    Abort,
    Address,
    Finished,
    InputComplete,
    Refused,
    RequestNotice,
    Resend,
    Start,
    Started,
    Unreplayable,
)
from omni_actors.supervisor.edges import Edges
from omni_actors.supervisor.replica import Replica

CUTS = (Aborted, DeadlineExceeded, SlowConsumer)
"""Errors after which unread output is dropped."""


class Orchestrator:
    """Owns the requests of one pipeline. It is the supervisor's ``Listener``.

    ``run`` gives it the supervisor's replicas; requests are taken while it runs.
    deterministic_stages: the stages that give the same output chunks for the same input chunks.
    """

    def __init__(
        self,
        edges: Edges,
        *,
        limits: Limits,
        deterministic_stages: Set[str],
        on_end: Callable[[Request], None],
    ) -> None:
        self._edges, self._limits, self._deterministic_stages, self._on_end = (
            edges,
            limits,
            deterministic_stages,
            on_end,
        )
        self.readers = Readers(limits, replica=self._replica, cut=self._cut, on_over=self._over)
        self._placement = Placement(self.load)
        self.failed_stages: dict[str, StageFailed] = {}
        """Those without a replica left, in the order in which they were given up on."""
        self._requests: dict[int, Request] = {}
        self._queued: list[Request] = []
        self._newest = 0
        self._names = itertools.count(1)
        self._retry_after = RetryAfterEstimator()
        self._suspects = Suspects(self, self._placement, limits)
        self._nursery: trio.Nursery | None = None

    @trio.lowlevel.enable_ki_protection
    async def run(self, replicas: Mapping[Address, Replica], task_status: trio.TaskStatus[None]) -> None:
        """Attend to requests until cancelled; then every request that is left ends as ``Aborted``."""
        self._placement.use(replicas)
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._suspects.run)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for request in self.running():
                self._end(request, Event.ABORT, Aborted())

    # the client's side; a Ctrl-C is for the user's task, not for the middle of these

    @trio.lowlevel.enable_ki_protection
    def submit(
        self,
        inputs: Mapping[str, Sequence[Input]],
        route: Route,
        params: Mapping[str, dict[str, Any]],
        deadline_s: float,
        name: str | None = None,
        on_failure: OnFailure = "replay",
    ) -> OutputStream:
        """Admit a request. Raises InvalidRequest, Overloaded, Quarantined, StageUnavailable; never waits.

        inputs: pieces by kind; they must not change before the request's end. params: of each stage of the route. name:
        None, or one that no other request in flight has.
        """
        if self._nursery is None:
            raise RuntimeError("the system is closed")
        encoded_params = encode_params(params)
        if name is not None and any(request.name == name for request in self._in_flight()):
            raise InvalidRequest(f"a request named {name!r} is in flight", param="request_id")
        for stage in route.stages:
            if stage in self.failed_stages:
                raise self._unavailable(stage)
        if (behind := self._placement.behind(route.stages)) is not None:
            raise Overloaded(self._limits.max_requests, self.retry_after_s, behind)
        request = Request(
            name or f"req-{next(self._names)}",
            route,
            inputs,
            encoded_params,
            deadline_s,
            submitted=time.monotonic(),
            on_failure=on_failure if self._limits.replays else "fail",
            expires=trio.current_time() + deadline_s,
        )
        self._suspects.require_admissible(request)
        if self.in_flight >= self._limits.max_requests and not self.readers.make_room():
            raise Overloaded(self._limits.max_requests, self.retry_after_s)
        request.work.deadline = request.expires
        self.readers.admit(request)
        self._nursery.start_soon(self._attend, request)
        self._queued.append(request)
        if not self._suspects.join(request) and (placement := self._placement.place(route.stages)) is not None:
            self.dispatch(request, placement)
        return OutputStream(request, self.readers, self.abort)

    def running(self) -> list[Request]:
        """The requests that have not ended."""
        return [*self._queued, *self._requests.values()]

    def _in_flight(self) -> list[Request]:
        return [*self.running(), *self.readers.complete_requests()]

    @property
    def in_flight(self) -> int:
        """Requests that take a place: those in the stages, and large answers that clients do not have yet."""
        return len(self._queued) + len(self._requests) + self.readers.places

    @property
    def queued(self) -> int:
        """Admitted requests that wait for a stage to be ready, at first or to be replayed."""
        return len(self._queued) + sum(bool(request.stages_to_restart) for request in self._requests.values())

    @property
    def retry_after_s(self) -> float:
        """When a place may be free for one more request; seconds."""
        now, in_flight = time.monotonic(), self._in_flight()
        oldest_s = max((now - request.submitted for request in in_flight), default=0.0)
        return self._retry_after.retry_after_s(len(in_flight), oldest_s)

    def abort_named(self, name: str) -> None:
        """Harmless where no such request is in flight."""
        for request in self._in_flight():
            if request.name == name:
                self.abort(request)

    @trio.lowlevel.enable_ki_protection
    def abort(self, request: Request) -> None:
        """Harmless for one that was read to its end."""
        if not request.lifecycle.ended:
            self._end(request, Event.ABORT, Aborted())
        elif request.pieces:
            self._cut(request, Aborted())
        else:
            self.readers.close(request)

    @trio.lowlevel.enable_ki_protection
    def abort_all(self, reason: str) -> None:
        """End every request in flight; its client is told why."""
        for request in self.running():
            self._end(request, Event.ABORT, Aborted(reason))

    @trio.lowlevel.enable_ki_protection
    async def _attend(self, request: Request) -> None:
        """A request's own task: moves its input in, and watches its deadline and its connection's least rate."""
        with request.work:
            with request.feeding:
                await self._feed(request)
            await trio.sleep_forever()
        if not request.over:
            late = trio.current_time() >= request.expires
            self._cut(request, DeadlineExceeded(request.deadline_s) if late else self.readers.too_slow(request))

    async def _feed(self, request: Request) -> None:
        while True:
            while not request.pending_inputs:
                await request.input_wakeup.park()
            try:
                await send_input(request, request.pending_inputs.popleft(), self._edges)
            except InvalidRequest as error:
                if not request.lifecycle.ended:
                    self._end(request, Event.FAIL, error)
            if request.on_failure == "fail" and not request.pending_inputs:
                request.inputs = {}

    # dispatch

    def dispatch_waiting(self) -> None:
        """Give waiting requests to replicas that are ready, suspects aside; those that were dispatched before first."""
        for request in [*self._requests.values(), *self._queued]:
            stages = request.stages_to_restart if request.number is not None else request.route.stages
            if (
                stages
                and not self._suspects.includes(request)
                and (placement := self._placement.place(stages)) is not None
            ):
                self.dispatch(request, placement)

    def dispatch(self, request: Request, placement: Mapping[str, Address]) -> None:
        """Start a waiting request in all stages of its route, or again in those that lost it."""
        if request.number is None:
            self._start_first(request, dict(placement))
        else:
            self._start_again(request, placement)

    def _replica(self, address: Address) -> Replica:
        return self._placement.replicas[address]

    def load(self, address: Address) -> int:
        """Requests placed on a replica."""
        return sum(address in request.placement.values() for request in self._requests.values())

    def _start_first(self, request: Request, placement: dict[str, Address]) -> None:
        self._queued.remove(request)
        self._newest += 1
        request.number, request.placement = self._newest, placement
        self._requests[request.number] = request
        request.lifecycle.advance(Event.DISPATCH)
        for stage in reversed(request.route.stages):
            if CLIENT in request.route.targets[stage]:
                request.open_outputs[stage] = ChunkSequence(request.number, stage)
            self._start(request, stage)
        request.feed(*request.route.entries)

    def _start_again(self, request: Request, placement: Mapping[str, Address]) -> None:
        request.replays += 1
        request.charged_replays += request.charged
        request.charged = False
        request.placement |= placement
        request.starting |= placement.keys()
        request.repeated |= placement.keys()
        for stage in reversed(request.stages_to_restart):
            request.stats.pop(stage, None)
            self._start(request, stage)
        request.stages_to_restart = ()

    def _start(self, request: Request, stage: str) -> None:
        """To the stages below that are starting too it will be told to send when they have started."""
        assert request.number is not None, "it is dispatched"
        self._suspects.used(stage, request)
        placed = {CLIENT: CLIENT_ADDRESS, **request.placement}
        below = request.route.targets[stage]
        targets = [placed[name] for name in below if name in placed and name not in request.starting]
        self._placement.replicas[placed[stage]].post(
            Start(
                request=request.number,
                sources=request.route.sources[stage],
                targets=tuple(targets),
                params=request.params[stage],
                downstream=_feeds_stages(request, stage),
                retain_bytes=self._limits.retain_bytes if self._retains(request, stage) else 0,
                replayed=stage in request.starting,
                worker_retain_bytes=self._limits.worker_retain_bytes,
            )
        )
        self.readers.started(request, stage)

    def _retains(self, request: Request, stage: str) -> bool:
        """Whether a stage keeps its outputs. What goes to the client only is never sent again."""
        return request.on_failure == "replay" and _feeds_stages(request, stage)

    # the supervisor's side (Listener)

    def newest_request(self) -> int:
        return self._newest

    def on_worker_ready(self, address: Address) -> None:
        self.failed_stages.pop(address.stage, None)
        self._suspects.follow()  # those that may be innocent go first: their replica has nothing else to do yet
        self.dispatch_waiting()

    def on_worker_died(self, address: Address, exit: WorkerExit, failed_request: int | None) -> bool:
        return self._suspects.worker_died(address, exit, failed_request)

    def on_worker_lost(self, address: Address, generation: int, exit: WorkerExit) -> None:
        self._suspects.interrupt(address)
        for request in list(self._requests.values()):
            if request.placement.get(address.stage) == address:
                del request.placement[address.stage]
                request.starting.discard(address.stage)
                request.repeated.discard(address.stage)
                request.let_go.pop(address.stage, None)
                request.broken.pop(address.stage, None)
                request.fed = {(stage, source) for stage, source in request.fed if stage != address.stage}
                request.crash = StageCrashed(address.stage, address.replica, generation, exit)
                self._settle(request)
                if address.stage not in request.stages_to_restart and not request.lifecycle.ended:
                    self._suspects.clear(request)  # all of its output was here
        self._suspects.follow()

    def on_stage_failed(self, failure: StageFailed) -> None:
        if self._placement.has_failed(failure.stage):
            self.failed_stages[failure.stage] = failure
            for request in list(self._queued):
                if failure.stage in request.route.stages:
                    self._end(request, Event.FAIL, self._unavailable(failure.stage))
            for request in list(self._requests.values()):
                if request.stages_to_restart:
                    self._settle(request)

    def _unavailable(self, stage: str) -> StageUnavailable:
        return StageUnavailable(self.failed_stages[stage], self._placement.back_in_s(stage))

    def on_message(self, address: Address, message: RequestNotice) -> None:
        request = self._requests.get(message.request)
        if request is None or request.placement.get(address.stage) != address:
            return  # it has ended, or goes on elsewhere
        match message:
            case Started():
                self._fill(request, address)
            case InputComplete(source=source):
                request.fed.add((address.stage, source))
                self._progressed(request)
            case Finished(stats=stats):
                request.stats[address.stage] = stats
                self._suspects.done_with(request, address.stage)
                self._progressed(request)
            case Refused(_, text, param, code):
                self._end(request, Event.FAIL, InvalidRequest(text, param=param, code=code))
            case Unreplayable(_, reason, needed):
                request.let_go[address.stage] = reason
                if needed and request.crash is not None:
                    request.broken[address.stage] = reason
                    self._settle(request)

    def _fill(self, request: Request, address: Address) -> None:
        """A stage has started again: all that feed it begin at their first chunk."""
        request.starting.remove(address.stage)
        for source in request.route.sources[address.stage]:
            if source == CLIENT:
                request.feed(address.stage)
            elif (
                source in request.placement
            ):  # otherwise it starts again itself if it is wanted, and knows whom to feed
                assert request.number is not None, "it is dispatched"
                self._placement.replicas[request.placement[source]].post(Resend(request.number, address))

    def on_output(self, address: Address, data: memoryview) -> None:
        """Takes one private copy. Raises ringbuf.RingError where the bytes make no sense."""
        payload = memoryview(bytearray(data))
        header, tensors = chunks.decode(payload)
        request = self._requests.get(header.request)
        if request is None or address.stage not in request.open_outputs:
            return
        try:
            if not request.open_outputs[address.stage].accept(header.seq, payload, last=header.last):
                return
        except ReplayDiverged as error:
            if request.crash is None:
                raise
            self._fail(request, str(error))
            return
        if header.last:
            del request.open_outputs[address.stage]
        request.lifecycle.advance(Event.OUTPUT)
        now = time.monotonic()
        request.first_arrived.setdefault(address.stage, now)
        piece = Piece(address.stage, header.data, tensors, header.last, now, payload.nbytes)
        self.readers.arrive(request, piece)
        if header.last and not request.lifecycle.ended:
            self._progressed(request)

    # settlement

    def _progressed(self, request: Request) -> None:
        """A stage has finished or has all of its input, or the client has got its last output."""
        if request.crash is not None:
            self._settle(request)  # what was lost may be wanted no more
        else:
            self._end_if_complete(request, waived=())

    def _end_if_complete(self, request: Request, waived: Iterable[str]) -> None:
        """waived: stages that are not waited for."""
        if not request.open_outputs and request.placement.keys() <= {*request.stats, *waived}:
            self._end(request, Event.COMPLETE, None)

    def _facts(self, request: Request) -> Facts:
        return Facts(
            request.route,
            held=request.placement.keys(),
            finished=request.stats.keys(),
            repeated=request.repeated,
            fed=request.fed,
            open=request.open_outputs.keys(),
            seen=request.first_arrived.keys(),
            deterministic=self._deterministic_stages,
            let_go=request.let_go,
            broken=request.broken,
            given_up=self.failed_stages.keys(),
            on_failure=request.on_failure,
            replays=request.charged_replays,
            limit=self._limits.replays,
            charged=request.charged,
        )

    def _settle(self, request: Request) -> None:
        if request.lifecycle.ended:
            return  # one like it was settled before, and ended it
        facts = self._facts(request)
        request.stages_to_restart = ()
        match decide_replay(facts):
            case Untouched():
                self._end_if_complete(request, idle(facts))
            case Replay(stages):
                request.stages_to_restart = stages
                if not self._suspects.includes(request) and (placement := self._placement.place(stages)) is not None:
                    self._start_again(request, placement)
            case Fail(reason, used_up):
                is_convicted = request.charged and self._suspects.convict(request)
                self._fail(request, reason, retryable=not (used_up or is_convicted))
            case Unavailable(stage):
                self._end(request, Event.FAIL, self._unavailable(stage))

    def _fail(self, request: Request, reason: str | None, *, retryable: bool = True) -> None:
        """End it by the death that it did not survive, and why it was not replayed."""
        crash = request.crash
        assert crash is not None, "a worker died"
        error = StageCrashed(crash.stage, crash.replica, crash.generation, crash.exit, reason, retryable=retryable)
        self._end(request, Event.FAIL, error)

    def _end(self, request: Request, event: Event, error: RequestError | None) -> None:
        waiting = request.lifecycle.state is State.QUEUED
        request.lifecycle.advance(event)
        request.error = error
        request.inputs = {}
        request.pending_inputs.clear()
        request.feeding.cancel()
        request.finished = time.monotonic()
        self._retry_after.note(request.finished - request.submitted)
        if waiting:
            self._queued.remove(request)
        elif request.number is not None:
            del self._requests[request.number]
            for stage, address in request.placement.items():
                if stage not in request.stats or self._retains(request, stage):
                    self._placement.replicas[address].post(Abort(request.number))
        request.output_wakeup.unpark_all()
        if isinstance(error, CUTS):
            self.readers.drop(request)
        else:
            self.readers.complete(request)
        self._suspects.ended(request, complete=event is Event.COMPLETE)

    def end_like_culprit(self, request: Request, error: Quarantined) -> None:
        """End a request that is like one that was quarantined."""
        self._end(request, Event.FAIL, error)

    def end_culprit(self, request: Request, reason: str) -> None:
        """End a request whose worker died, and which cannot be replayed for this reason."""
        self._fail(request, reason, retryable=False)

    def _cut(self, request: Request, error: RequestError) -> None:
        """End a request, whether its stages have or not, and drop what its client does not have."""
        if not request.lifecycle.ended:
            self._end(request, Event.FAIL, error)
        else:
            request.error = error
            request.output_wakeup.unpark_all()
            self.readers.drop(request)

    def _over(self, request: Request) -> None:
        """Its stages have ended it, and its client has everything."""
        request.work.cancel()
        self._on_end(request)


def _feeds_stages(request: Request, stage: str) -> bool:
    return request.route.targets[stage] != (CLIENT,)
