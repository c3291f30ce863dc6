"""What the supervisor reports: workers that are ready, or have died, what they say of requests, and their outputs."""

from __future__ import annotations

import time
from collections.abc import Callable

from omni_actors import errors
from omni_actors.orchestrator.dispatch import Dispatcher
from omni_actors.orchestrator.lifecycle import Event
from omni_actors.orchestrator.pieces import Piece
from omni_actors.orchestrator.pools import Pools
from omni_actors.orchestrator.readers import Readers
from omni_actors.orchestrator.replay_execution import ReplayExecution
from omni_actors.orchestrator.replay_state import StageEvent
from omni_actors.orchestrator.request import EndRequest
from omni_actors.orchestrator.suspects import Suspects
from omni_actors.protocol import chunks, messages
from omni_actors.protocol.journal import JournalCorrupted
from omni_actors.supervisor.listener import ProtocolViolation

_NOTICE_EVENTS = {
    messages.Started: StageEvent.STARTED,
    messages.InputComplete: StageEvent.INPUT_COMPLETE,
    messages.Finished: StageEvent.FINISH,
    messages.Unreplayable: StageEvent.UNREPLAYABLE,
}


def error_of(
    refused: messages.Refused, retry_after_s: Callable[[], float]
) -> errors.InvalidRequest | errors.TemporarilyRefused:
    """Return the error of a request that an engine refused. retry_after_s: the estimate, for one that may try again."""
    if refused.retryable:
        return errors.TemporarilyRefused(refused.message, code=refused.code, retry_after_s=retry_after_s())
    return errors.InvalidRequest(refused.message, param=refused.param, code=refused.code)


class WorkerEvents:
    """The supervisor's ``Listener``: takes each event to the part of the orchestrator that it concerns.

    end: ends a request. retry_after_s: returns when a refused request may be sent again, in seconds.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        suspects: Suspects,
        replays: ReplayExecution,
        readers: Readers,
        pools: Pools,
        end: EndRequest,
        retry_after_s: Callable[[], float],
    ) -> None:
        self._dispatcher, self._suspects, self._replays = dispatcher, suspects, replays
        self._readers, self._pools, self._end, self._retry_after_s = readers, pools, end, retry_after_s

    def newest_request(self) -> int:
        return self._dispatcher.newest

    def on_worker_ready(self, address: messages.Address) -> None:
        self._pools.replica_ready(address.stage)
        self._suspects.worker_ready(address)  # before other requests are dispatched: a trial needs an unused replica
        self._dispatcher.dispatch_waiting()

    def was_standby(self, address: messages.Address) -> bool:
        return self._dispatcher.placement.was_standby(self._dispatcher.placement.replicas[address])

    def on_worker_died(self, address: messages.Address, exit: errors.WorkerExit, failed_request: int | None) -> bool:
        return self._suspects.worker_died(address, exit, failed_request)

    def on_worker_lost(self, address: messages.Address, generation: int, exit: errors.WorkerExit, at: float) -> int:
        load = self._dispatcher.placement.loads[address]
        self._replays.worker_lost(address, generation, exit, at)
        return load

    def on_stage_failed(self, failure: errors.StageFailed) -> int:
        return self._replays.stage_failed(failure)

    def on_message(self, address: messages.Address, message: messages.RequestNotice) -> None:
        request = self._dispatcher.held_by(address, message.request)
        if request is None:
            return  # it has ended, or another replica holds it now
        stage, event = address.stage, _NOTICE_EVENTS.get(type(message))
        if request.replay_state.is_stale(stage) and not isinstance(message, messages.Started):
            return  # about the aborted start: the worker has not confirmed the new one
        if event is not None and not request.replay_state.accepts(stage, event):
            phase = request.replay_state.stages[stage].phase
            what = f"{type(message).__name__} for request {message.request}"
            raise ProtocolViolation(f"{what}, which is {phase.value} in stage {stage!r}")
        match message:
            case messages.Finished(stats=stats):
                request.replay_state.finished(stage)
                request.stats[stage] = stats
                self._suspects.stage_finished(request, stage)
                self._replays.progressed(request)
            case messages.Started():
                self._dispatcher.confirm_restart(request, address)
            case messages.JournalPart(decided=decided):
                request.resumption.part_arrived(stage, decided)
            case messages.Switched(question=question, received=received):
                try:
                    request.resumption.answered(stage, question, received)
                except JournalCorrupted as error:
                    raise ProtocolViolation(str(error)) from error
                self._dispatcher.start_again(request)
            case messages.InputComplete(source=source):
                request.replay_state.input_complete(stage, source)
                self._replays.progressed(request)
            case messages.Refused():
                refusal = error_of(message, self._retry_after_s)
                if stage in request.deaths.unproven:
                    reason = f"it was refused when it was replayed ({refusal.code})"
                    crash = request.deaths.error(reason, retryable=refusal.retryable, stage=stage)
                    self._dispatcher.replay_log.add_lost(crash)
                self._end(request, Event.FAIL, refusal)
            case messages.Unreplayable(_, reason, needed, recomputable):
                self._replays.unreplayable(request, stage, reason, needed=needed, recomputable=recomputable)

    def on_checkpoint_memory(self, address: messages.Address, request: int, memory_fd: int) -> None:
        self._dispatcher.keep_checkpoint(address, request, memory_fd)

    def on_output(self, address: messages.Address, data: memoryview) -> None:
        """Take a chunk for the client. Raises ringbuf.RingError if it cannot be decoded or is out of sequence."""
        stage = address.stage
        header, tensors = chunks.decode(data)
        if header.source != stage:
            raise chunks.ChunkCorrupted(f"a chunk of {address} names the stage {header.source!r}")
        request = self._dispatcher.dispatched.get(header.request)
        if request is None or stage not in request.replay_state.open_outputs:
            return
        if header.decisions is not None and not request.replay_state.is_held_by(address):
            return  # another incarnation goes on from what arrived before
        if header.decisions is not None or header.upstream:
            request.resumption.add(header.all_decided)
        try:
            if not request.chunk_sequences[stage].accept(header, tensors):
                return
        except chunks.ReplayDiverged as error:
            if request.deaths.latest is None:
                raise
            self._end(request, Event.FAIL, request.deaths.error(str(error)))
            return
        request.replay_state.output_arrived(stage, last=header.last)
        request.lifecycle.advance(Event.OUTPUT)
        now, size = time.monotonic(), data.nbytes
        if request.deaths.losses:
            request.deaths.output_arrived(stage, request.route.upstream_of(stage), now)
        piece = Piece(stage=stage, data=header.data, tensors=tensors, last=header.last, arrived=now, nbytes=size)
        self._readers.arrive(request, piece)
        if header.last:
            request.last_data[stage] = header.data
            if not request.lifecycle.ended:
                self._replays.progressed(request)
