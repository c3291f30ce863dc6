"""All interleavings of a scenario: every state that the machine can reach is visited, once.

Breadth first, so that a failure's trace is a shortest one. A state holds memory, store buffers, bells and, for each
side, all that it was told; by rule 1 of ``side`` nothing else has a say in what follows. There is no bound: the search
ends when no state is left, or raises.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

from tests.ringbuf.machine import NAMES, Machine, Scenario, State, Step, Violation
from tests.ringbuf.side import SIDES, Op, Parts

_Origins: TypeAlias = "dict[State, tuple[State, Step] | None]"


class Found(NamedTuple):
    """states: visited. steps: tried. ends: states after which nothing happens. runs: of a script."""

    states: int
    steps: int
    ends: int
    runs: int


def explore(scenario: Scenario, parts: Parts | None = None) -> Found:
    """Raises Violation, with the interleaving."""
    machine = Machine(scenario, parts or Parts())
    origins: _Origins = dict.fromkeys(machine.beginnings())
    queue = deque(origins)
    tried = ends = 0
    while queue:
        state = queue.popleft()
        steps = machine.steps(state)
        step = None
        try:
            if all(step.kind == "die" for step in steps):
                ends += 1
                machine.check_end(state)
            for step in steps:
                for following in machine.take(state, step):
                    tried += 1
                    if following not in origins:
                        origins[following] = state, step
                        queue.append(following)
        except Violation as violation:
            raise Violation(f"{violation}\n\n{_trace(origins, state, step)}") from None
    return Found(len(origins), tried, ends, machine.runs())


def _trace(origins: _Origins, state: State, last: Step | None) -> str:
    """A line a step: what each side does, and the words that memory has not seen after it."""
    path: list[tuple[Step | None, State | None]] = [] if last is None else [(last, None)]
    while (origin := origins[state]) is not None:
        path.append((origin[1], state))
        state = origin[0]
    path.append((None, state))
    lines = [f"step  {'producer':36}{'consumer':36}in store buffers"]
    for number, (step, after) in enumerate(reversed(path)):
        columns = ["", "", ""]
        if step is not None:
            columns[step.side] = _show(step)
        pending = "the step that fails" if after is None else _show_buffers(after)
        lines.append(f"{number:>4}  {columns[0]:36}{columns[1]:36}{columns[2]}{pending}".rstrip())
    return "\n".join(lines)


def _show(step: Step) -> str:
    what = NAMES[step.what] if step.kind == "load" else "" if step.what is None else step.what
    told = "" if step.told is None else f" -> {step.told}"
    return f"{step.kind} {what}{told}"


def _show_buffers(state: State) -> str:
    shown = []
    for side, buffer in enumerate(state.buffers):
        if buffer:
            shown.append(f"{SIDES[side]}: {', '.join(map(_show_store, buffer))}")
    return "; ".join(shown)


def _show_store(entry: Op) -> str:
    kind, where, value = entry
    return f"{NAMES[where]}={value}" if kind == "store" else f"data[{where}:{where + len(value)}]"
