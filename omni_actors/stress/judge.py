"""The rules for the outcomes of requests, and for deaths and restarts. Pure functions of what the harness observed.

A request has exactly one outcome.

============ ==========================================================================================================
completed    equal to the oracle's output, byte for byte
aborted      the harness aborted it, or paused generation or put a stage of its route to sleep meanwhile; its output so
             far is a prefix of the oracle's, as in all rows below
dropped      the harness stopped reading it; its system must have forgotten it
StageCrashed a worker of a stage on its route died while it was in flight, and: it asked to fail, or more than
             ``limits.replays`` workers of one stage died, or it asked its engine to die, or a stage that died cannot
             be replayed, or it is taken for the cause and more engines on its route ended or hung than it may survive,
             in whichever stages. A worker that was removed with its work counts as dead, but not as one of these
Unavailable  a stage on its route was given up. The watch does not see that if a replica is added at the same moment, so
             a death in a stage that is being scaled is enough
Asleep       a stage on its route was asleep, or on its way there or back, while it was in flight
Quarantined  it asked its engine to die, as an equal request did before; or workers of the stages on its route died so
             often that an equal request seemed to be the cause
other        a violation
============ ==========================================================================================================

No request that is submitted while generation is paused is answered before generation goes on.

A worker may die only where the harness killed it, asked its engine to end it, scaled its stage down, or hit its node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from omni_actors.config import Limits, Pipeline
from omni_actors.errors import Aborted, Quarantined, RequestError, StageAsleep, StageCrashed, StageUnavailable
from omni_actors.stress.oracle import ExpectedAnswer, Versions
from omni_actors.stress.schedule import OnFailure
from omni_actors.stress.workload import Template

Kind: TypeAlias = Literal["lost", "hung", "duplicated", "corrupted", "disturbed", "leaked"]
"""disturbed: a request or a worker failed that no fault had touched."""

Outcome: TypeAlias = Literal["open", "completed", "failed", "dropped"]

EXITED = "exited with code"
"""In the reason of a death that no signal caused, such as an exception of an engine."""
HUNG = "no progress for"
"""In the reason of the death of a worker that the supervisor killed because its engine loop stood still."""
REMOVED = "removed by scale"
"""Begins the reason of the end of a worker that was removed while it held requests."""
NOTICED_S = 0.05
"""The client gets an error, and the harness the death, in one turn of the event loop, in either order."""


@dataclass(frozen=True)
class Violation:
    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


@dataclass(frozen=True, slots=True)
class ObservedDeath:
    """The death of a worker, as the system reported it. at: when, by the clock of the watch, in seconds.

    pid: None if no process was started.
    """

    stage: str
    replica: int
    pid: int | None
    exit: str
    at: float

    @property
    def by_engine(self) -> bool:
        """Whether the engine ended the worker or hung, so that a request may be the cause.

        An end that the supervisor wanted has a reason behind its exit code.
        """
        _, exited, rest = self.exit.partition(EXITED)
        return HUNG in self.exit or (exited != "" and ":" not in rest)


@dataclass(eq=False)
class TrackedRequest:
    """A request of a run. Times are of the clock of its client, in seconds."""

    name: str
    template: Template
    answer: ExpectedAnswer
    on_failure: OnFailure
    submitted: float
    hooks: Mapping[str, Any] | None = None
    """The failures that it asks of echo engines."""
    deadline_s: float | None = None
    pace_s: float = 0.0
    """The client waits this long after each output."""
    relays: bool = False
    """Whether the client relays outputs, as an HTTP connection does, so that its stages may be paused."""
    aborted: bool = False
    outcome: Outcome = "open"
    error: RequestError | None = None
    ended: float = 0.0
    second_outcome: str | None = None
    versions: Versions = field(default_factory=Versions)

    @property
    def ending(self) -> str:
        """Its outcome, or the name of its error."""
        return type(self.error).__name__ if self.error else self.outcome


@dataclass(eq=False)
class Period:
    """A time in which a control is in force for stages, by the clock of the client, in seconds."""

    stages: Collection[str]
    began: float
    ended: float = math.inf

    def end(self, at: float) -> None:
        """End the period, unless it has ended."""
        self.ended = min(self.ended, at)

    def touches(self, request: TrackedRequest) -> bool:
        """Whether a request on whose route one of the stages is was in flight at any time of the period."""
        concerned = not set(self.stages).isdisjoint(request.template.stages)
        return concerned and request.submitted <= self.ended and self.began <= request.ended

    def contains(self, request: TrackedRequest) -> bool:
        """Whether the request was submitted, and ended, in the period."""
        return self.began < request.submitted and request.ended < self.ended


@dataclass(frozen=True)
class Explanation:
    """Ends of workers that a fault of a node explains: those whose reason has one of these words, in this time.

    failed_starts: whether the fault also explains workers of which no process was started.
    """

    words: tuple[str, ...]
    began: float
    ended: float
    failed_starts: bool = False

    def covers(self, death: ObservedDeath) -> bool:
        if not self.began <= death.at <= self.ended:
            return False
        return any(each in death.exit for each in self.words) or (self.failed_starts and death.pid is None)


@dataclass(frozen=True)
class ClosedPeriods:
    """The times in which the harness closed the system, or stages of it, to requests."""

    asleep: list[Period] = field(default_factory=list)
    aborting: list[Period] = field(default_factory=list)
    """Requests in flight were aborted."""
    paused: list[Period] = field(default_factory=list)
    """No request was dispatched."""
    scaled: list[Period] = field(default_factory=list)
    """Replicas were added or removed."""


@dataclass(frozen=True)
class Rules:
    """What this run guarantees.

    replays: how many deaths of workers of one stage a request survives. replayed: the stages whose death it survives.
    """

    replays: int
    replayed: frozenset[str]
    closures: ClosedPeriods = field(default_factory=ClosedPeriods)


def max_deaths_by_one_request(limits: Limits, on_failure: OnFailure, disturbances: int = 0) -> int:
    """Return the most workers that one request may end, by the rules of ``orchestrator.trials``.

    A request that is not replayed ends one. For others:

    1. The first death makes suspects of ``max_requests`` requests at most.
    2. Each further death on trial is that of a half, because a whole group is tried only if it is not known to contain
       the culprit. So after ceil(log2(``max_requests``)) more deaths the culprit was tried as the only suspect.
    3. If other requests ran beside that trial, its death is charged to none. But the culprit was in more deaths than
       any other suspect now: the others are tried first, and it dies alone once more.
    4. A death that is charged to the culprit ends it if it was in more than ``replays`` deaths. If it was not, it runs
       alone, and each death counts.

    disturbances: deaths and stops of workers on its route that it did not cause. Each costs one more death at most.
    After another cause's death on trial, the half with the culprit is not known to contain it, and is tried whole. And
    while a worker upstream is down, the probation may pass before what ends the engine gets there (rule 7).
    """
    if on_failure == "fail" or not limits.replays:
        return 1
    search = math.ceil(math.log2(limits.max_requests)) + 1
    return 1 + max(limits.replays, search + disturbances)


def check_request(
    request: TrackedRequest, deaths: Sequence[ObservedDeath], given_up: Collection[str], rules: Rules
) -> Violation | None:
    """Return the violation in a request's outcome, if there is one."""
    label = f"{request.name} ({request.template.name})"
    if request.outcome == "open":
        return Violation("hung", f"{label} has no outcome")
    if request.second_outcome is not None:
        return Violation("duplicated", f"{label}: after its end, {request.second_outcome}")
    if request.versions.wrong is not None:
        return Violation("corrupted", f"{label}: {request.versions.wrong}")
    if differs := request.answer.damage(complete=request.outcome == "completed"):
        return Violation(differs[0], f"{label}: {differs[1]}")
    if request.outcome == "completed" and any(each.contains(request) for each in rules.closures.paused):
        return Violation("disturbed", f"{label} was answered while generation was paused")
    if request.outcome != "failed":
        return None
    return _check_error(request, label, deaths, given_up, rules)


def _check_error(
    request: TrackedRequest, label: str, deaths: Sequence[ObservedDeath], given_up: Collection[str], rules: Rules
) -> Violation | None:
    facts = f"{label}, {request.on_failure}: {type(request.error).__name__}: {request.error}"
    match request.error:
        case Aborted():
            fair = request.aborted or any(each.touches(request) for each in rules.closures.aborting)
            return None if fair else Violation("lost", f"{facts}, but the harness did not abort it")
        case StageAsleep(stage=stage):
            fair = any(stage in each.stages and each.touches(request) for each in rules.closures.asleep)
            return None if fair else Violation("lost", f"{facts}, but the stage did not sleep")
        case StageUnavailable(stage=stage):
            scaled = any(stage in each.stages and each.touches(request) for each in rules.closures.scaled)
            unseen = scaled and any(death.stage == stage for death in deaths)
            fair = (stage in given_up or unseen) and stage in request.template.stages
            return None if fair else Violation("lost", f"{facts}, but the stage was not given up")
        case Quarantined():
            fair = request.hooks is not None or sum(death.stage in request.template.stages for death in deaths) > 1
            return None if fair else Violation("lost", f"{facts}, but it did not crash its engine")
        case StageCrashed():
            touched = [death for death in deaths if _touches(death, request)]
            if not touched:
                return Violation("disturbed", f"{facts}, but no stage of its route died")
            may_fail = request.on_failure == "fail" or request.hooks is not None
            by_stage = Counter(death.stage for death in touched if REMOVED not in death.exit)
            counted = max(by_stage.values(), default=0)
            can_resume = rules.replays > 0 and {death.stage for death in touched} <= rules.replayed
            if (
                may_fail
                or not can_resume
                or counted > rules.replays
                or _is_convicted(request.error, deaths, touched, rules)
            ):
                return None
            survived = f"after {counted} of the {rules.replays} deaths in a stage that it must survive"
            return Violation("lost", f"{facts}, {survived}")
        case _:
            return Violation("lost", facts)


def _is_convicted(
    error: StageCrashed, deaths: Sequence[ObservedDeath], touched: Sequence[ObservedDeath], rules: Rules
) -> bool:
    """Whether the deaths that requests like this one may have caused, this one included, were enough to end it.

    touched: those on its route and in its time. Engines that ended or hung among them count, in whichever stage.
    """
    survived = 1 if "tried apart" in (error.not_replayed or "") else rules.replays
    in_stage = sum(death.stage == error.stage for death in deaths)
    return not error.retryable and max(in_stage, sum(death.by_engine for death in touched)) > survived


def _touches(death: ObservedDeath, request: TrackedRequest) -> bool:
    """Whether a worker on the request's route died in its time. Its error may name a death that was observed later."""
    if death.stage not in request.template.stages or death.at < request.submitted:
        return False
    named = isinstance(request.error, StageCrashed) and request.error.pid == death.pid
    return named or death.at <= request.ended + NOTICED_S


def check_deaths(
    deaths: Sequence[ObservedDeath],
    killed: Collection[int | None],
    requested_deaths: Mapping[str, int],
    scaled: Collection[Period] = (),
    explanations: Collection[Explanation] = (),
) -> tuple[list[Violation], Counter[str]]:
    """Return the deaths without a cause, and what is left of ``requested_deaths``.

    killed: pids that the harness killed; None among them: it made starts fail.
    requested_deaths: by stage, how many deaths it caused without naming a pid.
    scaled: when it scaled stages. explanations: what its faults of nodes explain.
    """
    left = Counter(requested_deaths)
    found = []
    for death in deaths:
        if death.pid in killed or "restarted with stage" in death.exit or _was_removed(death, scaled):
            continue
        if any(each.covers(death) for each in explanations):
            continue
        if left[death.stage] > 0:
            left[death.stage] -= 1
        else:
            found.append(
                Violation("disturbed", f"{death.stage}.{death.replica}: {death.exit}, and the harness did not kill it")
            )
    return found, left


def _was_removed(death: ObservedDeath, scaled: Collection[Period]) -> bool:
    """Whether a worker was removed while its stage was scaled."""
    during = any(death.stage in each.stages and each.began <= death.at <= each.ended for each in scaled)
    return during and REMOVED in death.exit


def check_restarts(deaths: Sequence[ObservedDeath], given_up: Collection[str], pipeline: Pipeline) -> list[Violation]:
    """Return stages that were given up before their restarts were used up. A run is shorter than ``period_s``."""
    counts = Counter(death.stage for death in deaths)
    return [
        Violation("disturbed", f"{name} was given up after {counts[name]} deaths, with {intensity} restarts allowed")
        for name in sorted(given_up)
        if counts[name] <= (intensity := pipeline.stages[name].restart.intensity)
    ]
