"""Runs the trials of requests that may have ended their worker, and keeps the culprits out.

Rules
1. ``trials`` decides which suspects run when; here they are started and cleared, as events and time require.
2. A request that used up its replays by ending its workers is quarantined. Those like it end with it.
3. A signal from another process accuses no request: all that the worker held are charged, as for any lost worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import trio

from omni_actors.errors import Quarantined, WorkerExit
from omni_actors.orchestrator.placement import Placement
from omni_actors.orchestrator.quarantine import Quarantine
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.trials import Trials, died_by_itself
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
        """End a request that is like one that used up its replays."""
        ...


class Suspects:
    """The trials and the quarantine of one pipeline. quarantine_s: how long a culprit is refused; 0: not at all."""

    def __init__(self, requests: Requests, placement: Placement, quarantine_s: float) -> None:
        self._requests, self._placement, self._quarantine_s = requests, placement, quarantine_s
        self._trials = Trials()
        placement.reserved = self._trials.running
        self._quarantine = Quarantine(quarantine_s)
        self._changed = trio.lowlevel.ParkingLot()

    # new requests

    def require_admissible(self, request: Request) -> None:
        """Raise Quarantined where a request like this one is refused."""
        if self._quarantine:
            self._quarantine.check(request.fingerprint, trio.current_time())

    def join(self, request: Request) -> bool:
        """Whether a new request is like a suspect, and waits for the result of its trial."""
        return bool(self._trials) and self._trials.join(request)

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
        if not self.includes(request):
            return
        if complete:
            self._trials.passed(request)
        else:
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
        return self._trials.worker_died(address, held, failed, trio.current_time())

    def interrupt(self, address: Address) -> None:
        """A worker is gone. One that went down with another one proves nothing: its suspects wait again."""
        self._trials.interrupt(address)

    def convict(self, request: Request) -> None:
        """A request has used up its replays: refuse those like it, the ones that share its trial now."""
        assert request.crash is not None, "a worker died"
        self._quarantine.add(request.fingerprint, request.crash.stage, trio.current_time())
        for each in self._trials.like(request):
            self._requests.end_like_culprit(each, Quarantined(request.crash.stage, self._quarantine_s))

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
        for stage in {group.stage for group in self._trials.waiting}:
            self._try(stage)
        self._changed.unpark_all()

    def _turned_at(self, address: Address) -> float:
        return self._placement.replicas[address].last_pong_at

    def _try(self, stage: str) -> None:
        now, serving = trio.current_time(), [each.address for each in self._placement.serving(stage)]
        running = self._requests.running()
        working = {each.placement.get(stage) for each in running if stage not in each.stats}
        idle = [address for address in serving if address not in working]
        wanted = any(not self.includes(each) and stage in _waits_for(each) for each in running)
        group = self._trials.next(stage, now, idle=bool(idle), wanted=wanted) if serving else None
        if group is None:
            return
        address = (idle or serving)[0]
        waiting = [each for each in group.tried if stage in _waits_for(each)]
        placements = [self._placement.place(_waits_for(each), address) for each in waiting]
        if not waiting or None in placements:
            self._trials.put_back(group)
            return
        self._trials.begin(group, address, now, alone=bool(idle))
        for request, placement in zip(waiting, placements, strict=True):
            assert placement is not None, "all have a place"
            self._requests.dispatch(request, placement)


def _waits_for(request: Request) -> tuple[str, ...]:
    """The stages that a request waits to be started in."""
    return request.stages_to_restart if request.number is not None else request.route.stages
