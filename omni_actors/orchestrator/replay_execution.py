"""Applies the replay rule: what happens to requests when workers die and when stages are given up.

Rules
1. ``replay_rule.decide_replay`` alone decides what a death means for a request. It is asked again whenever the state
   of a request that met a death changes.
2. Suspects are replayed in their trial (see ``suspects``), all other requests as soon as replicas are ready.
"""

from __future__ import annotations

from collections.abc import Set

from omni_actors.config import Limits
from omni_actors.errors import StageCrashed, StageFailed, StageUnavailable, WorkerExit
from omni_actors.orchestrator.dispatch import Dispatcher
from omni_actors.orchestrator.lifecycle import Event
from omni_actors.orchestrator.replay_rule import Fail, Replay, Unavailable, Untouched, decide_replay, idle_stages
from omni_actors.orchestrator.request import EndRequest, Request
from omni_actors.orchestrator.suspects import Suspects
from omni_actors.protocol.messages import Address


class ReplayExecution:
    """Decides about the dispatched requests of a pipeline after deaths.

    recoverable: the stages that are deterministic or resumable.
    """

    def __init__(
        self, limits: Limits, dispatcher: Dispatcher, *, suspects: Suspects, end: EndRequest, recoverable: Set[str]
    ) -> None:
        self._limits, self._dispatcher, self._recoverable = limits, dispatcher, recoverable
        self._placement, self._trials = dispatcher.placement, dispatcher.trials
        self._suspects, self._end = suspects, end
        self.failed_stages: dict[str, StageFailed] = {}
        """Stages without a replica left, in the order in which they were given up."""

    def worker_lost(self, address: Address, generation: int, exit: WorkerExit, at: float) -> None:
        """Decide about every request that the dead worker held. The end of one may end others that are like it.

        at: when the death was noticed, on trio's clock.
        """
        self._trials.return_replica(address)
        for request in list(self._dispatcher.dispatched.values()):
            if not request.lifecycle.ended and request.replay_state.is_held_by(address):
                self._dispatcher.lose(request, address)
                crash = StageCrashed(address.stage, address.replica, generation, exit)
                request.deaths.add(crash, at, request.stats.get(address.stage))
                self._decide(request)
        self._suspects.advance()

    def stage_failed(self, failure: StageFailed) -> int:
        """End the requests that need a stage without a replica left. Returns how many."""
        if not self._placement.has_failed(failure.stage):
            return 0
        self.failed_stages[failure.stage] = failure
        queued = [each for each in self._dispatcher.queued if failure.stage in each.route.stages]
        waiting = [each for each in self._dispatcher.dispatched.values() if each.replay_state.waiting]
        for request in queued:
            if not request.lifecycle.ended:
                self._end(request, Event.FAIL, self.unavailable(failure.stage))
        for request in waiting:
            self._decide(request)
        return sum(request.lifecycle.ended for request in (*queued, *waiting))

    def unavailable(self, stage: str) -> StageUnavailable:
        """Return the error of a request that needs a failed stage."""
        return StageUnavailable(self.failed_stages[stage], self._placement.back_in_s(stage))

    def progressed(self, request: Request) -> None:
        """End a request that is complete: a stage has finished or has all its input, or an output has ended."""
        if request.deaths.latest is not None:
            self._decide(request)  # the stages that were lost may not be needed any more
        elif request.replay_state.is_complete():
            self._end(request, Event.COMPLETE, None)

    def unreplayable(self, request: Request, stage: str, reason: str, *, needed: bool, recomputable: bool) -> None:
        """A stage cannot send its outputs again. needed: a replay has just asked it to."""
        failed = needed and request.deaths.latest is not None
        request.replay_state.unreplayable(stage, reason, failed=failed, recomputable=recomputable)
        if failed:
            self._decide(request)

    def _decide(self, request: Request) -> None:
        if request.lifecycle.ended:
            return  # the verdict on another request, with the same fingerprint, ended this one
        state = request.replay_state
        verdict = decide_replay(
            state,
            on_failure=request.on_failure,
            recoverable=self._recoverable,
            failed=self.failed_stages.keys(),
            charges=request.deaths.charges(),
            limit=self._limits.replays,
        )
        if isinstance(verdict, Replay):
            for stage in verdict.stages:
                if state.stages[stage].held:
                    self._dispatcher.drop(request, stage)
        state.wait_for(verdict.stages if isinstance(verdict, Replay) else ())
        request.input.recheck()
        if isinstance(verdict, Untouched | Replay):
            self._suspects.decided(request)
        match verdict:
            case Untouched():
                if state.is_complete(waived=idle_stages(state)):
                    self._end(request, Event.COMPLETE, None)
            case Replay():
                self._dispatcher.try_dispatch(request)
            case Fail(reason, used_up):
                is_convicted = bool(request.deaths.to_charge) and self._suspects.convict(request)
                error = request.deaths.error(reason, retryable=not (used_up or is_convicted))
                self._end(request, Event.FAIL, error)
            case Unavailable(stage):
                self._end(request, Event.FAIL, self.unavailable(stage))
