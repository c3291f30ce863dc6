"""Which requests take part in a denoising step.

Rules
1. A request has one row of the step's batch, or two with a companion. A batch has room for ``max_batch`` rows, and for
   one request at least.
2. Some requests are *active*: those that have begun, then those that a step has left out, then others by priority and
   arrival, as long as their rows are fewer than twice ``max_batch``, and the first two whatever rows they have. So an
   active request remains active, and the others wait until active ones end.
3. Of the active requests, those that were left out of two steps come first. Then come those that have begun, the ones
   with the fewest steps left first, and then the others. A request that does not fit is left out; a smaller one behind
   it may fit.
4. So an active request is never left out of more than two steps in a row: the rows that a step leaves out are at most
   ``max_batch``, and the next steps have room for them. When paused requests go on, those that took their places stay
   active too; then a request may be left out of more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PATIENCE = 2
"""The most steps in a row that may leave out an active request (rule 4)."""


class Candidate(NamedTuple):
    """A request that could take part. steps_left: steps until its picture. left_out: steps in a row without it."""

    rows: int
    has_begun: bool
    priority: int
    steps_left: int
    left_out: int


class Turn(NamedTuple):
    """The requests of a step, and the active ones that it leaves out, as positions among the candidates."""

    running: list[int]
    left_out: list[int]


def turn(candidates: Sequence[Candidate], max_batch: int) -> Turn:
    """Return the requests of the next step. candidates: in the order of their arrival."""

    def activity(n: int) -> tuple[bool, bool, int]:
        each = candidates[n]
        return not each.has_begun, not each.left_out, each.priority

    active, rows = list[int](), 0
    for n in sorted(range(len(candidates)), key=activity):
        rows += candidates[n].rows
        if rows >= 2 * max_batch and len(active) >= 2:
            break
        active.append(n)

    def urgency(n: int) -> tuple[int, bool, int]:
        each = candidates[n]
        overdue = each.left_out if each.left_out >= PATIENCE else 0
        return -overdue, not each.has_begun, each.steps_left if each.has_begun else 0

    running, left_out, room = list[int](), list[int](), max_batch
    for n in sorted(active, key=urgency):  # stable: then by priority and arrival
        fits = candidates[n].rows <= room or not running
        (running if fits else left_out).append(n)
        room -= candidates[n].rows if fits else 0
    return Turn(running, left_out)
