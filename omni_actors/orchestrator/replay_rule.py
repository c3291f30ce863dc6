"""Decides what the death of workers means for a request that they held: one pure function of the request's state.

Rule 1: no I/O, clock or trio here, and no memory: the same state gives the same verdict.
Rule 2: a replay repeats work, never output. A stage that starts again begins at its first chunk; a living consumer, and
the client's side, drop the chunks that they already have.

First, what each stage of the route has to do, from the last one up:

    worker   its output    the stage
    -------  ------------  -----------------------------------------------------------------------------------
    lives    -             continues; sends its retained chunks again to a downstream stage that starts again
    lives    evicted       starts again, if the one downstream stage that it feeds starts again (see below)
    dead     not needed    is done
    dead     needed        starts again

A stage's output is needed by the client until the client has the last chunk, and by every downstream stage that is not
done until that stage has the last chunk. A downstream stage that starts again has no chunk. A living stage is done when
it has finished since it last started, or when its output is not needed. (A stage is not done because the client has its
last chunk: it may have started again for a downstream stage.)

A living stage is *idle* if it has not finished, its output is not needed, and it started again, failed at its part of a
replay, or waits for a stage that is dead or idle. A request completes without its idle stages.

A living stage that has evicted its retained chunks computes them again, if they were all for one downstream stage: that
stage then has none of them, so no old chunk meets a new one. The living stage drops the request and starts again. It
must be deterministic or resumable. Any other living stage cannot do its part. It then needs its input again, so dead
stages upstream start again too, though it had all of theirs.

If a living stage whose output is needed failed at its part of an earlier replay, the verdict is Fail with its reason.
A resumable stage starts again from its journal: it puts out again what a consumer lacks, and goes on from there.

Output is *in use* if the client has some of it, or of what was computed from it, or if a living stage may still send
that. A stage that is not recoverable gives another output when it starts again: the client's text and its speech would
then belong to two answers.

Otherwise, if any stage starts again, the first row that applies decides:

    the request was submitted with on_failure="fail"                                       Fail
    one of these stages has no replica left                                                Unavailable
    a death of one of these is charged to the request, which used up its ``limit`` there   Fail, with that reason
    one of these stages is not recoverable, and its earlier output is in use               Fail, with that reason
    a living stage that feeds one of them cannot send again or compute again               Fail, with that reason
    the client feeds one of them, and live input was evicted                               Fail, with that reason
    otherwise                                                                              Replay
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from omni_actors.orchestrator.replay_state import Phase, ReplayState
from omni_actors.protocol.messages import CLIENT


@dataclass(frozen=True)
class Untouched:
    """The request needs nothing of what was lost."""


@dataclass(frozen=True)
class Replay:
    """These stages start again, once each has a ready replica; in topological order."""

    stages: tuple[str, ...]


@dataclass(frozen=True)
class Fail:
    """The request ends.

    reason: why it cannot be replayed; None if it was submitted with on_failure="fail".
    used_up: whether the reason is that it has used up its replays.
    """

    reason: str | None
    used_up: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Unavailable:
    """The request ends: this stage was given up."""

    stage: str


Verdict: TypeAlias = Untouched | Replay | Fail | Unavailable


def decide_replay(
    state: ReplayState,
    *,
    on_failure: str,
    recoverable: Set[str],
    failed: Set[str],
    charges: Mapping[str, int],
    limit: int,
) -> Verdict:
    """Return what happens to a request, by the rule of the module.

    state: the state of a dispatched request.
    on_failure: "replay" or "fail".
    recoverable: the stages that are deterministic or resumable (``stages.registry.EngineSpec``).
    failed: the stages without a replica left.
    charges: the stages of which a death is charged to the request since they last started (see ``suspects``), with the
        number of replays of each that were charged to it before.
    limit: ``limits.replays``.
    """
    survey = _survey(state)
    again = _starting_again(state, survey, recoverable)
    computed_again = {name for name in again if state.stages[name].held}
    for name, stage in state.stages.items():
        if stage.held and stage.replay_failure is not None and name in survey.needed - computed_again:
            return Fail(f"stage {name!r}: {stage.replay_failure}")
    restarts = tuple(name for name in state.stages if name in again)
    if not restarts:
        return Untouched()
    if on_failure == "fail":
        return Fail(None)
    for name in restarts:
        if name in failed:
            return Unavailable(name)
    if (replays := max((charges[name] for name in restarts if name in charges), default=-1)) >= limit:
        return Fail(f"it was replayed {replays} times already (limits.replays)", used_up=True)
    for name in restarts:
        if name in survey.in_use and name not in recoverable:
            return Fail(f"stage {name!r} is neither deterministic nor resumable, and its earlier output is in use")
        for source in state.route.sources[name]:
            if source == CLIENT and state.input_evicted is not None:
                return Fail(state.input_evicted)
            if source in again or source == CLIENT:
                continue
            if (reason := state.stages[source].evicted) is not None:
                return Fail(f"stage {source!r}: {reason}")
    return Replay(restarts)


def unneeded_stages(state: ReplayState) -> Set[str]:
    """Return the stages whose output neither the client nor a downstream stage needs."""
    return state.stages.keys() - _survey(state).needed


def idle_stages(state: ReplayState) -> Set[str]:
    """Return the stages without which the request can complete, by the rule of the module."""
    idle: set[str] = set()
    for name, stage in state.stages.items():
        starved = any(
            source in idle or not state.stages[source].held
            for source in state.route.sources[name]
            if source != CLIENT and source not in stage.inputs_complete
        )
        failed = stage.replay_failure is not None
        if stage.held and stage.phase is not Phase.FINISHED and (stage.restarted or failed or starved):
            idle.add(name)
    return idle & unneeded_stages(state)


@dataclass
class _Survey:
    """The stages whose output is needed, and those whose output is in use."""

    needed: set[str] = field(default_factory=set)
    in_use: set[str] = field(default_factory=set)
    """The client has some of the output, or of what was computed from it, or a living stage may still send that."""


def _survey(state: ReplayState) -> _Survey:
    survey, done = _Survey(), set[str]()
    for name in reversed(state.route.stages):
        stage, consumers = state.stages[name], set(state.route.targets[name]) - {CLIENT}
        lacking = [each for each in consumers - done if name not in state.stages[each].inputs_complete]
        needed = name in state.open_outputs or bool(lacking)
        if needed:
            survey.needed.add(name)
        may_send = any(state.stages[each].held for each in consumers & survey.needed)
        if name in state.begun_outputs or may_send or not survey.in_use.isdisjoint(consumers):
            survey.in_use.add(name)
        if not needed or stage.phase is Phase.FINISHED:
            done.add(name)
    return survey


def _starting_again(state: ReplayState, survey: _Survey, recoverable: Set[str]) -> set[str]:
    """Return the stages that start again, from the last one up, by the table of the module.

    To the dead stages whose output is needed come two kinds. A living stage whose outputs were evicted is computed
    again if the one stage that it feeds lacks all of them: that starts again, or did and these could not be sent to it
    (a failed part). And a dead stage that had finished its part is needed once more by a stage that it feeds and that
    is computed again.
    """
    found = {name for name in survey.needed if not state.stages[name].held}
    for name in reversed(state.route.stages):
        stage, consumers = state.stages[name], state.route.targets[name]
        if not stage.held:
            if not found.isdisjoint(consumers):
                found.add(name)
        elif stage.recomputable and stage.evicted is not None and name in recoverable and len(consumers) == 1:
            failed = stage.replay_failure is not None and name in survey.needed
            if failed or consumers[0] in found:
                found.add(name)
    return found
