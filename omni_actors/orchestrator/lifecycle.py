"""Request lifecycle as a table.

Rule 1: every transition is in TRANSITIONS; no other file assigns a state.
Rule 2: no I/O, clock or trio here.
Rule 3: an event that a state does not accept raises IllegalTransition and leaves the state as it was.

    QUEUED ──dispatch──► RUNNING ──output──► STREAMING ─┐output
       │                   │  │                │  ▲─────┘
       │                   │  └───complete─────┤
       └─fail, abort───────┴──fail, abort──────┴──► DONE | FAILED | ABORTED
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    QUEUED = "queued"
    """Admitted; a stage on its route is not ready."""
    RUNNING = "running"
    """Started on every stage of its route; nothing has come out yet."""
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


class Event(enum.Enum):
    DISPATCH = "dispatch"
    OUTPUT = "output"
    COMPLETE = "complete"
    """Every stage that is waited for has finished it, and the last of every output has come."""
    FAIL = "fail"
    ABORT = "abort"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.QUEUED: {Event.DISPATCH: State.RUNNING, Event.FAIL: State.FAILED, Event.ABORT: State.ABORTED},
    State.RUNNING: {
        Event.OUTPUT: State.STREAMING,
        Event.COMPLETE: State.DONE,
        Event.FAIL: State.FAILED,
        Event.ABORT: State.ABORTED,
    },
    State.STREAMING: {
        Event.OUTPUT: State.STREAMING,
        Event.COMPLETE: State.DONE,
        Event.FAIL: State.FAILED,
        Event.ABORT: State.ABORTED,
    },
    State.DONE: {},
    State.FAILED: {},
    State.ABORTED: {},
}

TERMINAL = frozenset(state for state, accepted in TRANSITIONS.items() if not accepted)


class IllegalTransition(AssertionError):
    """A bug of the shell: ``event`` cannot happen in ``state``."""

    def __init__(self, state: State, event: Event) -> None:
        self.state, self.event = state, event
        super().__init__(f"{event.name} in {state.name}")


class Lifecycle:
    """One request's state."""

    def __init__(self) -> None:
        self.state = State.QUEUED

    def advance(self, event: Event) -> None:
        """Raises IllegalTransition; the state is then unchanged."""
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise IllegalTransition(self.state, event) from None

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL
