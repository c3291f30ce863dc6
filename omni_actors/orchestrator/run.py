"""Runs requests: admission, dispatch, settlement. Everything here is one task's worth of state, changed by plain calls.

Rules
1. A request number is given at dispatch, so numbers reach every worker in increasing order.
2. ``Start`` is posted to every stage of a route, last stage first, before any input moves (prewarm).
3. A request ends once, in ``_end``: its outcome is set, its client woken, every stage that still holds it told.
4. Nothing here waits on a worker. Bounded are: requests (``max_requests``), outputs not yet read (``output_bytes``),
   time (the deadline).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import trio

from omni_actors.actor import chunks
from omni_actors.actor.chunks import ChunkHeader, SequenceCheck
from omni_actors.actor.edges import Edges
from omni_actors.actor.supervisor import Replica
from omni_actors.actor.supervisor import State as ReplicaState
from omni_actors.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestError,
    SlowConsumer,
    StageCrashed,
    StageFailed,
    StageUnavailable,
    WorkerExit,
)
from omni_actors.messages import (
    CLIENT,
    CLIENT_ADDRESS,
    MAX_BYTES,
    Abort,
    Address,
    Finished,
    Refused,
    Start,
)
from omni_actors.orchestrator.lifecycle import Event, State
from omni_actors.orchestrator.request import Input, OutputStream, Piece, Request
from omni_actors.orchestrator.routes import Route

RETRY_AFTER_S = 1.0
PARAMS_BYTES = MAX_BYTES // 2
"""Largest parameters of a request at one stage, encoded: they travel in one control message."""


class Orchestrator:
    """Owns the requests of one pipeline. It is the supervisor's ``Listener``.

    ``run`` gives it the supervisor's replicas; requests are taken while it runs.
    """

    def __init__(
        self,
        edges: Edges,
        *,
        max_requests: int,
        output_bytes: int,
        on_end: Callable[[Request], None],
    ) -> None:
        self._edges = edges
        self._max_requests, self._output_bytes, self._on_end = max_requests, output_bytes, on_end
        self._replicas: Mapping[Address, Replica] = {}
        self.failed_stages: dict[str, StageFailed] = {}
        """Those without a replica left, in the order in which they were given up on."""
        self._requests: dict[int, Request] = {}
        self._queued: list[Request] = []
        self._newest = 0
        self._names = itertools.count(1)
        self._nursery: trio.Nursery | None = None

    @trio.lowlevel.enable_ki_protection
    async def run(self, replicas: Mapping[Address, Replica], task_status: trio.TaskStatus[None]) -> None:
        """Attend to requests until cancelled; then every request that is left ends as ``Aborted``."""
        self._replicas = replicas
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for request in self._in_flight():
                self._end(request, Event.ABORT, Aborted())

    # the client's side

    def submit(
        self,
        inputs: Mapping[str, Sequence[Input]],
        route: Route,
        params: Mapping[str, Mapping[str, Any]],
        deadline_s: float,
        name: str | None = None,
    ) -> OutputStream:
        """Admit a request. Raises InvalidRequest, Overloaded, StageUnavailable; never waits.

        inputs: pieces by kind. params: by stage. name: None, or one that no other request in flight has.
        """
        if self._nursery is None:
            raise RuntimeError("the system is closed")
        _require_portable(params)
        if any(request.name == name for request in self._in_flight()):
            raise InvalidRequest(f"a request named {name!r} is in flight", param="request_id")
        for stage in route.stages:
            if stage in self.failed_stages:
                raise StageUnavailable(self.failed_stages[stage])
        if self.in_flight >= self._max_requests:
            raise Overloaded(self._max_requests, RETRY_AFTER_S)
        request = Request(
            name or f"req-{next(self._names)}",
            route,
            inputs,
            params,
            deadline_s,
            submitted=time.monotonic(),
            work=trio.CancelScope(deadline=trio.current_time() + deadline_s),
        )
        self._queued.append(request)
        self._nursery.start_soon(self._attend, request)
        self._dispatch_queued()
        return OutputStream(request, self.abort)

    def _in_flight(self) -> list[Request]:
        return [*self._queued, *self._requests.values()]

    @property
    def in_flight(self) -> int:
        return len(self._in_flight())

    @property
    def queued(self) -> int:
        """Admitted requests that wait for a stage to be ready."""
        return len(self._queued)

    def abort_named(self, name: str) -> None:
        """Harmless where no such request is in flight."""
        for request in self._in_flight():
            if request.name == name:
                self.abort(request)

    def abort(self, request: Request) -> None:
        """Harmless after the request's end."""
        if not request.lifecycle.ended:
            self._end(request, Event.ABORT, Aborted())

    @trio.lowlevel.enable_ki_protection
    async def _attend(self, request: Request) -> None:
        """A request's own task: moves its input in, and watches its deadline."""
        with request.work:
            await request.dispatched.wait()
            with suppress(trio.ClosedResourceError):  # the entry stage died: its loss ends the request, with the cause
                await self._feed(request)
            await trio.sleep_forever()
        if not request.lifecycle.ended:
            self._end(request, Event.FAIL, DeadlineExceeded(request.deadline_s))

    async def _feed(self, request: Request) -> None:
        for stage, kinds in request.route.entries.items():
            pieces = [piece for kind in kinds for piece in request.inputs[kind]]
            for seq, piece in enumerate(pieces):
                assert request.number is not None, "it is dispatched"
                try:
                    header = ChunkHeader(request.number, CLIENT, seq, seq == len(pieces) - 1, dict(piece.data))
                    buffers = chunks.encode(header, piece.tensors)
                except Exception as error:  # noqa: BLE001 - whatever a caller brought, only its own request pays
                    self._end(request, Event.FAIL, InvalidRequest(f"input that cannot be sent: {error}"))
                    return
                edge = self._edges.inputs.get(request.placement[stage])
                if edge is None:
                    raise trio.ClosedResourceError
                await edge.send(buffers)
                consumer = str(request.placement[stage])
                size = sum(buffer.nbytes for buffer in buffers)
                request.sent_bytes[consumer] = request.sent_bytes.get(consumer, 0) + size
        request.inputs = {}

    # dispatch

    def _dispatch_queued(self) -> None:
        for request in list(self._queued):
            placement = self._place(request)
            if placement is not None:
                self._queued.remove(request)
                self._dispatch(request, placement)

    def _place(self, request: Request) -> dict[str, Address] | None:
        """The least loaded ready replica of each stage, or None where a stage has none."""
        placement: dict[str, Address] = {}
        for stage in request.route.stages:
            ready = [
                r.address for r in self._replicas.values() if r.address.stage == stage and r.state is ReplicaState.READY
            ]
            if not ready:
                return None
            placement[stage] = min(ready, key=self.load)
        return placement

    def load(self, address: Address) -> int:
        """Requests placed on a replica."""
        return sum(address in request.placement.values() for request in self._requests.values())

    def _dispatch(self, request: Request, placement: dict[str, Address]) -> None:
        self._newest += 1
        request.number, request.placement = self._newest, placement
        self._requests[request.number] = request
        request.lifecycle.advance(Event.DISPATCH)
        route = request.route
        for stage in reversed(route.stages):
            targets = tuple(CLIENT_ADDRESS if name == CLIENT else placement[name] for name in route.targets[stage])
            if CLIENT_ADDRESS in targets:
                request.open_outputs[stage] = SequenceCheck(request.number, stage)
            params = dict(request.params.get(stage, {}))
            self._replicas[placement[stage]].post(Start(request.number, route.sources[stage], targets, params))
        request.dispatched.set()

    # the supervisor's side (Listener)

    def newest_request(self) -> int:
        return self._newest

    def worker_ready(self, address: Address) -> None:
        self._dispatch_queued()

    def worker_lost(self, address: Address, generation: int, exit: WorkerExit) -> None:
        for request in list(self._requests.values()):
            if address in request.placement.values() and not _is_past(request, address.stage):
                self._end(request, Event.FAIL, StageCrashed(address.stage, address.replica, generation, exit))

    def stage_failed(self, failure: StageFailed) -> None:
        others = [r for r in self._replicas.values() if r.address.stage == failure.stage]
        if all(replica.state is ReplicaState.FAILED for replica in others):
            self.failed_stages[failure.stage] = failure
            for request in list(self._queued):
                if failure.stage in request.route.stages:
                    self._end(request, Event.FAIL, StageUnavailable(failure))

    def heard(self, address: Address, message: Finished | Refused) -> None:
        match message:
            case Finished(number, stats):
                if request := self._requests.get(number):
                    request.stats[address.stage] = stats
                    self._complete_if_all_is_there(request)
            case Refused(number, text, param, code):
                if request := self._requests.get(number):
                    self._end(request, Event.FAIL, InvalidRequest(text, param=param, code=code))

    def received(self, address: Address, data: memoryview) -> None:
        """Takes one private copy. Raises ringbuf.RingError where the bytes make no sense."""
        payload = memoryview(bytearray(data))
        header, tensors = chunks.decode(payload)
        request = self._requests.get(header.request)
        if request is None or address.stage not in request.open_outputs:
            return
        request.open_outputs[address.stage](header.seq)
        if header.last:
            del request.open_outputs[address.stage]
        request.lifecycle.advance(Event.OUTPUT)
        now = time.monotonic()
        request.first_arrived.setdefault(address.stage, now)
        request.pieces.append(Piece(address.stage, header.data, tensors, header.last, now, payload.nbytes))
        request.unread_bytes += payload.nbytes
        request.news.unpark_all()
        if request.unread_bytes > self._output_bytes:
            self._end(request, Event.FAIL, SlowConsumer(self._output_bytes))
        else:
            self._complete_if_all_is_there(request)

    # the end

    def _complete_if_all_is_there(self, request: Request) -> None:
        if not request.open_outputs and len(request.stats) == len(request.route.stages):
            self._end(request, Event.COMPLETE, None)

    def _end(self, request: Request, event: Event, error: RequestError | None) -> None:
        waiting = request.lifecycle.state is State.QUEUED
        request.lifecycle.advance(event)
        request.error = error
        request.inputs = {}
        request.finished = time.monotonic()
        if waiting:
            self._queued.remove(request)
        elif request.number is not None:
            del self._requests[request.number]
            for stage, address in request.placement.items():
                if stage not in request.stats:
                    self._replicas[address].post(Abort(request.number))
        request.work.cancel()
        request.news.unpark_all()
        self._on_end(request)


def _require_portable(params: Mapping[str, Mapping[str, Any]]) -> None:
    for stage, share in params.items():
        try:
            size = len(msgspec.msgpack.encode(share))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"parameters of stage {stage!r} that cannot be sent: {error}") from error
        if size > PARAMS_BYTES:
            raise InvalidRequest(f"parameters of stage {stage!r} take {size} bytes; the limit is {PARAMS_BYTES}")


def _is_past(request: Request, stage: str) -> bool:
    """Whether nothing of a stage's work for the request can be missing: it and all whom it feeds have finished."""
    below = set(request.route.targets[stage]) - {CLIENT}
    return stage not in request.open_outputs and {stage, *below} <= set(request.stats)
