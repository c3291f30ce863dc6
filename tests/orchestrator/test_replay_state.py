"""The transitions of a stage's phase, each cell of the tables, and what a loss leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from omni_actors.orchestrator.replay_state import TRANSITIONS, Phase, ReplayState, StageEvent, StageState
from omni_actors.orchestrator.routes import Node, plan
from omni_actors.protocol.messages import Address
from omni_actors.transitions import IllegalTransition

ROUTE = plan({"a": Node(("x",)), "b": Node((), ("a",), "m")}, ["x"], ["m"])
HERE, THERE = Address("a", 0), Address("a", 1)
HELD = {Phase.RUNNING, Phase.FINISHED, Phase.RESTARTING}
"""The phases in which a living worker holds the request."""

LEGAL = {
    (Phase.QUEUED, StageEvent.DISPATCH): Phase.RUNNING,
    (Phase.RUNNING, StageEvent.INPUT_COMPLETE): Phase.RUNNING,
    (Phase.RUNNING, StageEvent.UNREPLAYABLE): Phase.RUNNING,
    (Phase.RUNNING, StageEvent.FINISH): Phase.FINISHED,
    (Phase.RUNNING, StageEvent.LOSE): Phase.LOST,
    (Phase.FINISHED, StageEvent.UNREPLAYABLE): Phase.FINISHED,
    (Phase.FINISHED, StageEvent.LOSE): Phase.LOST,
    (Phase.LOST, StageEvent.NEED): Phase.WAITING,
    (Phase.WAITING, StageEvent.FORGO): Phase.LOST,
    (Phase.WAITING, StageEvent.RESTART): Phase.RESTARTING,
    (Phase.RESTARTING, StageEvent.STARTED): Phase.RUNNING,
    (Phase.RESTARTING, StageEvent.LOSE): Phase.LOST,
}

EVENTS: dict[StageEvent, Callable[[ReplayState], None]] = {
    StageEvent.DISPATCH: lambda state: state.dispatched({"b": Address("b", 0), "a": THERE}),
    StageEvent.INPUT_COMPLETE: lambda state: state.input_complete("a", "source"),
    StageEvent.UNREPLAYABLE: lambda state: state.unreplayable("a", "too large", failed=True),
    StageEvent.FINISH: lambda state: state.finished("a"),
    StageEvent.LOSE: lambda state: state.lost("a"),
    StageEvent.NEED: lambda state: state.wait_for(["b", "a"]),
    StageEvent.FORGO: lambda state: state.wait_for([]),
    StageEvent.RESTART: lambda state: state.restarted({"b": Address("b", 0), "a": THERE}),
    StageEvent.STARTED: lambda state: state.started("a"),
}
"""How each event reaches stage a. Those for several stages name b first, which accepts the event."""

BEFORE = {StageEvent.DISPATCH: Phase.QUEUED, StageEvent.NEED: Phase.LOST, StageEvent.RESTART: Phase.WAITING}


def state_with(phase: Phase, event: StageEvent) -> ReplayState:
    """A state in which stage a is in ``phase`` and stage b accepts ``event``, if the event is for several stages."""
    state = ReplayState(ROUTE)
    state.stages["a"] = StageState(phase, address=HERE if phase in HELD else None)
    state.stages["b"] = StageState(BEFORE.get(event, Phase.RUNNING))
    return state


def is_vacuous(phase: Phase, event: StageEvent) -> bool:
    """``wait_for`` applies NEED to stages that do not wait yet, and FORGO to those that do."""
    waits = phase in (Phase.WAITING, Phase.QUEUED)
    return (event is StageEvent.NEED and waits) or (event is StageEvent.FORGO and not waits)


@pytest.mark.parametrize(("phase", "event"), [cell for cell in product(Phase, StageEvent) if not is_vacuous(*cell)])
def test_each_event_in_each_phase_is_applied_or_changes_nothing(phase: Phase, event: StageEvent) -> None:
    state = state_with(phase, event)
    before = copy.deepcopy(state.stages)
    if (phase, event) in LEGAL:
        EVENTS[event](state)
        assert state.stages["a"].phase is LEGAL[phase, event]
        assert (state.stages["a"].address is not None) == (LEGAL[phase, event] in HELD)
    else:
        with pytest.raises(IllegalTransition) as caught:
            EVENTS[event](state)
        assert (caught.value.state, caught.value.event) == (phase, event)
        assert state.stages == before, "not even the other stage's part"


def test_the_table_has_no_other_transition() -> None:
    assert {(phase, event): to for phase, row in TRANSITIONS.items() for event, to in row.items()} == LEGAL
    assert set(TRANSITIONS) == set(Phase)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("earlier", [0, 1])
def test_output_has_begun_with_its_first_chunk_and_is_open_until_its_last(earlier: int, last: bool) -> None:
    state = ReplayState(ROUTE)
    for _ in range(earlier):
        state.output_arrived("b", last=False)
    state.output_arrived("b", last=last)
    assert (state.begun_outputs, state.open_outputs) == ({"b"}, set() if last else {"b"})


@pytest.mark.parametrize("stage", ["a", "b"])
def test_a_chunk_of_an_output_that_is_complete_or_not_wanted_changes_nothing(stage: str) -> None:
    state = ReplayState(ROUTE)
    state.output_arrived("b", last=True)
    for last in (False, True):
        with pytest.raises(AssertionError):
            state.output_arrived(stage, last=last)
    assert (state.begun_outputs, state.open_outputs) == ({"b"}, set())


def running() -> ReplayState:
    state = ReplayState(ROUTE)
    state.dispatched({"a": HERE, "b": Address("b", 0)})
    return state


def test_a_lost_incarnation_leaves_only_what_the_client_has() -> None:
    state = running()
    state.input_complete("b", "a")
    state.unreplayable("b", "too large", failed=True)
    state.output_arrived("b", last=False)
    state.lost("b")
    assert state.stages["b"] == StageState(Phase.LOST)
    assert state.begun_outputs == {"b"}
    assert state.placement == {"a": HERE}
    assert not state.is_held_by(Address("b", 0))


def test_the_waiting_stages_are_those_of_the_latest_decision() -> None:
    state = running()
    state.lost("a")
    state.lost("b")
    state.wait_for(["a", "b"])
    assert state.waiting == ("a", "b")
    state.wait_for(["b"])
    assert state.waiting == ("b",)
    state.restarted({"b": Address("b", 1)})
    assert state.waiting == ()
    assert state.placement == {"b": Address("b", 1)}
    assert state.stages["b"].restarted


@pytest.mark.parametrize(
    ("finished", "last", "waived", "complete"),
    [
        ({"a", "b"}, True, (), True),
        ({"a", "b"}, False, (), False),
        ({"b"}, True, (), False),
        ({"b"}, True, ("a",), True),
    ],
)
def test_a_request_is_complete_with_its_outputs_and_its_stages(
    finished: set[str], last: bool, waived: tuple[str, ...], complete: Any
) -> None:
    state = running()
    for stage in finished:
        state.finished(stage)
    state.output_arrived("b", last=last)
    assert state.is_complete(waived) == complete
