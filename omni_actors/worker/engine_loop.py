"""The engine loop: rings in, engine, rings out, in one thread.

Rules
1. A chunk is fed to the engine in place, and an output is copied once, into a ring. No other thread touches either.
2. The loop sleeps in one poll() over the bell of its control connection, the doorbells of its incoming rings and, where
   output waits for room, of its outgoing rings. A ``Start`` for a stage without input from the client rings no bell:
   the first chunk wakes the loop. For a stage with such input the ``Start`` does.
3. Commands are handled before chunks. Still, a chunk may arrive before its ``Start``, since they travel separately.
   Request numbers grow with every ``Start`` but that of a replay: a chunk with a number above the newest started
   request waits, and a chunk with a lower number whose request is not active is stale.
4. A new ring to a consumer means a new consumer. It receives nothing of requests that are already running until
   ``Resend``; then it receives all their outputs.
5. Backpressure: while more than ``congested_bytes`` wait for room on any edge, the loop neither steps nor receives. So
   a downstream stage that stands still stops the whole stage, until its worker is killed or the requests' deadlines
   pass.
6. The outputs of a step are sent to clients before the same outputs are sent to stages, which wake up beside this loop.
   The messages for the parent come last.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence, Set

import msgspec

from omni_actors.protocol import chunks, messages
from omni_actors.protocol.journal import Journal
from omni_actors.stages import base
from omni_actors.worker import outgoing
from omni_actors.worker.active import ActiveRequest, ActiveRequests, stage_request
from omni_actors.worker.arena import Arena
from omni_actors.worker.calls import WorkerCalls
from omni_actors.worker.checkpoints import Checkpoints
from omni_actors.worker.control import AttachCheckpoint, AttachRing, Control
from omni_actors.worker.gathering import Gatherer
from omni_actors.worker.incoming import Incoming
from omni_actors.worker.outgoing import Outgoing, Retention
from omni_actors.worker.pinning import UNPINNED, Pinning
from ringbuf import Tensor

CONGESTED_BYTES = 8 * 1024 * 1024
"""How many bytes may wait for room on an edge before the loop stands still (rule 5)."""
RECEIVE_BYTES, LEAST_BYTES = 4 * 1024 * 1024, 64 * 1024
"""After how many bytes an edge delivers nothing more before a step, so that a fast producer does not keep a busy engine
from stepping; and what a chunk counts as at least."""


class EngineLoop:
    """Runs one engine until ``Stop``, in one thread.

    spec: the replica that it runs, its bounds, and whether its engine is resumable (``stages.base``, rule 6).
    fence: the newest request number of earlier incarnations.
    control: brings commands, and takes the messages for the parent. Those of a turn are sent at its end.
    congested_bytes: see rule 5.
    pinning: page-locks the rings.
    arena: the memory of tensors that are passed by handle; None: all tensors travel as bytes.

    ``run`` takes a whole thread. Single-threaded callers (the simulation) drive ``turn`` themselves, and ``park`` and
    ``woken_by`` when no other turn is due.
    """

    def __init__(
        self,
        spec: messages.WorkerSpec,
        fence: int,
        control: Control,
        *,
        congested_bytes: int = CONGESTED_BYTES,
        pinning: Pinning = UNPINNED,
        arena: Arena | None = None,
    ) -> None:
        self._address, self._resumable = spec.address, spec.resumable
        self._newest, self._control = fence, control
        self._congested_bytes, self._pinning, self._arena = congested_bytes, pinning, arena
        self._incoming: dict[messages.Address, Incoming] = {}
        self._outgoing: dict[messages.Address, Outgoing] = {}
        self._active = ActiveRequests()
        self._step_s = 0.0
        """Seconds of all steps so far."""
        self._gatherer = Gatherer(spec.bounds if spec.gathers else None, self._active)
        self._finished: dict[int, ActiveRequest] = {}
        """Requests that have finished here and not ended, if they have decisions of stages upstream."""
        self._journals: dict[int, Journal] = {}
        """The journals of requests whose ``Start`` follows at once."""
        self.calls = WorkerCalls(spec.address.stage, lambda: len(self._active))
        self._retention = Retention(spec.bounds)
        """Outputs of the requests that may be replayed; also of those that are finished here and have not ended."""
        self._checkpoints = Checkpoints(control, spec.bounds)
        self._complete: list[messages.InputComplete] = []
        """One message for each last chunk that the engine was fed in this turn."""
        self.handling: int | None = None
        """The request that the engine is called for; None in a step. It keeps its value if that call raises."""
        self.stopping = False

    def run(self, engine: base.StageEngine) -> None:
        """Serve until ``Stop``, then close the engine and the rings. An exception of the engine propagates."""
        try:
            while not self.stopping:
                more, receiving = self.turn(engine)
                if not more:
                    self._sleep(receiving=receiving)
            engine.close()
        finally:
            self.close()

    def turn(self, engine: base.StageEngine) -> tuple[bool, bool]:
        """Handle commands, send what waited for room, receive chunks, make a step. Blocks only where the engine does.

        Returns whether another turn is due at once, and whether chunks are received now: not while congested. A turn
        handles all that has arrived and may be received, unless an edge delivers too much at once. What comes later,
        and is to wake the loop, rings a bell.
        """
        self._handle_commands(engine)
        more = self.stopping
        receiving = self._flush() <= self._congested_bytes
        if receiving:
            more |= self._receive(engine)
            if engine.busy and not self.calls.frozen:
                receiving = self._step(engine) <= self._congested_bytes
                more |= engine.busy
        self._send_notices()
        return more, receiving

    def _send_notices(self) -> None:
        """Send the turn's messages. A request that has finished here needs no ``InputComplete``."""
        for notice in self._complete:
            if notice.request in self._active:
                self._control.add(notice)
        self._complete.clear()
        self._control.send()

    def park(self, *, receiving: bool) -> list[int]:
        """Return the doorbells to sleep on when no turn is due. [] if there is something to do already."""
        bells = [self._control.bell()]
        for out in self._outgoing.values():
            out.close_if_unread()
        bells += [out.producer.fileno() for out in self._outgoing.values() if out.waiting_bytes]
        if receiving:
            if any(edge.early is not None for edge in self._incoming.values()):
                bells.append(self._control.fileno())  # the ``Start`` that it waits for may ring no bell
            for producer, edge in self._incoming.items():
                if edge.early is not None or edge.ended:
                    continue
                if producer.stage == messages.CLIENT and not self._active.awaiting_client:
                    continue  # the next chunk follows a ``Start`` that rings the control connection's bell
                if not edge.consumer.park():
                    return []
                bells.append(edge.consumer.fileno())
        return bells

    def close(self) -> None:
        """Close every edge, which the other ends notice, and the memory of checkpoints. Idempotent."""
        edges: list[Incoming | Outgoing] = [*self._incoming.values(), *self._outgoing.values()]
        for edge in edges:
            edge.close()
        self._checkpoints.close()

    @property
    def requests(self) -> Set[int]:
        """Numbers of the requests of which anything is kept here."""
        return self._active.keys() | self._finished.keys() | self._retention.requests

    # commands

    def _handle_commands(self, engine: base.StageEngine) -> None:
        for command in self._control.commands():
            match command:
                case messages.Start() as start:
                    self._start(engine, start)
                case messages.JournalPart(request, decided):
                    self._journals.setdefault(request, Journal()).add(decided)
                case messages.Switch() as switch:
                    self._switch(switch)
                case messages.Resend(request, target):
                    self._resend(request, target)
                case messages.Pause(request) | messages.Resume(request):
                    self._pause(engine, request, paused=isinstance(command, messages.Pause))
                case messages.Abort(request):
                    for edge in self._outgoing.values():
                        edge.drop(request)
                    self._retention.forget(request)
                    self._checkpoints.forget(request)
                    self._finished.pop(request, None)
                    if request in self._active:
                        self._active.remove(request)
                        engine.abort(request)
                case AttachRing() as attach:
                    self._attach(attach)
                case AttachCheckpoint() as attach:
                    self._checkpoints.attach(attach)
                case messages.Ping(number):
                    measured = engine.gauges() if isinstance(engine, base.Measured) else {}
                    self._control.add(messages.Pong(number, {name: float(value) for name, value in measured.items()}))
                case messages.Call() as call:
                    self._control.send()  # a Pong whose ping came before the call does not wait for it
                    self._control.add(self.calls.answer(engine, call))
                case messages.Stop():
                    self.stopping = True

    def _start(self, engine: base.StageEngine, start: messages.Start) -> None:
        self._newest = max(self._newest, start.request)
        active = self._active[start.request] = ActiveRequest(start, self._step_s)
        self._active.note(active)
        if start.replayed:
            self._control.add(messages.Started(start.request))
        if start.retained:
            self._retention.begin(start.request)
        self.handling = start.request
        try:
            frame, checkpoint = self._checkpoints.last(start)
            with frame:
                engine.start(stage_request(start, self._journals.pop(start.request, None), checkpoint))
        except base.REFUSALS as error:
            self._refuse(start.request, error)
        self.handling = None

    def _attach(self, attach: AttachRing) -> None:
        if attach.consumer == self._address:
            if old_in := self._incoming.pop(attach.producer, None):
                old_in.close()
            self._incoming[attach.producer] = Incoming(attach.ring, self._pinning, self._arena)
        else:
            if old_out := self._outgoing.pop(attach.consumer, None):
                old_out.close()
            by_handle = attach.same_memory and self._arena is not None
            self._outgoing[attach.consumer] = Outgoing(attach.ring, self._pinning, by_handle=by_handle)
            for active in self._active.values():
                if attach.consumer in active.targets:
                    active.remove_targets(attach.consumer.stage)

    def _pause(self, engine: base.StageEngine, request: int, *, paused: bool) -> None:
        """Pause or resume a request. An engine that cannot pause goes on; its outputs then wait downstream."""
        if request in self._active and isinstance(engine, base.Pausable):
            (engine.pause if paused else engine.resume)(request)

    def _switch(self, switch: messages.Switch) -> None:
        """Answer what is known of a request that is active or has finished here; of any other, nothing is known."""
        active = self._active.get(switch.request) or self._finished.get(switch.request)
        for answer in active.switch(switch) if active else [messages.Switched(switch.request, switch.question, {})]:
            self._control.add(answer)

    def _resend(self, request: int, target: messages.Address) -> None:
        active = self._active.get(request)
        if active and active.seq < active.computed_from:  # the engine need not compute what the target lacks
            self._retention.end(request)
        retained = self._retention.chunks(request)
        if isinstance(retained, str):
            self._control.add(messages.Unreplayable(request, retained, needed=True))
            return
        for output in retained:
            self._outgoing[target].send(request, output)
        if active:
            active.add_target(target)

    # chunks in

    def _receive(self, engine: base.StageEngine) -> bool:
        """Feed what has arrived. Return whether an edge may have more than it may deliver between two steps."""
        more = False
        for producer, edge in self._incoming.items():
            received = 0
            while received < RECEIVE_BYTES:
                frame = edge.next_frame()
                if frame is None:
                    break
                data = frame.data
                header, tensors = chunks.decode(data)
                if header.request > self._newest:
                    edge.early = frame
                    break
                edge.early = None
                with frame:
                    size = data.nbytes + header.arena_bytes
                    received += max(size, LEAST_BYTES)
                    active = self._active.get(header.request)
                    complete = None if active is None else edge.complete(header, tensors)
                    if active and complete is not None:
                        self._take(engine, active, header, complete, producer, size)
            else:
                more = True
        return more

    def _take(
        self,
        engine: base.StageEngine,
        active: ActiveRequest,
        header: chunks.ChunkHeader,
        tensors: Mapping[str, Tensor],
        producer: messages.Address,
        size: int,
    ) -> None:
        """Feed a chunk of ``size`` bytes, if it is new."""
        try:
            if not active.accept(header, tensors, producer):
                return
        except chunks.ReplayDiverged as error:
            self._control.add(messages.Unreplayable(active.request, str(error), needed=True, recomputable=False))
            return
        from_client = header.source == messages.CLIENT
        if header.last and from_client:
            self._active.note(active)
        self.handling = active.request
        try:
            chunk = base.Chunk(
                source=header.source, seq=header.seq, last=header.last, tensors=tensors, data=header.data
            )
            self._gatherer.feed(engine, active, chunk, size)
        except base.REFUSALS as error:
            self._refuse(active.request, error)
        else:
            if header.last and not from_client:
                self._complete.append(messages.InputComplete(active.request, header.source))
        self.handling = None

    # chunks out

    def _step(self, engine: base.StageEngine) -> int:
        """Make a step and send its outputs. Return the bytes that wait on the fullest edge."""
        began = time.monotonic()
        for output in engine.step():
            if isinstance(output, base.StageFailure):
                self._refuse(output.request_id, output.error)
            elif isinstance(output, base.StageCheckpoint):
                self._checkpoints.write(output)
            else:
                self._emit(output, began)
        waiting_bytes = self._flush()
        self._step_s += time.monotonic() - began
        return waiting_bytes

    def _emit(self, output: base.StageOutput, step_began: float) -> None:
        made = time.monotonic()
        active = self._active[output.request_id]
        header = chunks.ChunkHeader(
            request=output.request_id,
            source=self._address.stage,
            seq=active.seq,
            last=output.last,
            data=self.calls.with_version(output),
            decisions=tuple(output.decisions) if self._resumable else None,
            upstream=active.pass_on(),
        )
        downstream = output.downstream if active.downstream else {}
        kept = len(active.targets) > 1 or self._retention.retains(output.request_id)
        arena = self._arena_for(active)
        encoded = outgoing.encode(header, {**output.tensors, **downstream}, kept=kept, arena=arena)
        active.seq += 1
        for target in active.targets:
            needed_from = active.needed_from.get(target, 0)
            if header.seq < needed_from:
                continue
            for_target = {} if target.stage == messages.CLIENT else downstream
            if 0 < header.seq == needed_from:
                again = msgspec.structs.replace(header, upstream=active.pass_on_again())
                self._send(active, target, outgoing.encode(again, {**output.tensors, **for_target}, arena=arena))
            elif len(for_target) < len(downstream):
                self._send(active, target, outgoing.encode(header, output.tensors))
            else:
                self._send(active, target, encoded)
        if active.first_output is None and header.seq >= active.first_needed:
            active.first_output = made
        retention = self._retention
        evicted = retention.end(active.request) if output.partial else retention.add(active.request, encoded)
        for request, why in evicted:
            self._control.add(messages.Unreplayable(request, why, needed=False))
        if output.last:
            self._active.remove(output.request_id)
            self._checkpoints.forget(output.request_id)
            if active.has_journals:
                self._finished[output.request_id] = active
            stats = active.stats(self._address.stage, made, self._step_s + time.monotonic() - step_began)
            self._control.add(messages.Finished(output.request_id, stats))

    def _arena_for(self, active: ActiveRequest) -> Arena | None:
        """Return the arena if a target of the request's next output takes handles (``worker.arena``, rule 5)."""
        if self._arena is None or not self._resumable:
            return None
        for edge in self._outgoing.values():
            edge.free_passed()
        takes = any(self._outgoing[target].by_handle for target in active.targets if target in self._outgoing)
        return self._arena if takes else None

    def _send(self, active: ActiveRequest, target: messages.Address, output: outgoing.Output) -> None:
        # Rule 6; a client is the first target.
        at_once = target.stage == messages.CLIENT or active.targets[0].stage != messages.CLIENT
        self._outgoing[target].send(active.request, output, at_once=at_once)
        active.sent_bytes[target] += output.size

    def _refuse(self, request: int, error: base.InvalidRequest | base.TemporarilyRefused) -> None:
        self._active.remove(request)
        self._checkpoints.forget(request)
        param = error.param if isinstance(error, base.InvalidRequest) else None
        message, param = messages.sendable(error.message), None if param is None else messages.sendable(param)
        self._control.add(messages.Refused(request, message, param, error.code, retryable=error.retryable))

    # sleep

    def _flush(self) -> int:
        """Send what there is room for. Return the bytes that wait on the fullest edge."""
        fullest = 0
        for edge in self._outgoing.values():
            if edge.waiting_bytes:
                edge.flush()
                fullest = max(fullest, edge.waiting_bytes)
        return fullest

    def _sleep(self, *, receiving: bool) -> None:
        if bells := self.park(receiving=receiving):
            poll = select.poll()
            for bell in bells:
                poll.register(bell, select.POLLIN)
            self.woken_by([bell for bell, _ in poll.poll()])

    def woken_by(self, bells: Sequence[int]) -> None:
        """End a sleep: empty the control connection's bell, if it is one of those that have rung."""
        if (bell := self._control.bell()) in bells:
            os.eventfd_read(bell)
