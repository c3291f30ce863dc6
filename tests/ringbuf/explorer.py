"""All interleavings of a scenario: every state that the machine can reach is visited, once.

Breadth first, so that a failure's trace is a shortest one. A state holds memory, store buffers, bells and, for each
side, all answers that it has received, or the state of its objects where it rested; by rules 1 and 4 of ``side``,
nothing else affects what follows. There is no bound: the search ends when no state is left, or raises.

Finally, an end must be reachable from every state without a death: sides that keep each other busy for ever are as
wrong as sides that sleep for ever.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from ringbuf._words import CONSUMER, PRODUCER
from tests.ringbuf.machine import NAMES, Machine, NotConstant, Scenario, State, Step, Violation
from tests.ringbuf.side import SIDES, Op, Parts


class Found(NamedTuple):
    """states: visited. steps: tried. ends: states after which nothing happens. runs: of a script."""

    states: int
    steps: int
    ends: int
    runs: int


def explore(scenario: Scenario, parts: Parts | None = None) -> Found:
    """Raises Violation, with the interleaving."""
    varying = {PRODUCER.position, PRODUCER.waits, CONSUMER.position, CONSUMER.waits}
    while True:
        try:
            return _explore(Machine(scenario, parts or Parts(), varying))
        except NotConstant as other:
            varying.add(other.word)


def _explore(machine: Machine) -> Found:
    numbers = {state: number for number, state in enumerate(machine.beginnings())}
    states = list(numbers)
    origins: list[tuple[int, Step] | None] = [None] * len(states)
    ends: list[int] = []
    sources, targets = array("L"), array("L")
    tried = 0
    for number, state in enumerate(states):  # which grows
        steps = machine.steps(state)
        step = None
        try:
            if all(step.kind == "die" for step in steps):
                ends.append(number)
                machine.check_end(state)
            for step in steps:
                for nth, following in enumerate(machine.take(state, step)):
                    tried += 1
                    known = numbers.setdefault(following, len(states))
                    if known == len(states):
                        states.append(following)
                        origins.append((number, step))
                    if step.kind != "die" and nth == 0:
                        sources.append(number)
                        targets.append(known)
        except Violation as violation:
            raise Violation(f"{violation}\n\n{_trace(states, origins, number, step)}") from None
    for number in _unending(len(states), ends, sources, targets):
        raise Violation(f"this can go on for ever\n\n{_trace(states, origins, number, None)}")
    return Found(len(states), tried, len(ends), machine.runs())


def _unending(count: int, ends: list[int], sources: array[int], targets: array[int]) -> list[int]:
    """Nodes from which no end is within reach."""
    into: list[list[int]] = [[] for _ in range(count)]
    for source, target in zip(sources, targets, strict=True):
        into[target].append(source)
    reached = bytearray(count)
    ending = list(ends)
    for number in ending:  # which grows
        if not reached[number]:
            reached[number] = True
            ending.extend(into[number])
    return [number for number in range(count) if not reached[number]]


def _trace(states: list[State], origins: list[tuple[int, Step] | None], number: int, last: Step | None) -> str:
    """A line a step: what each side does, and what its buffer holds from then on."""
    path: list[tuple[Step | None, State | None]] = [] if last is None else [(last, None)]
    while (origin := origins[number]) is not None:
        path.append((origin[1], states[number]))
        number = origin[0]
    path.append((None, states[number]))
    lines = [f"step  {'producer':36}{'consumer':36}stores that memory has not seen"]
    for at, (step, state) in enumerate(reversed(path)):
        columns = ["", "", ""]
        if step is not None:
            columns[step.side] = _show(step)
        buffers = "(fails here)" if state is None else _show_buffers(state)
        lines.append(f"{at:>4}  {columns[0]:36}{columns[1]:36}{columns[2]}{buffers}".rstrip())
    return "\n".join(lines)


def _show(step: Step) -> str:
    what = {"load": lambda: f" {NAMES[step.what]}", "drop": lambda: f" {step.what}"}.get(step.kind, str)()
    return f"{step.kind}{what}" + ("" if step.answer is None else f" -> {step.answer}")


def _show_buffers(state: State) -> str:
    shown = [f"{SIDES[side]}: {', '.join(_show_stores(buffer))}" for side, buffer in enumerate(state.buffers) if buffer]
    return "; ".join(shown)


def _show_stores(buffer: tuple[Op, ...]) -> list[str]:
    """Bytes that follow each other are shown as one store."""
    shown: list[str] = []
    begin = end = -1
    for kind, where, value in buffer:
        if kind == "store":
            shown.append(f"{NAMES[where]}={value}")
            end = -1
        elif where == end:
            end += len(value)
            shown[-1] = f"data[{begin}:{end}]"
        else:
            begin, end = where, where + len(value)
            shown.append(f"data[{begin}:{end}]")
    return shown
