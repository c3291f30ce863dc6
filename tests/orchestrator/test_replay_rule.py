"""The replay rule: every state of small routes, checked against the rule in other words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from copy import deepcopy
from itertools import chain, combinations, product
from typing import Any

import pytest

from omni_actors.orchestrator.replay_rule import (
    Fail,
    Replay,
    Unavailable,
    Untouched,
    Verdict,
    decide_replay,
    idle_stages,
    unneeded_stages,
)
from omni_actors.orchestrator.replay_state import Phase, ReplayState
from omni_actors.orchestrator.routes import Node, Route, plan
from omni_actors.protocol.messages import CLIENT, Address

ROUTES = {
    "one": plan({"a": Node(("x",), (), "m")}, ["x"], ["m"]),
    "two": plan({"a": Node(("x",)), "b": Node((), ("a",), "m")}, ["x"], ["m"]),
    "two, both emit": plan({"a": Node(("x",), (), "l"), "b": Node((), ("a",), "m")}, ["x"], ["l", "m"]),
    "three": plan({"a": Node(("x",)), "b": Node((), ("a",)), "c": Node((), ("b",), "m")}, ["x"], ["m"]),
    "three, the middle emits": plan(
        {"a": Node(("x",)), "b": Node((), ("a",), "l"), "c": Node((), ("b",), "m")}, ["x"], ["l", "m"]
    ),
    "fork": plan({"a": Node(("x",)), "b": Node((), ("a",), "l"), "c": Node((), ("a",), "m")}, ["x"], ["l", "m"]),
    "join": plan({"a": Node(("x",)), "b": Node(("y",)), "c": Node((), ("a", "b"), "m")}, ["x", "y"], ["m"]),
    "diamond": plan(
        {"a": Node(("x",)), "b": Node((), ("a",)), "c": Node((), ("a",)), "d": Node((), ("b", "c"), "m")}, ["x"], ["m"]
    ),
}


def subsets(items: Collection[Any]) -> list[frozenset[Any]]:
    ordered = sorted(items)
    return [frozenset(some) for some in chain(*(combinations(ordered, n) for n in range(len(ordered) + 1)))]


def upstream(route: Route, stage: str) -> set[str]:
    return set(route.sources[stage]) - {CLIENT}


def downstream(route: Route, stage: str) -> set[str]:
    return set(route.targets[stage]) - {CLIENT}


def state_of(
    route: Route,
    phases: Mapping[str, Phase],
    *,
    complete: Collection[tuple[str, str]] = (),
    some: Collection[str] = (),
    whole: Collection[str] = (),
    evicted: Collection[str] = (),
    failed: Collection[str] = (),
    restarted: Collection[str] = (),
) -> ReplayState:
    """Make a state.

    phases: of the stages that are not running. complete: (stage, source) pairs of complete inputs. some, whole: the
    stages of which the client has some output, or all.
    """
    state = ReplayState(route)
    for name, stage in state.stages.items():
        stage.phase = phases.get(name, Phase.RUNNING)
        if stage.phase in (Phase.RUNNING, Phase.FINISHED, Phase.RESTARTING):
            stage.address, stage.restarted = Address(name, 0), name in restarted
            stage.inputs_complete = frozenset(source for other, source in complete if other == name)
            stage.evicted = "too large" if name in evicted or name in failed else None
            stage.replay_failure = "too large" if name in failed else None
    for name in (*some, *whole):
        state.output_arrived(name, last=name in whole)
    return state


def decide(state: ReplayState, **terms: Any) -> Verdict:
    """Ask the rule about a request that may be replayed, except for ``terms``."""
    replayable: dict[str, Any] = {
        "on_failure": "replay",
        "recoverable": set(state.stages),
        "failed": set(),
        "charges": dict.fromkeys(state.stages, 0),
        "limit": 2,
    }
    return decide_replay(state, **(replayable | terms))


def states(route: Route) -> Iterator[ReplayState]:
    """Every combination of running, finished and lost stages, complete inputs, and outputs that the client has."""
    emitters = [stage for stage in route.stages if CLIENT in route.targets[stage]]
    edges = {(stage, source) for stage in route.stages for source in upstream(route, stage)}
    phases = product((Phase.RUNNING, Phase.FINISHED, Phase.LOST), repeat=len(route.stages))
    for chosen, whole in product(phases, subsets(emitters)):
        by_stage = dict(zip(route.stages, chosen, strict=True))
        living = {edge for edge in edges if by_stage[edge[0]] is not Phase.LOST}
        for complete in subsets(living):
            yield state_of(route, by_stage, complete=complete, whole=whole)


every_state = pytest.mark.parametrize(
    "all_states", [pytest.param(list(states(route)), id=name) for name, route in ROUTES.items()]
)
"""A test of all states of one route."""


def is_needed(state: ReplayState, stage: str) -> bool:
    """Whether more output of a stage is needed: by the client, or by a stage that has to send more itself."""
    return stage in state.open_outputs or any(
        sends_more(state, name) and stage not in state.stages[name].inputs_complete
        for name in downstream(state.route, stage)
    )


def sends_more(state: ReplayState, stage: str) -> bool:
    return is_needed(state, stage) and state.stages[stage].phase is not Phase.FINISHED


def unfinished(state: ReplayState) -> set[str]:
    return {name for name, stage in state.stages.items() if stage.held and stage.phase is not Phase.FINISHED}


def living(state: ReplayState) -> set[str]:
    return {name for name, stage in state.stages.items() if stage.held}


def restarts(verdict: Verdict) -> set[str]:
    assert isinstance(verdict, Replay | Untouched)
    return set(verdict.stages) if isinstance(verdict, Replay) else set()


@every_state
def test_the_dead_stages_that_are_needed_start_again_and_no_others(all_states: list[ReplayState]) -> None:
    for state in all_states:
        dead = state.stages.keys() - living(state)
        assert restarts(decide(state)) == {stage for stage in dead if is_needed(state, stage)}, state.stages


@every_state
def test_one_replay_restarts_all_that_it_needs_in_topological_order(all_states: list[ReplayState]) -> None:
    """Every source of a restarted stage lives or restarts too, and after the restart nothing is missing."""
    for state in all_states:
        verdict = decide(state)
        if isinstance(verdict, Replay):
            assert list(verdict.stages) == [stage for stage in state.route.stages if stage in verdict.stages]
            for stage in verdict.stages:
                assert upstream(state.route, stage) <= {*living(state), *verdict.stages}
            restarted = deepcopy(state)
            restarted.wait_for(verdict.stages)
            restarted.restarted({stage: Address(stage, 1) for stage in verdict.stages})
            assert decide(restarted) == Untouched()


@every_state
def test_a_stage_that_the_request_waits_for_gets_all_its_input(all_states: list[ReplayState]) -> None:
    """Otherwise the request would wait until its deadline."""
    for state in all_states:
        idle, again = idle_stages(state), restarts(decide(state))
        sending = (living(state) | again) - idle
        for stage in (unfinished(state) - idle) | again:
            for source in upstream(state.route, stage) - state.stages[stage].inputs_complete:
                assert source in sending, (state.stages, stage)


@every_state
def test_a_restarted_stage_that_is_not_needed_is_idle(all_states: list[ReplayState]) -> None:
    for state in all_states:
        unneeded = {stage for stage in state.route.stages if not is_needed(state, stage)}
        assert unneeded_stages(state) == unneeded
        assert idle_stages(state) <= unneeded & unfinished(state)
        all_restarted = deepcopy(state)
        for stage in unfinished(state):
            all_restarted.stages[stage].restarted = True
        assert idle_stages(all_restarted) == unneeded & unfinished(state)


@every_state
def test_a_complete_request_needs_no_replay(all_states: list[ReplayState]) -> None:
    for state in all_states:
        if state.is_complete() or living(state) == set(state.route.stages):
            assert decide(state) == Untouched()


@every_state
def test_an_obstacle_to_replays_ends_only_requests_that_need_one(all_states: list[ReplayState]) -> None:
    for state in all_states:
        obstructed = deepcopy(state)
        for stage in obstructed.stages.values():
            stage.evicted = "too large" if stage.held else None
        obstructed.begun_outputs.update(obstructed.open_outputs)
        obstacles = {"recoverable": set(), "failed": set(state.stages), "charges": dict.fromkeys(state.stages, 2)}
        for on_failure in ("replay", "fail"):
            verdict = decide(obstructed, on_failure=on_failure, **obstacles)
            assert (verdict == Untouched()) == (decide(state) == Untouched())


def test_a_request_waits_for_an_unneeded_stage_that_will_finish() -> None:
    """The client has all of b's output, and b has still to report that it has finished."""

    def idle(phases: Mapping[str, Phase], **state: Any) -> Set[str]:
        return idle_stages(state_of(ROUTES["two"], phases, whole="b", **state))

    assert idle({}) == set()
    assert idle({"a": LOST}, complete={("b", "a")}) == set()
    assert idle({"a": LOST}) == {"b"}
    assert idle({"a": FINISHED}, failed="b") == {"b"}
    assert idle({"a": FINISHED}, restarted="b") == {"b"}
    assert idle({"a": FINISHED, "b": FINISHED}, restarted="b") == set()


THREE = ROUTES["three, the middle emits"]
LOST_B = {"b": Phase.LOST}


@pytest.mark.parametrize(
    ("evicted", "terms", "verdict"),
    [
        ("", {}, Replay(("b",))),
        ("", {"on_failure": "fail", "failed": {"b"}, "charges": {"b": 2}}, Fail(None)),
        ("", {"failed": {"b"}, "charges": {"b": 2}}, Unavailable("b")),
        ("", {"failed": {"c"}}, Replay(("b",))),
        ("", {"charges": {"b": 1}}, Replay(("b",))),
        ("", {"charges": {"a": 2}}, Replay(("b",))),
        ("", {"charges": {}}, Replay(("b",))),
        (
            "",
            {"charges": {"a": 0, "b": 2}, "recoverable": set()},
            Fail("it was replayed 2 times already (limits.replays)"),
        ),
        ("a", {"recoverable": {"b"}}, Fail("stage 'a': too large")),
        ("a", {}, Replay(("a", "b"))),
        ("a", {"failed": {"a"}}, Unavailable("a")),
        ("c", {}, Replay(("b",))),
    ],
)
def test_the_obstacles_to_a_replay_in_order(evicted: str, terms: dict[str, Any], verdict: Verdict) -> None:
    assert decide(state_of(THREE, LOST_B, evicted=evicted), **terms) == verdict


def test_the_stage_that_was_replayed_most_often_decides_whether_replays_are_used_up() -> None:
    state = state_of(THREE, {"b": Phase.LOST, "c": Phase.LOST})
    verdict = decide(state, charges={"b": 0, "c": 2})
    assert verdict == Fail("it was replayed 2 times already (limits.replays)")
    assert isinstance(verdict, Fail)
    assert verdict.used_up


def test_evicted_live_input_is_an_obstacle_for_the_stages_that_it_enters_only() -> None:
    for lost, verdict in (("a", Fail("too much")), ("b", Replay(("b",)))):
        state = state_of(THREE, {lost: Phase.LOST})
        state.input_evicted = "too much"
        assert decide(state) == verdict


LOST, FINISHED = Phase.LOST, Phase.FINISHED
IN_USE = Fail("stage 'b' is neither deterministic nor resumable, and its earlier output is in use")


@pytest.mark.parametrize(
    ("phases", "some", "whole", "verdict"),
    [
        pytest.param({"b": LOST}, "", "", IN_USE, id="a living stage may have some"),
        pytest.param({"b": LOST, "c": LOST}, "", "", Replay(("b", "c")), id="no living stage has any"),
        pytest.param({"b": LOST, "c": LOST}, "b", "", IN_USE, id="the client has some"),
        pytest.param({"b": LOST, "c": LOST}, "c", "", IN_USE, id="the client has what was computed from it"),
        pytest.param({"b": LOST, "c": FINISHED}, "", "c", IN_USE, id="the client has all that was made of it"),
        pytest.param({"c": LOST}, "bc", "", Replay(("c",)), id="it lives and sends again"),
        pytest.param({"b": LOST, "c": LOST}, "", "b", IN_USE, id="the client has all of it"),
        pytest.param({"b": LOST, "c": FINISHED}, "", "", IN_USE, id="a stage has finished and sends again"),
    ],
)
def test_a_stage_that_is_not_deterministic_restarts_if_its_output_is_not_in_use(
    phases: dict[str, Phase], some: str, whole: str, verdict: Verdict
) -> None:
    """The middle one of three stages is not deterministic."""
    assert decide(state_of(THREE, phases, some=some, whole=whole), recoverable={"a", "c"}) == verdict


def test_a_failed_part_of_a_replay_ends_the_request_if_the_part_is_needed() -> None:
    """Also if it was not needed when it failed: a cannot send to b again, whose output c has, until c dies."""
    route, complete = ROUTES["three"], {("c", "b")}
    final: dict[str, Any] = {"recoverable": {"b", "c"}}
    assert decide(state_of(route, {}, complete=complete, failed="a", restarted="b"), **final) == Untouched()
    failed = Fail("stage 'a': too large")
    assert decide(state_of(route, {"c": LOST}, failed="a", restarted="b"), **final) == failed
    assert decide(state_of(route, {}, failed="a", restarted="b"), **final) == failed


def test_a_failed_part_is_computed_again_if_one_stage_alone_needs_it() -> None:
    route, complete = ROUTES["three"], {("c", "b")}
    assert decide(state_of(route, {}, complete=complete, failed="a", restarted="b")) == Untouched()
    assert decide(state_of(route, {"c": LOST}, failed="a", restarted="b")) == Replay(("a", "c"))
    assert decide(state_of(route, {}, failed="a", restarted="b")) == Replay(("a",))
    differs = state_of(route, {}, failed="a", restarted="b")
    differs.stages["a"].recomputable = False
    assert decide(differs) == Fail("stage 'a': too large")
    assert decide(state_of(ROUTES["fork"], {"b": LOST}, evicted="a")) == Fail("stage 'a': too large")


def test_stages_whose_chunks_were_evicted_are_computed_again_up_to_the_first_one() -> None:
    route = ROUTES["three"]
    assert decide(state_of(route, {"c": LOST}, evicted="ab")) == Replay(("a", "b", "c"))
    assert decide(state_of(route, {"c": LOST}, evicted="b")) == Replay(("b", "c"))
    assert decide(state_of(route, {"c": LOST}, evicted="a")) == Replay(("c",))


def test_a_stage_that_is_computed_again_needs_its_sources_again_though_they_had_finished() -> None:
    """b had all of a, and c some of b: the death of a cost nothing until b had to be computed again."""
    phases = {"a": LOST, "b": FINISHED, "c": LOST}
    state = state_of(ROUTES["three"], phases, complete={("b", "a")}, evicted="b")
    assert decide(state) == Replay(("a", "b", "c"))
    assert decide(state, failed={"a"}) == Unavailable("a")
    four = plan({"z": Node(("x",)), "a": Node((), "z"), "b": Node((), "a"), "c": Node((), "b", "m")}, ["x"], ["m"])
    complete = {("a", "z"), ("b", "a")}
    assert decide(state_of(four, phases, complete=complete, evicted="zb")) == Replay(("z", "a", "b", "c"))


def test_the_death_of_a_stage_whose_output_was_received_whole_costs_nothing() -> None:
    """The text is complete and its speech goes on: the thinker's death is harmless, unless the talker dies too."""
    route = ROUTES["two"]
    assert decide(state_of(route, {"a": LOST}, complete={("b", "a")}), on_failure="fail") == Untouched()
    assert decide(state_of(route, {"a": LOST, "b": LOST})) == Replay(("a", "b"))


def test_a_restarted_stage_needs_its_source_though_the_client_has_all_of_its_output() -> None:
    """The client has all of b's output; b runs again for c, and then a, which feeds it, dies."""
    assert decide(state_of(THREE, {"a": LOST}, whole="b", restarted="b")) == Replay(("a",))
