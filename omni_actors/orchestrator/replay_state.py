"""What each stage of a route has done for one request, through deaths and replays, as a table.

Rule 1: every transition is in ``TRANSITIONS``; no other file assigns a phase.
Rule 2: no I/O, clock or trio here. ``replay_rule`` reads this state to decide what a death means for the request.
Rule 3: an event that a phase does not accept raises IllegalTransition and leaves the whole state as it was.

    QUEUED ──dispatch──► RUNNING ──finish──► FINISHED
    LOST ──need──► WAITING ──restart──► RESTARTING ──started──► RUNNING
    WAITING ──forgo──► LOST
    RUNNING, FINISHED, RESTARTING ──lose──► LOST
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from omni_actors.orchestrator.routes import Route
from omni_actors.protocol.messages import CLIENT, Address
from omni_actors.transitions import TableKey, next_state


class Phase(TableKey):
    """The phase of one stage in one request."""

    QUEUED = "queued"
    """The request was not dispatched yet."""
    RUNNING = "running"
    FINISHED = "finished"
    """The stage has sent its last chunk."""
    LOST = "lost"
    """The worker died, and the stage is not to start again, as far as known."""
    WAITING = "waiting"
    """The worker died, and the stage waits for a ready replica to start again."""
    RESTARTING = "restarting"
    """A replica was chosen, and has not confirmed its ``Start`` yet: no input is sent to it. It is sent ``Start`` once
    the living stages downstream have answered ``Switch``."""


class StageEvent(TableKey):
    DISPATCH = "dispatch"
    INPUT_COMPLETE = "input_complete"
    UNREPLAYABLE = "unreplayable"
    FINISH = "finish"
    LOSE = "lose"
    NEED = "need"
    FORGO = "forgo"
    RESTART = "restart"
    STARTED = "started"


TRANSITIONS: dict[Phase, dict[StageEvent, Phase]] = {
    Phase.QUEUED: {StageEvent.DISPATCH: Phase.RUNNING},
    Phase.RUNNING: {
        StageEvent.INPUT_COMPLETE: Phase.RUNNING,
        StageEvent.UNREPLAYABLE: Phase.RUNNING,
        StageEvent.FINISH: Phase.FINISHED,
        StageEvent.LOSE: Phase.LOST,
    },
    Phase.FINISHED: {StageEvent.UNREPLAYABLE: Phase.FINISHED, StageEvent.LOSE: Phase.LOST},
    Phase.LOST: {StageEvent.NEED: Phase.WAITING},
    Phase.WAITING: {StageEvent.FORGO: Phase.LOST, StageEvent.RESTART: Phase.RESTARTING},
    Phase.RESTARTING: {StageEvent.STARTED: Phase.RUNNING, StageEvent.LOSE: Phase.LOST},
}


@dataclass(slots=True)
class StageState:
    """One stage's part in a request. All but ``phase`` belongs to the incarnation that holds it."""

    phase: Phase = Phase.QUEUED
    address: Address | None = None
    """The replica that holds the request, if a living one does."""
    restarted: bool = False
    """Whether the incarnation repeats the stage's work, from its first chunk."""
    inputs_complete: frozenset[str] = frozenset()
    """The upstream stages of which the incarnation has all chunks."""
    evicted: str | None = None
    """Why the incarnation cannot send its outputs again; None while it can."""
    recomputable: bool = True
    """Whether the incarnation's outputs may be computed again once they were evicted."""
    replay_failure: str | None = None
    """Why the incarnation could not do what a replay asked of it; None if it could."""

    @property
    def held(self) -> bool:
        return self.address is not None

    @property
    def starts_again(self) -> bool:
        """Whether it is to start again, and has not: it lacks all of its input."""
        return self.phase in (Phase.WAITING, Phase.RESTARTING)


class ReplayState:
    """The state of every stage of one request's route. ``stages`` is to be read only."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.recomputed: set[str] = set()
        """The stages that dropped the request alive, because their outputs were evicted, to compute them again."""
        self.input_evicted: str | None = None
        """Why the parent cannot send the client's input again; None while it can."""
        self.open_outputs = {stage for stage in route.stages if CLIENT in route.targets[stage]}
        """The stages of which the client still waits for output."""
        self.begun_outputs = set[str]()
        """The stages of which the client's side has received some output."""
        self.stages = {stage: StageState() for stage in route.stages}

    # Transitions. Each raises AssertionError (IllegalTransition for a phase) and then changes nothing.

    def dispatched(self, placement: Mapping[str, Address]) -> None:
        """Every stage was sent its first ``Start``, at these replicas."""
        self._place(StageEvent.DISPATCH, placement, restarted=False)

    def restarted(self, placement: Mapping[str, Address]) -> None:
        """These waiting stages start again at these replicas; their ``Start`` may follow later."""
        self._place(StageEvent.RESTART, placement, restarted=True)

    def started(self, stage: str) -> None:
        """The replica has confirmed the repeated ``Start``."""
        self._advance(StageEvent.STARTED, stage)

    def input_complete(self, stage: str, source: str) -> None:
        """The incarnation has the last chunk of ``source``."""
        self._advance(StageEvent.INPUT_COMPLETE, stage)
        self.stages[stage].inputs_complete |= {source}

    def unreplayable(self, stage: str, reason: str, *, failed: bool, recomputable: bool = True) -> None:
        """The incarnation cannot send its outputs again. failed: a replay has just asked it to."""
        self._advance(StageEvent.UNREPLAYABLE, stage)
        self.stages[stage].evicted, self.stages[stage].recomputable = reason, recomputable
        if failed:
            self.stages[stage].replay_failure = reason

    def finished(self, stage: str) -> None:
        """The stage has sent its last chunk."""
        self._advance(StageEvent.FINISH, stage)

    def lost(self, stage: str) -> None:
        """The worker died or dropped the request: the facts about its incarnation no longer apply."""
        self._advance(StageEvent.LOSE, stage)
        self.stages[stage] = StageState(self.stages[stage].phase)

    def wait_for(self, stages: Iterable[str]) -> None:
        """Let exactly these stages, whose workers died, wait to start again."""
        waiting, needed = set(self.waiting), set(stages)
        self._advance_all(StageEvent.NEED, needed - waiting)
        self._advance_all(StageEvent.FORGO, waiting - needed)

    def output_arrived(self, stage: str, *, last: bool) -> None:
        """The client's side has received a new chunk of the stage."""
        assert stage in self.open_outputs, "the client waits for no output of the stage"
        self.begun_outputs.add(stage)
        if last:
            self.open_outputs.remove(stage)

    # Reading

    @property
    def placement(self) -> dict[str, Address]:
        """The replica that holds the request, for each stage that a living worker holds."""
        return {name: stage.address for name, stage in self.stages.items() if stage.address is not None}

    @property
    def waiting(self) -> tuple[str, ...]:
        """The stages that wait for a replica, for their first start or to start again; in topological order."""
        waiting = (Phase.QUEUED, Phase.WAITING)
        return tuple([name for name, stage in self.stages.items() if stage.phase in waiting])

    def is_held_by(self, address: Address) -> bool:
        stage = self.stages.get(address.stage)
        return stage is not None and stage.address == address

    def is_stale(self, stage: str) -> bool:
        """Whether the replica's messages about the stage, except ``Started``, refer to a start that was aborted."""
        return stage in self.recomputed and self.stages[stage].phase is Phase.RESTARTING

    def accepts(self, stage: str, event: StageEvent) -> bool:
        """Whether ``event`` is a legal transition of ``stage`` now."""
        return event in TRANSITIONS[self.stages[stage].phase]

    def is_complete(self, waived: Collection[str] = ()) -> bool:
        """Whether the client has all outputs, and every living stage has finished, ``waived`` ones aside."""
        if self.open_outputs:
            return False
        for name, stage in self.stages.items():
            if stage.address is not None and stage.phase is not Phase.FINISHED and name not in waived:
                return False
        return True

    # Inside

    def _place(self, event: StageEvent, placement: Mapping[str, Address], *, restarted: bool) -> None:
        self._advance_all(event, placement)
        for name, address in placement.items():
            self.stages[name].address, self.stages[name].restarted = address, restarted

    def _advance(self, event: StageEvent, stage: str) -> None:
        state = self.stages[stage]
        state.phase = next_state(TRANSITIONS, state.phase, event)

    def _advance_all(self, event: StageEvent, stages: Collection[str]) -> None:
        """Apply an event to all of ``stages`` or, if one of them does not accept it, to none."""
        phases = [next_state(TRANSITIONS, self.stages[stage].phase, event) for stage in stages]
        for stage, phase in zip(stages, phases, strict=True):
            self.stages[stage].phase = phase
