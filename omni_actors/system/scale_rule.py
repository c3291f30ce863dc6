"""Which replicas a change of their number adds, removes and takes back: a pure rule.

A replica that is removed *drains* first. Until its drain has ended, it still has its worker, so it may be taken back.

Rules
1. Up: replicas that drain are taken back first, because they are loaded. New ones are added only beyond these.
2. Down: those that stay leave in the order that the caller gives.
3. So a number of workers that was reached before needs no more numbers (and devices) than it had then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

R = TypeVar("R")


class Change(NamedTuple, Generic[R]):
    """What to do. Only ``leaving`` or the other two have anything.

    returning: replicas that drain, and are taken back. new: how many replicas to add. leaving: replicas to remove.
    """

    returning: Sequence[R]
    new: int
    leaving: Sequence[R]


def plan_change(workers: int, staying: Sequence[R], draining: Sequence[R]) -> Change[R]:
    """Return the change after which a stage has ``workers`` replicas.

    staying: the replicas that are not being removed, the first to leave first. draining: those that may be taken back,
    the first to return first.

    >>> plan_change(1, ["a", "b", "c"], [])
    Change(returning=[], new=0, leaving=['a', 'b'])
    >>> plan_change(4, ["c"], ["a", "b"])
    Change(returning=['a', 'b'], new=1, leaving=[])
    """
    missing = workers - len(staying)
    if missing < 0:
        return Change([], 0, staying[:-missing])
    returning = draining[:missing]
    return Change(returning, missing - len(returning), [])
