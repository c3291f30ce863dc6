"""The lifecycle table, each cell of it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.orchestrator.lifecycle import TERMINAL, TRANSITIONS, Event, Lifecycle, State
from omni_actors.transitions import IllegalTransition

LEGAL = {
    (State.QUEUED, Event.DISPATCH): State.RUNNING,
    (State.QUEUED, Event.FAIL): State.FAILED,
    (State.QUEUED, Event.ABORT): State.ABORTED,
    (State.RUNNING, Event.OUTPUT): State.STREAMING,
    (State.RUNNING, Event.COMPLETE): State.DONE,
    (State.RUNNING, Event.FAIL): State.FAILED,
    (State.RUNNING, Event.ABORT): State.ABORTED,
    (State.STREAMING, Event.OUTPUT): State.STREAMING,
    (State.STREAMING, Event.COMPLETE): State.DONE,
    (State.STREAMING, Event.FAIL): State.FAILED,
    (State.STREAMING, Event.ABORT): State.ABORTED,
}


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_each_event_in_each_state_is_applied_or_changes_nothing(state: State, event: Event) -> None:
    lifecycle = Lifecycle()
    lifecycle.state = state
    if (state, event) in LEGAL:
        lifecycle.advance(event)
        assert lifecycle.state is LEGAL[state, event]
    else:
        with pytest.raises(IllegalTransition) as caught:
            lifecycle.advance(event)
        assert (caught.value.state, caught.value.event) == (state, event)
        assert lifecycle.state is state


def test_the_terminal_states_accept_no_event() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {State.DONE, State.FAILED, State.ABORTED} == TERMINAL


@given(st.lists(st.sampled_from(Event)))
def test_nothing_happens_after_the_end(events: list[Event]) -> None:
    lifecycle = Lifecycle()
    ended_as: State | None = None
    for event in events:
        try:
            lifecycle.advance(event)
        except IllegalTransition:
            pass
        else:
            assert ended_as is None
        if lifecycle.ended:
            ended_as = ended_as or lifecycle.state
            assert lifecycle.state is ended_as
