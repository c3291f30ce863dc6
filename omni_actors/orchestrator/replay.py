"""What becomes of a request when workers that held it have died: one pure function of the facts.

Rule 1: no I/O, clock or trio here, and no memory: asked again with the same facts, it says the same.
Rule 2: a replay repeats work, never output. A stage that starts again begins at its first chunk; whoever lives and has
some of its chunks drops them as they come again, the client's side too.

First, what each stage of the route has to do, from the last one up:

    worker   its output            it
    -------  --------------------  ----------------------------------------------------------------------------
    lives    -                     goes on; sends again what it retained to a stage below that starts again
    dead     wanted by nobody      is done
    dead     wanted                starts again

Its output is wanted by a client that has not got the last of it, and by a stage below that is to give more itself and
has not got the last of it; one that starts again has nothing. Done is, too, who has finished since it last started.
(That the client has the last of a stage's output does not say so: a stage that started again may be giving it to
others.)

Who lives, has not finished and is wanted by nobody is *idle* where it started again, or waits for one that died or is
idle: what it still does, or waits for in vain, keeps no request from its end.

Then, where one that lives and is wanted could not do its part in an earlier replay: Fail, and why. Otherwise, where any
starts again, the first of these that holds:

    the request was made with on_failure="fail"                                        Fail
    one of them has no replica left                                                    Unavailable
    its last death is charged to it, and ``limit`` replays were before                 Fail, and why
    one of them is not deterministic, and its output so far is in use                     Fail, and why
    a living stage that feeds one of them has let go of what it retained               Fail, and why
    otherwise                                                                          Replay
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from omni_actors.orchestrator.routes import Route
from omni_actors.protocol.messages import CLIENT


@dataclass(frozen=True)
class Facts:
    """What is known of a request that was dispatched. Stages are those of its route."""

    route: Route
    held: Set[str]
    """Stages whose worker holds the request and lives."""
    finished: Set[str]
    """Of them, those that have given their last output since they started, or started again.

    That the client has the last output of a stage does not say so: one that started again may be giving it to others.
    """
    repeated: Set[str]
    """Of those who hold it, the ones that started again."""
    fed: Set[tuple[str, str]]
    """(stage, source): the stage, which lives, has all of the other's outputs."""
    open: Set[str]
    """Stages whose last output the client wants and has not got."""
    seen: Set[str]
    """Stages of which the client has some output."""
    deterministic: Set[str]
    """Stages whose outputs are a function of their input alone (see ``EngineSpec.deterministic``)."""
    let_go: Mapping[str, str]
    """Stages that cannot send their outputs again, and why."""
    broken: Mapping[str, str]
    """Stages that could not do their part in a replay when it was asked of them, and why."""
    given_up: Set[str]
    """Stages without a replica left."""
    on_failure: str
    """"replay" or "fail"."""
    replays: int
    """Replays that deaths were charged for."""
    limit: int
    charged: bool = True
    """Whether its last death is charged to it (see ``trials``)."""


@dataclass(frozen=True)
class Untouched:
    """Nothing of what it still needs was lost."""


@dataclass(frozen=True)
class Replay:
    """These stages start again, when each has a replica that is ready; in topological order."""

    stages: tuple[str, ...]


@dataclass(frozen=True)
class Fail:
    """It ends. reason: why it could not be replayed; None where it was not to be.

    used_up: whether that is because it has used up its replays.
    """

    reason: str | None
    used_up: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Unavailable:
    """It ends: this stage was given up."""

    stage: str


Verdict: TypeAlias = Untouched | Replay | Fail | Unavailable


def decide_replay(facts: Facts) -> Verdict:
    """See the module."""
    found = _survey(facts)
    for stage in facts.route.stages:
        if stage in facts.broken and stage in facts.held and stage in found.wanted:
            return Fail(f"stage {stage!r}: {facts.broken[stage]}")
    again = found.again[::-1]
    if not again:
        return Untouched()
    if facts.on_failure == "fail":
        return Fail(None)
    for stage in again:
        if stage in facts.given_up:
            return Unavailable(stage)
    if facts.charged and facts.replays >= facts.limit:
        return Fail(f"it was replayed {facts.replays} times already (limits.replays)", used_up=True)
    for stage in again:
        if stage in found.in_use and stage not in facts.deterministic:
            return Fail(f"stage {stage!r} would not give the same output again, and some of it is in use")
        for source in facts.route.sources[stage]:
            if source in facts.held and source in facts.let_go:
                return Fail(f"stage {source!r}: {facts.let_go[source]}")
    return Replay(tuple(again))


def unwanted(facts: Facts) -> Set[str]:
    """The stages whose output nobody waits for."""
    return set(facts.route.stages) - _survey(facts).wanted


def idle(facts: Facts) -> Set[str]:
    """See the module."""
    found: set[str] = set()
    for stage in facts.route.stages:
        feeding = facts.held - found | {CLIENT}
        waits_in_vain = any(
            source not in feeding and (stage, source) not in facts.fed for source in facts.route.sources[stage]
        )
        if stage in facts.held - facts.finished and (stage in facts.repeated or waits_in_vain):
            found.add(stage)
    return found & unwanted(facts)


@dataclass
class _Survey:
    """again: dead and wanted, the last one down first. in_use: of them, those whose output so far somebody may have
    used: a client that wants the rest, a living stage that does, or another that starts again and is in use itself.
    """

    wanted: set[str] = field(default_factory=set)
    again: list[str] = field(default_factory=list)
    in_use: set[str] = field(default_factory=set)


def _survey(facts: Facts) -> _Survey:
    found, done = _Survey(), set[str]()
    for stage in reversed(facts.route.stages):
        below = set(facts.route.targets[stage]) - {CLIENT}
        for_client = stage in facts.open
        wanted = for_client or any((name, stage) not in facts.fed for name in below - done)
        if wanted:
            found.wanted.add(stage)
        if wanted and stage not in facts.held:
            found.again.append(stage)
            if (for_client and stage in facts.seen) or below & (found.in_use | facts.held - done):
                found.in_use.add(stage)
        elif not wanted or stage in facts.finished:
            done.add(stage)
    return found
