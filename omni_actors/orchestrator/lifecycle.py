"""The lifecycle of a request, as a table.

Rule 1: every transition is in ``TRANSITIONS``; no other file assigns a state.
Rule 2: no I/O, clock or trio here.
Rule 3: an event that a state does not accept raises IllegalTransition and leaves the state as it was.

    QUEUED ──dispatch──► RUNNING ──output──► STREAMING ─┐output
       │                   │  │                │  ▲─────┘
       │                   │  └───complete─────┤
       └─fail, abort───────┴──fail, abort──────┴──► DONE | FAILED | ABORTED
"""

from __future__ import annotations

from omni_actors.transitions import TableKey, next_state


class State(TableKey):
    QUEUED = "queued"
    """The request is admitted and waits for a ready replica of each stage of its route."""
    RUNNING = "running"
    """Every stage of the route was sent its ``Start``; no output has arrived yet."""
    STREAMING = "streaming"
    """Output has arrived."""
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


class Event(TableKey):
    DISPATCH = "dispatch"
    OUTPUT = "output"
    COMPLETE = "complete"
    """The last chunk of every output has arrived, and every stage whose end matters has finished."""
    FAIL = "fail"
    ABORT = "abort"


_DISPATCHED = {
    Event.OUTPUT: State.STREAMING,
    Event.COMPLETE: State.DONE,
    Event.FAIL: State.FAILED,
    Event.ABORT: State.ABORTED,
}
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.QUEUED: {Event.DISPATCH: State.RUNNING, Event.FAIL: State.FAILED, Event.ABORT: State.ABORTED},
    State.RUNNING: _DISPATCHED,
    State.STREAMING: _DISPATCHED,
    State.DONE: {},
    State.FAILED: {},
    State.ABORTED: {},
}

TERMINAL = frozenset(state for state, accepted in TRANSITIONS.items() if not accepted)


class Lifecycle:
    """The state of one request."""

    def __init__(self) -> None:
        self.state = State.QUEUED
        self.ended = False

    def advance(self, event: Event) -> None:
        """Apply an event. Raises IllegalTransition; the state is then unchanged."""
        self.state = next_state(TRANSITIONS, self.state, event)
        self.ended = self.state in TERMINAL
