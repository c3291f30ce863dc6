"""Places requests on replicas and starts them there, at first and for a replay.

Rules
1. A request is numbered at its first dispatch, so that the numbers of new requests reach every worker in increasing
   order. A replay keeps the number.
2. ``Start`` is posted to every stage of a route, the last stage first, before any input is sent. It wakes only workers
   that get input from the client; the others are woken by their first chunk.
3. A stage that starts again receives nothing until it has confirmed with ``Started``; then its sources send from their
   first chunk.
4. A resumable stage that starts again gets its journal before ``Start`` (see ``resumption``), and sends each consumer
   only what that consumer lacks. It gets the memory of its checkpoints, too.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import suppress

import trio

from omni_actors.config import Limits
from omni_actors.orchestrator.lifecycle import Event
from omni_actors.orchestrator.placement import Placement
from omni_actors.orchestrator.readers import Readers
from omni_actors.orchestrator.replay_log import ReplayLog
from omni_actors.orchestrator.replay_state import Phase
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.trials import Trials
from omni_actors.protocol.chunks import ChunkSequence
from omni_actors.protocol.messages import (
    CLIENT,
    CLIENT_ADDRESS,
    Abort,
    Address,
    CheckpointMemory,
    JournalPart,
    Resend,
    Start,
    Switch,
)


class Dispatcher:
    """The requests of a pipeline that have not ended: those that were dispatched, and those that were not yet."""

    def __init__(
        self,
        limits: Limits,
        *,
        placement: Placement,
        readers: Readers,
        trials: Trials,
        send_input: Callable[[Request], None],
        resumable: Set[str],
    ) -> None:
        self._send_input = send_input
        self._limits, self._readers, self._resumable = limits, readers, resumable
        self.placement, self.trials = placement, trials
        self.queued: dict[Request, None] = {}
        """Requests that were never dispatched, in the order of their admission."""
        self._priorities: dict[int, int] = {}
        """How many requests of ``queued`` have each priority."""
        self.dispatched: dict[int, Request] = {}
        """The dispatched requests that have not ended, by number."""
        self.replay_log = ReplayLog()
        self.dispatch_paused = False
        """Whether requests that were never dispatched wait, because generation is paused."""
        self._ends = trio.lowlevel.ParkingLot()
        """Woken when a request ends, and when a worker dies that held one."""
        self.unplaced = trio.lowlevel.ParkingLot()
        """Woken when a request waits for a replica."""
        self.newest = 0
        """The highest request number given out so far."""
        self.arrived = collections.Counter[str]()
        """How many requests that use each stage have been admitted so far."""

    def admit(self, request: Request) -> None:
        """Take a request that waits to be dispatched."""
        self.queued[request] = None
        self._priorities[request.priority] = self._priorities.get(request.priority, 0) + 1
        for stage in request.route.stages:
            self.arrived[stage] += 1

    def _leave_queue(self, request: Request) -> None:
        del self.queued[request]
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]

    def displaceable(self, priority: int) -> Request | None:
        """Return the queued request that is to be dispatched last, if its number of priority is above this one.

        Without one, this takes equally long however many are queued.
        """
        if max(self._priorities, default=priority) <= priority:
            return None
        return max(self.queued, key=lambda each: each.order)

    def running(self) -> list[Request]:
        """Return the requests that have not ended."""
        return [*self.queued, *self.dispatched.values()]

    def using(self, stages: Collection[str] | None = None, *, queued: bool = True) -> list[Request]:
        """Return the requests that use one of ``stages`` (None: any). queued: also those that were never dispatched."""
        running = self.running() if queued else list(self.dispatched.values())
        return [each for each in running if stages is None or not set(stages).isdisjoint(each.route.stages)]

    async def wait_ended(self, stages: Collection[str] | None = None, *, queued: bool = False) -> None:
        """Wait until no request uses one of ``stages``, as ``using`` counts."""
        while waited_for := self.using(stages, queued=queued):
            for request in waited_for:
                while not request.lifecycle.ended:
                    await self._ends.park()

    async def wait_unused(self, address: Address) -> None:
        """Wait until a replica holds no request."""
        while self.placement.loads[address]:
            await self._ends.park()

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a ready replica, to be dispatched or replayed."""
        return len(self.queued) + sum(bool(request.replay_state.waiting) for request in self.dispatched.values())

    def keeps_waiting(self, request: Request) -> bool:
        """Whether a request waits until generation is resumed."""
        return self.dispatch_paused and request.number is None

    def held_by(self, address: Address, number: int) -> Request | None:
        """Return the request of this number, if it has not ended and the replica holds it."""
        request = self.dispatched.get(number)
        return request if request is not None and request.replay_state.is_held_by(address) else None

    def dispatch_waiting(self) -> None:
        """Dispatch each waiting request whose stages have ready replicas: replays, then others in order of priority.

        Suspects wait for a trial.
        """
        for request in [*self.dispatched.values(), *sorted(self.queued, key=lambda each: each.order)]:
            self.try_dispatch(request)

    def try_dispatch(self, request: Request) -> None:
        """Dispatch a request if it waits, is no suspect, and all stages that it waits for have ready replicas."""
        stages = request.replay_state.waiting
        if not stages or self.keeps_waiting(request):
            return
        if request in self.trials.group_of:
            self.unplaced.unpark_all()  # its trial needs these stages, one of which may have no replicas
            return
        if (placement := self.placement.place(stages, request.affinity)) is not None:
            self.dispatch(request, placement)
        else:
            self.unplaced.unpark_all()

    def dispatch(self, request: Request, placement: Mapping[str, Address]) -> None:
        """Start a waiting request in all its waiting stages. placement: a replica for each of these."""
        if request.number is None:
            self._start(request, placement)
        else:
            self._restart(request, placement)

    def _start(self, request: Request, placement: Mapping[str, Address]) -> None:
        self._leave_queue(request)
        self.newest += 1
        request.number, request.dispatched = self.newest, time.monotonic()
        self.dispatched[request.number] = request
        request.lifecycle.advance(Event.DISPATCH)
        request.replay_state.dispatched(placement)
        self.placement.loads.update(placement.values())
        now = trio.current_time()
        for stage in reversed(request.route.stages):
            if CLIENT in request.route.targets[stage]:
                request.chunk_sequences[stage] = ChunkSequence(request.number, stage)
            self._post_start(request, stage, now)
        request.input.make_due(request.route.entries)
        self._send_input(request)

    def _restart(self, request: Request, placement: Mapping[str, Address]) -> None:
        stages, deaths = request.replay_state.waiting, request.deaths
        loss, is_resumed = deaths.cause(stages), not self._resumable.isdisjoint(stages)
        successor = placement[loss.crash.stage].replica if loss.crash.stage in placement else None
        after_s = trio.current_time() - loss.noticed
        self.replay_log.add(loss.crash, after_s, is_resumed=is_resumed, successor=successor)
        request.replays += 1
        request.restarted_stages.update(stages)
        deaths.restarted(stages)
        request.replay_state.restarted(placement)
        self.placement.loads.update(placement.values())
        request.resumption.stages.update(stages)
        for stage in stages:
            request.stats.pop(stage, None)
        self._ask_downstream(request)

    def _ask_downstream(self, request: Request) -> None:
        """Ask the living stages downstream of those that start again for their entries (see ``resumption``)."""
        placement, asked = request.replay_state.placement, dict[str, Address]()
        if self._resumes(request):
            for stage in request.route.downstream_of(request.resumption.stages):
                state = request.replay_state.stages[stage]
                if state.address is not None and state.phase in (Phase.RUNNING, Phase.FINISHED):
                    asked[stage] = state.address
        question = request.resumption.ask(asked)
        for stage, address in asked.items():
            producers = {source: placement.get(source) for source in request.route.sources[stage] if source != CLIENT}
            switch = Switch(request.dispatched_number, question, producers, request.resumption.known)
            self.placement.replicas[address].post(switch)
        self.start_again(request)

    def start_again(self, request: Request) -> None:
        """Post ``Start`` to the stages that start again, the last one first, if every answer is there."""
        if not request.resumption.complete:
            return
        for stage in reversed(request.route.stages):
            if stage in request.resumption.stages and not self._must_wait(request, stage):
                address = request.replay_state.placement[stage]
                for decided in request.resumption.entries(stage):
                    self.placement.replicas[address].post(JournalPart(request.dispatched_number, decided))
                self._post_checkpoint(request, stage, address)
                self._post_start(request, stage, trio.current_time())
                self._readers.started(request, stage)
                request.resumption.stages.discard(stage)

    def _must_wait(self, request: Request, stage: str) -> bool:
        """Whether a stage must not start yet: its outputs will be evicted, and a consumer is not there to get them."""
        state = request.replay_state
        consumers = [each for each in request.route.targets[stage] if each != CLIENT]
        absent = (Phase.LOST, Phase.WAITING, Phase.RESTARTING)
        return stage in state.recomputed and any(state.stages[each].phase in absent for each in consumers)

    def _post_checkpoint(self, request: Request, stage: str, address: Address) -> None:
        """Pass on the memory of the stage's checkpoints. Without descriptors, it starts over from its journal."""
        if (memory_fd := request.checkpoints.of(stage)) is not None:
            with suppress(OSError):
                self.placement.replicas[address].post(CheckpointMemory(request.dispatched_number), [memory_fd])

    def _post_start(self, request: Request, stage: str, now: float) -> None:
        """Post ``Start`` to a stage. It sends to a target that restarts too only after a ``Resend``."""
        self.trials.note_use(stage, request, now)
        stages, names = request.replay_state.stages, request.route.targets[stage]
        address, is_replayed = stages[stage].address, stages[stage].phase is Phase.RESTARTING
        assert address is not None, "it is placed"
        targets = list[Address]()
        for name in names:
            if name == CLIENT:
                targets.append(CLIENT_ADDRESS)
            elif (target := stages[name].address) is not None and stages[name].phase is not Phase.RESTARTING:
                targets.append(target)
        needed_from = self._needed_from(request, stage, targets) if stage in self._resumable else ()
        self.placement.replicas[address].post(
            Start(
                request=request.dispatched_number,
                sources=request.route.sources[stage],
                targets=tuple(targets),
                params=request.params[stage],
                downstream=names != (CLIENT,),
                retained=self._retains(request, names),
                replayed=is_replayed,
                checkpointed=self._keeps_checkpoints(request, stage),
                needed_from=needed_from,
                # Outputs that were left out are computed again only for a stage's one consumer (``replay_rule``).
                computed_from=needed_from[0] if needed_from and len(names) == 1 else 0,
            ),
            wakes=is_replayed or stage in request.route.entries,
        )

    def _needed_from(self, request: Request, stage: str, targets: Iterable[Address]) -> tuple[int, ...]:
        """For each target, the number of the first chunk that it lacks."""
        return tuple(
            request.chunk_sequences[stage].received
            if target == CLIENT_ADDRESS
            else request.resumption.received(stage, target.stage)
            for target in targets
        )

    def confirm_restart(self, request: Request, address: Address) -> None:
        """A replica has confirmed a repeated ``Start``: every living source sends it all chunks from the first one.

        A source that starts again itself learns its targets from its own ``Start``.
        """
        request.replay_state.started(address.stage)
        request.deaths.started(address.stage)
        for source in request.route.sources[address.stage]:
            if source == CLIENT:
                request.input.restart(address.stage)
                self._send_input(request)
            elif source in request.resumption.stages:
                continue  # its ``Start`` is yet to be posted, with this replica among the targets
            elif (source_address := request.replay_state.stages[source].address) is not None:
                self.placement.replicas[source_address].post(Resend(request.dispatched_number, address))
        self.start_again(request)

    def drop(self, request: Request, stage: str) -> None:
        """Let a living stage drop a request, whose outputs were evicted there, so that it computes them again."""
        address = request.replay_state.placement[stage]
        request.replay_state.recomputed.add(stage)
        self.placement.replicas[address].post(Abort(request.dispatched_number))
        self.lose(request, address)

    def lose(self, request: Request, address: Address) -> None:
        """Record that a worker holds a request no more. What it sent may contradict the answers so far."""
        request.replay_state.lost(address.stage)
        self.placement.loads[address] -= 1
        self._ends.unpark_all()
        request.resumption.forget(address.stage)
        if request.resumption.stages:
            self._ask_downstream(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, and abort it in every stage that still has work or chunks of it."""
        if self._ends:
            self._ends.unpark_all()
        request.checkpoints.close()
        if request.number is None:
            self._leave_queue(request)
            return
        del self.dispatched[request.number]
        targets = request.route.targets
        for name, stage in request.replay_state.stages.items():
            if stage.address is None:
                continue
            self.placement.loads[stage.address] -= 1
            is_working = stage.phase is not Phase.FINISHED
            if is_working or self._retains(request, targets[name]) or self._resumes(request):
                self.placement.replicas[stage.address].post(Abort(request.number), wakes=is_working)

    def _resumes(self, request: Request) -> bool:
        """Whether workers keep decisions of this request, even when they have finished it."""
        return bool(self._resumable) and not self._resumable.isdisjoint(request.route.stages)

    def _keeps_checkpoints(self, request: Request, stage: str) -> bool:
        return request.on_failure == "replay" and stage in self._resumable

    def keep_checkpoint(self, address: Address, number: int, memory_fd: int) -> None:
        """Own the descriptor of a request's checkpoint memory; close it unless the replica holds the request."""
        request = self.held_by(address, number)
        if request is not None and self._keeps_checkpoints(request, address.stage):
            request.checkpoints.keep(address.stage, memory_fd)
        else:
            os.close(memory_fd)

    def _retains(self, request: Request, targets: tuple[str, ...]) -> bool:
        """Whether a stage with these targets retains its chunks. Chunks for the client alone are never sent again."""
        return request.on_failure == "replay" and targets != (CLIENT,)
