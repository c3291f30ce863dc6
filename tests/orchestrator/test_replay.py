"""The rule of settlement: every combination of facts on small routes, against the rule in other words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product
from typing import Any

import pytest

from omni_actors.orchestrator.replay import (
    Facts,
    Fail,
    Replay,
    Unavailable,
    Untouched,
    Verdict,
    decide_replay,
    idle,
    unwanted,
)
from omni_actors.orchestrator.routes import Node, Route, plan
from omni_actors.protocol.messages import CLIENT

ROUTES = {
    "one": plan({"a": Node(("x",), (), "m")}, ["x"], ["m"]),
    "two": plan({"a": Node(("x",)), "b": Node((), ("a",), "m")}, ["x"], ["m"]),
    "two, both give": plan({"a": Node(("x",), (), "l"), "b": Node((), ("a",), "m")}, ["x"], ["l", "m"]),
    "three": plan({"a": Node(("x",)), "b": Node((), ("a",)), "c": Node((), ("b",), "m")}, ["x"], ["m"]),
    "three, the middle gives": plan(
        {"a": Node(("x",)), "b": Node((), ("a",), "l"), "c": Node((), ("b",), "m")}, ["x"], ["l", "m"]
    ),
    "fork": plan({"a": Node(("x",)), "b": Node((), ("a",), "l"), "c": Node((), ("a",), "m")}, ["x"], ["l", "m"]),
    "join": plan({"a": Node(("x",)), "b": Node(("y",)), "c": Node((), ("a", "b"), "m")}, ["x", "y"], ["m"]),
    "diamond": plan(
        {"a": Node(("x",)), "b": Node((), ("a",)), "c": Node((), ("a",)), "d": Node((), ("b", "c"), "m")}, ["x"], ["m"]
    ),
}


def subsets(of: Any) -> list[frozenset[Any]]:
    items = sorted(of)
    return [frozenset(some) for some in chain(*(combinations(items, n) for n in range(len(items) + 1)))]


def facts_of(route: Route, **known: Any) -> Facts:
    """Of a request that may be replayed, and nothing speaks against it."""
    everything: dict[str, Any] = {
        "held": set(route.stages),
        "finished": set(),
        "repeated": set(),
        "fed": set(),
        "open": {stage for stage in route.stages if CLIENT in route.targets[stage]},
        "seen": set(),
        "deterministic": set(route.stages),
        "let_go": {},
        "broken": {},
        "given_up": set(),
        "on_failure": "replay",
        "replays": 0,
        "limit": 2,
    }
    return Facts(route, **(everything | known))


def situations(route: Route) -> Iterator[Facts]:
    """Every set of living, finished, fed and open stages."""
    emitters = {stage for stage in route.stages if CLIENT in route.targets[stage]}
    edges = {(stage, source) for stage in route.stages for source in route.sources[stage] if source != CLIENT}
    for held, finished, still_open in product(subsets(route.stages), subsets(route.stages), subsets(emitters)):
        for fed in subsets(edge for edge in edges if edge[0] in held):
            yield facts_of(route, held=held, finished=finished, fed=fed, open=still_open)


every_situation = pytest.mark.parametrize(
    "facts", [pytest.param(list(situations(route)), id=name) for name, route in ROUTES.items()]
)
"""A test of all situations on one route."""


def wanted(facts: Facts, stage: str) -> bool:
    """Whether somebody waits for more of its output: the client, or a stage that has to give more itself."""
    below = set(facts.route.targets[stage]) - {CLIENT}
    return stage in facts.open or any(gives_more(facts, name) and (name, stage) not in facts.fed for name in below)


def gives_more(facts: Facts, stage: str) -> bool:
    return wanted(facts, stage) and not (stage in facts.held and stage in facts.finished)


def needed(facts: Facts) -> set[str]:
    """The dead stages that have to run again."""
    return {stage for stage in facts.route.stages if stage not in facts.held and wanted(facts, stage)}


def again(verdict: Verdict) -> set[str]:
    assert isinstance(verdict, Replay | Untouched)
    return set(verdict.stages) if isinstance(verdict, Replay) else set()


@every_situation
def test_what_starts_again_is_what_somebody_waits_for_and_no_more(facts: list[Facts]) -> None:
    for each in facts:
        assert again(decide_replay(each)) == needed(each), each


@every_situation
def test_a_replay_is_whole_in_order_and_asked_for_once(facts: list[Facts]) -> None:
    """Everyone who feeds a stage that starts again lives or starts too; with that done nothing more is missing."""
    for each in facts:
        verdict = decide_replay(each)
        if isinstance(verdict, Replay):
            assert list(verdict.stages) == [s for s in each.route.stages if s in verdict.stages], "upstream first"
            for stage in verdict.stages:
                assert set(each.route.sources[stage]) - {CLIENT} <= {*each.held, *verdict.stages}
            started = replace(
                each, held={*each.held, *verdict.stages}, finished=set(each.finished) - set(verdict.stages)
            )  # ``fed`` is of stages that lived before
            assert decide_replay(started) == Untouched()


@every_situation
def test_who_is_waited_for_gets_all_that_it_waits_for(facts: list[Facts]) -> None:
    """Otherwise the request would wait until its deadline."""
    for each in facts:
        verdict = decide_replay(each)
        feeding = {*each.held, *again(verdict)} - idle(each)
        waited_for = {stage for stage in set(each.held) - set(each.finished) if stage not in idle(each)}
        for stage in waited_for | again(verdict):
            for source in set(each.route.sources[stage]) - {CLIENT}:
                assert source in feeding or (stage, source) in each.fed, (each, stage)


@every_situation
def test_whose_work_nobody_wants_is_not_waited_for_once_it_starts_again(facts: list[Facts]) -> None:
    for each in facts:
        useless = {stage for stage in set(each.held) - set(each.finished) if not wanted(each, stage)}
        assert unwanted(each) == {stage for stage in each.route.stages if not wanted(each, stage)}
        assert idle(replace(each, repeated=each.held)) == useless
        assert idle(each) <= useless


@every_situation
def test_who_needs_nothing_waits_for_nothing(facts: list[Facts]) -> None:
    """The shell's condition for completion: nothing is open, and who still holds it has finished."""
    for each in facts:
        if not each.open and set(each.held) <= set(each.finished):
            assert decide_replay(each) == Untouched()
        if set(each.held) == set(each.route.stages):
            assert decide_replay(each) == Untouched()


@every_situation
def test_whatever_forbids_a_replay_touches_no_request_that_needs_none(facts: list[Facts]) -> None:
    for each in facts:
        all_bad = replace(
            each,
            seen=set(each.route.stages),
            deterministic=set(),
            let_go=dict.fromkeys(each.route.stages, "why"),
            given_up=set(each.route.stages),
            replays=2,
        )
        for bad in (all_bad, replace(all_bad, on_failure="fail")):
            assert (decide_replay(bad) == Untouched()) == (decide_replay(each) == Untouched())


THREE = ROUTES["three, the middle gives"]
LOST_B = {"held": {"a", "c"}}


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        ({}, Replay(("b",))),
        ({"on_failure": "fail", "given_up": {"b"}, "replays": 2}, Fail(None)),
        ({"given_up": {"b"}, "replays": 2}, Unavailable("b")),
        ({"given_up": {"c"}}, Replay(("b",))),
        ({"replays": 1}, Replay(("b",))),
        ({"replays": 2, "deterministic": set()}, Fail("it was replayed 2 times already (limits.replays)")),
        ({"let_go": {"a": "too much"}}, Fail("stage 'a': too much")),
        ({"let_go": {"c": "too much"}}, Replay(("b",))),
    ],
)
def test_what_forbids_a_replay_in_order(known: dict[str, Any], verdict: Verdict) -> None:
    assert decide_replay(facts_of(THREE, **LOST_B, **known)) == verdict


UNREPEATABLE = "would not give the same output again, and some of it is in use"


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        pytest.param({"held": {"a", "c"}}, Fail(f"stage 'b' {UNREPEATABLE}"), id="a living stage may have some"),
        pytest.param({"held": {"a"}}, Replay(("b", "c")), id="nobody who lives has any"),
        pytest.param({"held": {"a"}, "seen": {"b"}}, Fail(f"stage 'b' {UNREPEATABLE}"), id="the client has some"),
        pytest.param({"held": {"a"}, "seen": {"c"}}, Fail(f"stage 'b' {UNREPEATABLE}"), id="what was made of it"),
        pytest.param({"held": {"a", "c"}, "finished": {"c"}, "open": {"b"}}, Replay(("b",)), id="who has some is done"),
        pytest.param({"held": {"a", "b"}, "seen": {"b", "c"}}, Replay(("c",)), id="it lives and is asked again"),
        pytest.param(
            {"held": {"a"}, "seen": {"b"}, "open": {"c"}}, Replay(("b", "c")), id="what the client has it has whole"
        ),
    ],
)
def test_a_stage_that_is_not_repeatable_starts_again_where_nothing_hangs_on_what_it_gave(
    known: dict[str, Any], verdict: Verdict
) -> None:
    """The middle one of three."""
    assert decide_replay(facts_of(THREE, deterministic={"a", "c"}, **known)) == verdict


def test_a_part_that_could_not_be_done_is_fatal_where_it_is_wanted() -> None:
    """Also where it was not wanted when it was asked: a cannot feed b again, whose output c has, until c dies."""
    route = ROUTES["three"]
    fed = {"repeated": {"b"}, "broken": {"a": "too much"}}
    assert decide_replay(facts_of(route, **fed, fed={("c", "b")})) == Untouched()
    assert decide_replay(facts_of(route, **fed, held={"a", "b"})) == Fail("stage 'a': too much")
    assert decide_replay(facts_of(route, **fed)) == Fail("stage 'a': too much")


def test_a_stage_that_has_all_of_its_input_loses_nothing_with_who_gave_it() -> None:
    """The text is complete, its speech goes on: the death of the one who wrote it is no matter. Not so if both die."""
    fed = {"held": {"b"}, "fed": {("b", "a")}}
    assert decide_replay(facts_of(ROUTES["two"], **fed, on_failure="fail")) == Untouched()
    assert decide_replay(facts_of(ROUTES["two"], held=set())) == Replay(("a", "b"))


def test_a_stage_that_started_again_still_wants_what_feeds_it_though_the_client_has_all_of_its_output() -> None:
    """The client has the last of b's output; b runs again for c, and then a, which feeds it, dies."""
    facts = facts_of(ROUTES["three, the middle gives"], held={"b", "c"}, finished={"a"}, open={"c"})
    assert decide_replay(facts) == Replay(("a",))
