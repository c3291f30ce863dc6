"""Runs the trials of requests that may have ended their worker, and keeps the culprits out.

Rules
1. ``trials`` decides which suspects run when; here they are started and cleared, as events and time require.
2. A request that used up its replays by ending its workers is quarantined. Those like it end with it.
3. A signal from another process accuses no request: all that the worker held are charged, as for any lost worker.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Protocol

import trio

from omni_actors.config import Limits
from omni_actors.errors import Quarantined, WorkerExit
from omni_actors.orchestrator.placement import Placement
from omni_actors.orchestrator.quarantine import Culprit, Quarantine
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.trials import Group, Trials, died_by_itself
from omni_actors.protocol.messages import Address


class Requests(Protocol):
    """What the trials need of the orchestrator."""

    def running(self) -> list[Request]:
        """The requests that have not ended."""
        ...

    def dispatch(self, request: Request, placement: Mapping[str, Address]) -> None:
        """Start a waiting request."""
        ...

    def dispatch_waiting(self) -> None:
        """Start all waiting requests that can be started and are no suspects."""
        ...

    def end_like_culprit(self, request: Request, error: Quarantined) -> None:
        """End a request that is like one that was quarantined."""
        ...

    def end_culprit(self, request: Request, reason: str) -> None:
        """End a request whose worker died, and which cannot be replayed for this reason."""
        ...


class Suspects:
    """The trials and the quarantine of one pipeline."""

    def __init__(self, requests: Requests, placement: Placement, limits: Limits) -> None:
        self._requests, self._placement, self._limits = requests, placement, limits
        self._trials = Trials()
        placement.reserved = self._trials.running
        self._quarantine = Quarantine(limits.quarantine_s)
        self._changed = trio.lowlevel.ParkingLot()

    # new requests

    def require_admissible(self, request: Request) -> None:
        """Raise Quarantined where a request like this one is refused."""
        if self._quarantine or request.on_failure == "fail":  # such a request frees its input before its worker can die
            self._quarantine.check(request.fingerprint, trio.current_time())

    def join(self, request: Request) -> bool:
        """Whether a new request is like a suspect or a known culprit, and waits for a trial."""
        if self._trials and self._trials.join(request):
            return True
        if not self._quarantine or (known := self._quarantine.pop(request.fingerprint)) is None:
            return False
        self._trials.accuse(request, known.stage, known.deaths or 0, trio.current_time())
        self.follow()
        return True

    def includes(self, request: Request) -> bool:
        """Whether a request is a suspect."""
        return request in self._trials.group_of

    # what happens to requests and workers

    def used(self, stage: str, request: Request) -> None:
        """A request begins or ends at a stage."""
        self._trials.used(stage, request, trio.current_time())

    def done_with(self, request: Request, stage: str) -> None:
        """A stage has finished a request."""
        self.used(stage, request)
        group = self._trials.group_of.get(request)
        if group is not None and group.stage == stage:
            self.clear(request)
            self._requests.dispatch_waiting()
        self.follow()

    def clear(self, request: Request) -> None:
        """A request, and those like it, are suspects no more."""
        self._trials.passed(request)

    def ended(self, request: Request, *, complete: bool) -> None:
        """A request has ended."""
        if (group := self._trials.group_of.get(request)) is None:
            return
        if complete:
            self._trials.passed(request)
        else:
            if group.is_culprit and not self._trials.like(request):
                now = trio.current_time()
                self._quarantine.add(request.fingerprint, Culprit(group.stage, group.deaths), now)
            self._trials.drop(request)
        self._requests.dispatch_waiting()
        self.follow()

    def worker_died(self, address: Address, exit: WorkerExit, failed_request: int | None) -> bool:
        """Find the suspects. Returns whether the death counts against the restart intensity."""
        stage = address.stage
        held = [
            each
            for each in self._requests.running()
            if each.placement.get(stage) == address and stage not in each.stats
        ]
        if not died_by_itself(exit):
            for request in held:
                request.charged = True
            return True
        failed = next((each for each in held if each.number == failed_request), None)
        counts = self._trials.worker_died(address, held, failed, trio.current_time())
        for request in self._requests.running():
            if not self.includes(request) and stage in request.waiting_stages:
                self._trials.join(request)
        return counts

    def interrupt(self, address: Address) -> None:
        """A worker is gone. One that went down with another one proves nothing: its suspects wait again."""
        self._trials.interrupt(address)

    def convict(self, request: Request) -> bool:
        """Quarantine a request that ends for the deaths that it caused, and end those like it.

        Returns whether it was quarantined: it is not for one death alone, whatever ``limits.replays`` is.
        """
        group = self._trials.group_of.get(request)
        is_convicted = group is not None and group.is_culprit and request.suspected > max(1, self._limits.replays)
        if group is not None and is_convicted:
            self._quarantine.add(request.fingerprint, Culprit(group.stage), trio.current_time())
            for each in self._trials.like(request):
                self._end_like_culprit(each, group.stage)
        return is_convicted

    def _end_like_culprit(self, request: Request, stage: str) -> None:
        self._requests.end_like_culprit(request, Quarantined(stage, self._limits.quarantine_s))

    def _end_hopeless(self, group: Group) -> None:
        """Quarantine a culprit that would only end more workers that others need."""
        for fingerprint in group.units:
            self._quarantine.add(fingerprint, Culprit(group.stage), trio.current_time())
        for each in list(group.requests):
            if self._trials.group_of.get(each) is not group:
                continue  # it ended while another one of them ended
            if each.crash is None:
                self._end_like_culprit(each, group.stage)
            else:
                reason = f"its workers died {each.suspected} times, and it could not be tried apart from other requests"
                self._requests.end_culprit(each, reason)

    # trials

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Begin and end trials where only time has passed. Until cancelled."""
        while True:
            with trio.move_on_at(self._trials.next_time(trio.current_time())):
                await self._changed.park()
                continue
            self.follow()

    def follow(self) -> None:
        """End and begin trials, as the facts are now."""
        if not self._trials:
            return
        if self._trials.clear_expired(self._turned_at):
            self._requests.dispatch_waiting()
        for stage in self._trials.stages():
            self._try(stage)
        self._changed.unpark_all()

    def _turned_at(self, address: Address) -> float:
        return self._placement.replicas[address].last_pong_at

    def _try(self, stage: str) -> None:
        """Begin the next trial of a stage, or what has to happen before it can begin."""
        now, serving = trio.current_time(), [each.address for each in self._placement.serving(stage)]
        if not serving:
            return
        running = self._requests.running()
        loads = collections.Counter(each.placement.get(stage) for each in running if stage not in each.stats)
        idle = [address for address in serving if not loads[address]]
        if (group := self._trials.draining(stage)) is not None:
            if group.address in idle:
                self._begin(group, group.address, alone=True)
            elif now >= group.until:
                self._trials.end_drain(group, now)
                self._requests.dispatch_waiting()
            return
        wanted = any(not self.includes(each) and stage in each.waiting_stages for each in running)
        group = self._trials.next(stage, now, idle=bool(idle), wanted=wanted)
        if group is None:
            for culprit in self._trials.hopeless(stage, now):
                self._end_hopeless(culprit)
        elif group.is_culprit and not idle:
            self._trials.drain(group, min(serving, key=lambda address: loads[address]), now)
        else:
            self._begin(group, (idle or serving)[0], alone=bool(idle))

    def _begin(self, group: Group, address: Address, *, alone: bool) -> None:
        waiting = [each for each in group.tried if group.stage in each.waiting_stages]
        placements = [self._placement.place(each.waiting_stages, address) for each in waiting]
        if not waiting or None in placements:
            self._trials.put_back(group)
            return
        self._trials.begin(group, address, trio.current_time(), alone=alone)
        for request, placement in zip(waiting, placements, strict=True):
            assert placement is not None, "all have a place"
            self._requests.dispatch(request, placement)
