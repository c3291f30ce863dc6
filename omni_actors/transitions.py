"""State machines as tables: for each state, the events that it accepts and the state that follows."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar


class TableKey(enum.Enum):
    """An enum whose members are keys of a table."""

    __hash__ = object.__hash__  # a member equals only itself, and ``Enum.__hash__`` runs in Python


S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class IllegalTransition(AssertionError):
    """A bug of the caller: ``event`` cannot happen in ``state``."""

    def __init__(self, state: enum.Enum, event: enum.Enum) -> None:
        self.state, self.event = state, event
        super().__init__(f"{event.name} in {state.name}")


def next_state(table: Mapping[S, Mapping[E, S]], state: S, event: E) -> S:
    """Return the state that follows ``state`` in ``table``. Raises IllegalTransition."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransition(state, event) from None
