"""Starts and ends the trials of suspects, and keeps culprits in quarantine.

Rules
1. ``trials`` decides which suspects run when. This module carries that out, whenever an event or the time requires it.
2. A culprit that ends because of its deaths is quarantined, after two deaths or more. The requests of its unit end too.
3. A culprit that ends in another way is remembered: a new request with its fingerprint is treated as a culprit.
4. A signal that another process sent makes no suspects, and neither does the loss of a node or of a link between
   nodes. That death is charged to all requests that the worker held, unless it may have the cause of the death before:
   three workers of a stage may die with one host, and a request be moved from one to the next meanwhile.
   Without replays and without a quarantine there are no suspects either.
5. When suspects are cleared or end, however many in one turn of the event loop, all waiting requests are looked at
   once, in the next turn. So the end of a unit of many requests takes time in proportion to their number.
6. While generation is paused with "keep", workers make no steps. So no probation ends, and neither does a wait of a
   suspect or a drain. Afterwards each probation begins again, and what was left of the others goes on.
"""

from __future__ import annotations

import collections

import trio

from omni_actors.config import Limits
from omni_actors.errors import Quarantined, WorkerExit
from omni_actors.orchestrator.dispatch import Dispatcher
from omni_actors.orchestrator.lifecycle import Event
from omni_actors.orchestrator.quarantine import Culprit, Quarantine
from omni_actors.orchestrator.replay_state import Phase
from omni_actors.orchestrator.request import EndRequest, Request
from omni_actors.orchestrator.trials import Group, died_by_itself
from omni_actors.protocol.messages import Address


class Suspects:
    """The trials and the quarantine of one pipeline.

    dispatcher: starts the requests on trial; its ``trials`` are managed here.
    """

    def __init__(self, limits: Limits, dispatcher: Dispatcher, end: EndRequest) -> None:
        self._limits, self._dispatcher, self._end = limits, dispatcher, end
        self._placement, self._trials = dispatcher.placement, dispatcher.trials
        self._quarantine = Quarantine(limits.quarantine_s)
        self._frozen_since: float | None = None
        """When workers began to make no steps; None: they make some."""
        self._changed = trio.lowlevel.ParkingLot()
        self._have_left = False
        """Whether suspects were cleared or have ended since the waiting requests were last looked at."""

    # New requests.

    def require_admissible(self, request: Request) -> None:
        """Raise Quarantined if the fingerprint of a new request is quarantined."""
        if request.input.segments:
            return
        # A request that is not replayed frees its input early; the fingerprint for its quarantine is computed before.
        if self._quarantine or (request.on_failure == "fail" and self._limits.quarantine_s):
            self._quarantine.check(request.fingerprint, trio.current_time())

    def require_admissible_input(self, request: Request) -> None:
        """Raise Quarantined if what has arrived of a request's live input is what a convicted culprit had sent."""
        if self._quarantine and (known := request.known_fingerprint) is not None:
            self._quarantine.check(known, trio.current_time())

    def join(self, request: Request) -> None:
        """Add a new request to the suspects if its fingerprint is that of one: it then waits for a trial.

        A request with live input does not: no part of that has arrived.
        """
        if request.input.segments or (self._trials and self._trials.join(request)):
            return
        if self._quarantine and (known := self._quarantine.pop(request.fingerprint)) is not None:
            self._trials.add_known_culprit(request, known.stage, known.deaths or 0, trio.current_time())
            self.advance()

    # Events.

    def worker_ready(self, address: Address) -> None:
        """Handle that a worker is ready. The time in which its stage had no ready worker is not counted as waiting."""
        if len(self._placement.serving(address.stage)) == 1:
            self._trials.serving_since[address.stage] = trio.current_time()
        self.advance()

    def stage_finished(self, request: Request, stage: str) -> None:
        """Handle that a stage has finished a request: its unit is cleared."""
        self._trials.note_use(stage, request, trio.current_time())
        group = self._trials.group_of.get(request)
        if group is not None and group.stage == stage:
            self._trials.clear(request)
            self._have_left = True
        if self._trials or self._have_left:
            self._changed.unpark_all()

    def decided(self, request: Request) -> None:
        """Handle that it is known which stages start again: a suspect that needs no more of its stage is cleared."""
        group = self._trials.group_of.get(request)
        if group is not None and request.replay_state.stages[group.stage].phase is Phase.LOST:
            self._trials.clear(request)
            self._have_left = True
            self._changed.unpark_all()

    def request_ended(self, request: Request, *, done: bool) -> None:
        """Handle the end of a request. done: whether it ended with all of its output."""
        if (group := self._trials.group_of.get(request)) is None:
            if self._trials:
                self._note_last_use(request)
            return
        if done:
            self._trials.clear(request)
        else:
            was_culprit = group.is_culprit
            if self._trials.drop(request) and was_culprit:
                self._remember(request, Culprit(group.stage, request.deaths.suspected))
        self._have_left = True
        self._changed.unpark_all()

    def _note_last_use(self, request: Request) -> None:
        """Handle that a request which is no suspect uses its stages no more. A suspect may wait for that."""
        if request.number is not None:
            for stage in request.route.stages:
                if stage not in request.stats:
                    self._trials.note_use(stage, request, trio.current_time())
            self._changed.unpark_all()

    @property
    def frozen(self) -> bool:
        """Whether workers make no steps (rule 6)."""
        return self._frozen_since is not None

    def set_frozen(self, *, frozen: bool) -> None:
        """Handle that workers make no steps, or make them again (rule 6)."""
        now = trio.current_time()
        if self._frozen_since is None:
            self._frozen_since = now if frozen else None
        elif not frozen:
            self._trials.put_off(now - self._frozen_since, now)
            for address, group in self._trials.running.items():
                if group.on_trial:
                    self._trials.begin(group, address, now, alone=group.is_alone)
            self._frozen_since = None

    def worker_died(self, address: Address, exit: WorkerExit, failed_request: int | None) -> bool:
        """Find the suspects of a death. Return whether the death counts against the restart intensity."""
        stage, running = address.stage, self._dispatcher.running()
        unfinished = [each for each in running if each.replay_state.is_held_by(address) and stage not in each.stats]
        if not died_by_itself(exit) or not (self._limits.replays or self._limits.quarantine_s):
            for request in unfinished:
                if died_by_itself(exit) or not self._died_with_another(address, request):
                    request.deaths.to_charge.add(stage)
            return True
        failed = next((each for each in unfinished if each.number == failed_request), None)
        counts = self._trials.worker_died(address, unfinished, failed, trio.current_time())
        self._have_left = True  # suspects of another stage may have left a replica that was reserved for them
        self._changed.unpark_all()
        for request in running:
            if request not in self._trials.group_of and stage in request.replay_state.waiting:
                self._trials.join(request)
        return counts

    def _died_with_another(self, address: Address, request: Request) -> bool:
        """Return whether a worker's death may have the cause of the request's death before.

        The worker had not started the request again, and was ready when that death was noticed.
        """
        if request.replay_state.stages[address.stage].phase is not Phase.RESTARTING:
            return False
        return self._placement.replicas[address].incarnation.ready_at <= request.deaths.losses[-1].noticed

    def convict(self, request: Request) -> bool:
        """Quarantine a request that ends because of its deaths, and end the others of its unit.

        Returns whether the request was quarantined. One death is not enough, whatever ``limits.replays`` is.
        """
        group = self._trials.group_of.get(request)
        if group is None or not group.is_culprit or request.deaths.suspected <= max(1, self._limits.replays):
            return False
        self._remember(request, Culprit(group.stage))
        for each in self._trials.requests_of_unit(request):
            self._end_quarantined(each, group.stage)
        return True

    def _remember(self, request: Request, culprit: Culprit) -> None:
        """Remember a culprit. More of its live input may have arrived than when it became a suspect."""
        fingerprint = (request.known_fingerprint if request.input.segments else None) or request.fingerprint
        self._quarantine.add(fingerprint, culprit, trio.current_time())

    def _end_quarantined(self, request: Request, stage: str) -> None:
        self._end(request, Event.FAIL, Quarantined(stage, self._limits.quarantine_s))

    def _end_exhausted(self, group: Group) -> None:
        """Quarantine and end a culprit that cannot be tried apart from other requests."""
        for each in list(group.requests):
            self._remember(each, Culprit(group.stage))
            deaths = each.deaths
            if deaths.latest is None:
                self._end_quarantined(each, group.stage)
            else:
                reason = (
                    f"its workers died {deaths.suspected} times, and it could not be tried apart from other requests"
                )
                self._end(each, Event.FAIL, deaths.error(reason, retryable=False))

    # Trials.

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Begin and end the trials that are due, until cancelled."""
        while True:
            if self._have_left:
                self._have_left = False
                self._dispatcher.dispatch_waiting()
            self.advance()
            if not self._have_left:  # advance may end requests
                with trio.move_on_at(self._trials.next_time(trio.current_time())):
                    await self._changed.park()

    def advance(self) -> None:
        """End the trials that are over and begin those that can begin."""
        if not self._trials:
            return
        if not self.frozen and self._trials.clear_expired(self._last_pong_at):
            self._dispatcher.dispatch_waiting()
        self._continue_trials()
        for stage in {group.stage for group in self._trials.groups}:
            self._try(stage)
        self._changed.unpark_all()

    def _last_pong_at(self, address: Address) -> float:
        return self._placement.replicas[address].incarnation.last_pong_at

    def _try(self, stage: str) -> None:
        """Begin the next trial of a stage, or the drain that it needs, or end a culprit that cannot be tried."""
        now = trio.current_time() if self._frozen_since is None else self._frozen_since
        serving = [each.address for each in self._placement.serving(stage)]
        draining = self._trials.draining(stage)
        if not serving or (draining is None and not self._trials.is_due(stage, now)):
            return  # before all requests are looked at
        running = self._dispatcher.running()
        loads = collections.Counter(
            each.replay_state.placement.get(stage) for each in running if stage not in each.stats
        )
        unused = [address for address in serving if not loads[address]]
        if (group := draining) is not None:
            if group.address in unused:
                self._begin(group, group.address, alone=True)
            if not group.on_trial and now >= group.ends_at:  # also where another stage that it needs is away
                self._trials.end_drain(group, now)
                self._dispatcher.dispatch_waiting()
            return
        others_wait = any(each not in self._trials.group_of and stage in each.replay_state.waiting for each in running)
        group = self._trials.next(stage, now, is_unused=bool(unused), others_wait=others_wait)
        if group is None:
            for culprit in self._trials.exhausted(stage, now):
                self._end_exhausted(culprit)
        elif group.is_culprit and not unused:
            self._trials.drain(group, min(serving, key=lambda address: loads[address]), now)
        else:
            self._begin(group, (unused or serving)[0], alone=bool(unused))

    def _continue_trials(self) -> None:
        """Let tried requests start again in other stages, whose workers died during the trial."""
        for address, group in self._trials.running.items():
            for request in group.on_trial:
                stages = request.replay_state.waiting
                if (
                    stages
                    and self._trials.group_of.get(request) is group  # else it has ended, or is another stage's suspect
                    and group.stage not in stages
                    and (placement := self._placement.place(stages, request.affinity)) is not None
                ):
                    self._trials.begin(group, address, trio.current_time(), alone=group.is_alone)
                    self._dispatcher.dispatch(request, placement)

    def _begin(self, group: Group, address: Address, *, alone: bool) -> None:
        placements = {
            each: self._placement.place(each.replay_state.waiting, each.affinity, address)
            for each in group.candidates
            if group.stage in each.replay_state.waiting and not self._dispatcher.keeps_waiting(each)
        }
        if not placements or None in placements.values():
            return
        self._trials.begin(group, address, trio.current_time(), alone=alone)
        for request, placement in placements.items():
            assert placement is not None, "all have a place"
            self._dispatcher.dispatch(request, placement)
