"""The states of an incarnation: each cell of the table."""

from __future__ import annotations

from itertools import product

import pytest

from omni_actors.supervisor.incarnation import (
    TRANSITIONS,
    Incarnation,
    IncarnationEvent,
    IncarnationState,
)
from omni_actors.transitions import IllegalTransition

State, Event = IncarnationState, IncarnationEvent
LEGAL = {
    (State.STARTING, Event.READY): State.READY,
    (State.STARTING, Event.STOP): State.STOPPING,
    (State.STARTING, Event.DIE): State.DEAD,
    (State.STARTING, Event.END): State.ENDED,
    (State.READY, Event.STOP): State.STOPPING,
    (State.STOPPING, Event.DIE): State.DEAD,
    (State.STOPPING, Event.END): State.ENDED,
    (State.DEAD, Event.END): State.ENDED,
}


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_event_in_every_state(state: State, event: Event) -> None:
    incarnation = Incarnation(state)
    if (state, event) in LEGAL:
        incarnation.advance(event)
        assert incarnation.state is LEGAL[state, event]
    else:
        with pytest.raises(IllegalTransition) as caught:
            incarnation.advance(event)
        assert (caught.value.state, caught.value.event) == (state, event)
        assert incarnation.state is state


def test_only_the_ended_state_accepts_nothing() -> None:
    assert set(TRANSITIONS) == set(State)
    assert [state for state, accepted in TRANSITIONS.items() if not accepted] == [State.ENDED]


@pytest.mark.parametrize("state", State)
def test_stopping_is_harmless_in_every_state(state: State) -> None:
    incarnation = Incarnation(state)
    incarnation.stop()
    assert incarnation.state is (State.STOPPING if state in (State.STARTING, State.READY) else state)
    assert not incarnation.running


def test_waiting_tasks_are_woken_by_ready_and_by_the_end() -> None:
    incarnation = Incarnation()
    assert not incarnation.ready.is_set()
    incarnation.advance(Event.READY)
    assert incarnation.ready.is_set()
    incarnation.stop()
    incarnation.advance(Event.DIE)
    assert incarnation.over
    assert not incarnation.ended.is_set()
    incarnation.advance(Event.END)
    assert incarnation.ended.is_set()
    assert Incarnation(State.ENDED).ended.is_set()
