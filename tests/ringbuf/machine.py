"""A machine with total store order, that runs the sides of one ring step by step.

Words, data bytes, two bells, and for each side a buffer of stores that memory has not seen yet. A load gives the side's
own newest buffered store, else memory. The oldest entries of a buffer drain at any later time, in order. A fence waits
until the own buffer is empty. Ringing, clearing and sleeping order nothing: that is less than a kernel gives, so the
protocol may not lean on it. A side that dies does nothing more. What its buffer holds still drains, as retired stores
do on x86, and has drained when another side learns of the death (an exiting process takes locks before the kernel
announces its exit).

Reductions, and why none hides anything:
1. Only these are steps: a load of a word that another side stores, whatever touches a bell, to drop a held frame.
   All else a side does, it does at once, for no other side can notice when: a store enters its own buffer, a fence
   passes when that is empty, a word that only it stores has one value.
2. Bytes of the data area drain together with the next word in the buffer. No side can notice that either, as long as
   what one reads (until its next step) or holds (until it drops it) is nowhere among what another has stored, be it in
   memory yet or not. This is checked at every read and every store of bytes: a machine in which it does not hold is
   wrong whatever the values are.
3. A side that dies does so between any two of its stores, though they are made at once: each beginning is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ringbuf._words import CHECKSUMS, CONSUMER, MESSAGES, PAYLOAD_BYTES, PRODUCER
from tests.ringbuf.side import PATIENCE, SIDES, Answer, Endless, Node, Op, Origin, Parts, Role, Script, claim_word

Region: TypeAlias = tuple[int, int]
T = TypeVar("T")

NAMES = {
    PRODUCER.position: "tail",
    PRODUCER.waits: "producer waits for",
    PRODUCER.closed: "producer closed",
    PRODUCER.claim: "producer claim",
    CONSUMER.position: "head",
    CONSUMER.waits: "consumer waits for",
    CONSUMER.closed: "consumer closed",
    CONSUMER.claim: "consumer claim",
    MESSAGES: "messages",
    PAYLOAD_BYTES: "payload bytes",
    CHECKSUMS: "checksums",
}
SLOT = {word: slot for slot, word in enumerate(NAMES)}
OWN = (set(PRODUCER[1:]) | {MESSAGES, PAYLOAD_BYTES}, set(CONSUMER[1:]), set())
"""Words that a side stores, and no other."""
LIVES, DIED, SUCCEEDED = range(3)
_STEPS = ("wait", "await successor", "ring", "clear", "drop", "done")


class End(NamedTuple):
    """notes: of each side, in all its lives. words: by name."""

    notes: list[tuple[Any, ...]]
    words: dict[str, int]


class Scenario(NamedTuple):
    """scripts: producer, consumer, and perhaps an onlooker. check: of each end, by assertions. start: both positions.

    mortal: the side that may die once. successor: what then takes its end over. claims: the sides begin by claiming
    their ends; else they have already.
    """

    scripts: tuple[Script, ...]
    check: Callable[[End], None]
    capacity: int = 256
    start: int = 0
    mortal: int | None = None
    successor: Script | None = None
    claims: bool = False
    checksums: bool = False


class Violation(AssertionError):
    """An invariant does not hold."""


class NotConstant(Exception):
    """A side stores a word that was taken to be constant."""

    def __init__(self, word: int) -> None:
        self.word = word
        super().__init__(NAMES[word])


class State(NamedTuple):
    at: tuple[tuple[Node, int], ...]
    """Each side's next operation."""
    buffers: tuple[tuple[Op, ...], ...]
    words: tuple[int, ...]
    data: bytes
    rung: tuple[bool, ...]
    held: tuple[tuple[Region, ...], ...]
    reading: tuple[tuple[tuple[int, int, int], ...], ...]
    """Begin, end, and the side's buffered stores that were made before: the next one drains after the read."""
    life: int
    """Lives of the mortal side: LIVES, DIED or SUCCEEDED."""
    past: tuple[Any, ...]
    """What it noted before it died."""

    def next_of(self, side: int) -> Op:
        node, at = self.at[side]
        return node.ops[at]

    def notes_of(self, side: int) -> tuple[Any, ...]:
        node, at = self.at[side]
        return (*node.notes, *(op[1] for op in node.ops[:at] if op[0] == "note"))


class Step(NamedTuple):
    side: int
    kind: str
    what: Any = None
    answer: Answer = None


class _Run:
    """One side on the way to its next step, and what only that side can change."""

    def __init__(self, state: State, side: int) -> None:
        self._state, self._side = state, side
        self.node, self.at = state.at[side]
        self.stored, self.held, self._reading = state.buffers[side], state.held[side], state.reading[side]

    def state(self) -> State:
        state, side = self._state, self._side
        return State(
            at=_put(state.at, side, (self.node, self.at)),
            buffers=_put(state.buffers, side, self.stored),
            words=state.words,
            data=state.data,
            rung=state.rung,
            held=_put(state.held, side, self.held),
            reading=_put(state.reading, side, self._reading),
            life=state.life,
            past=state.past,
        )

    def answer(self, answer: Answer) -> None:
        """Go on with what the script does after this answer."""
        self.node, self.at = _after(self.node, self._side, answer), 0

    def read(self, begin: int, end: int) -> None:
        """Go on with the bytes from ``begin`` to ``end``."""
        _check_complete(self._state, self._side, begin, end)
        self._reading = (*self._reading, (begin, end, len(self.stored)))
        self.answer(_read(self._state.data, self.stored, begin, end))


class Machine:
    """varying: words that one side stores and others load. All else is constant to them, or there is NotConstant."""

    def __init__(self, scenario: Scenario, parts: Parts, varying: Set[int]) -> None:
        self._varying = varying
        self._scenario, self._mortal = scenario, scenario.mortal
        self._sides = range(len(scenario.scripts))
        self._origins: list[Origin] = []

        def root(side: int, life: int, script: Script) -> Node:
            role = Role(
                side=side, life=life, capacity=scenario.capacity, parts=parts, claims=bool(life) or scenario.claims
            )
            self._origins.append(Origin(role, script))
            return Node(self._origins[-1])

        self._roots = [root(side, 0, script) for side, script in enumerate(scenario.scripts)]
        self._heir = None if scenario.successor is None else root(scenario.mortal or 0, 1, scenario.successor)

    def runs(self) -> int:
        """How often a script was run."""
        return sum(origin.runs for origin in self._origins)

    def beginnings(self) -> list[State]:
        words = dict.fromkeys(SLOT, 0)
        words[PRODUCER.position] = words[CONSUMER.position] = self._scenario.start
        words[CHECKSUMS] = int(self._scenario.checksums)
        if not self._scenario.claims:
            words[PRODUCER.claim], words[CONSUMER.claim] = claim_word(0, 0), claim_word(1, 0)
        nothing: tuple[tuple[Any, ...], ...] = tuple(() for _ in self._sides)
        state = State(
            at=tuple((root, 0) for root in self._roots),
            buffers=nothing,
            words=tuple(words.values()),
            data=bytes(self._scenario.capacity),
            rung=(False, False),
            held=nothing,
            reading=nothing,
            life=LIVES,
            past=(),
        )
        deaths: list[State] = []
        for side in self._sides:
            state = self._run_on(state, side, deaths)
        return [state, *deaths]

    def steps(self, state: State) -> list[Step]:
        """All that may happen next."""
        steps = []
        for side in self._sides:
            dead = side == self._mortal and state.life == DIED
            kind, *what = state.next_of(side)
            buffer = state.buffers[side]
            if buffer and (dead or kind == "fence" or any(self._is_sync(entry) for entry in buffer)):
                steps.append(Step(side, "drain"))
            if dead:
                if self._heir and not buffer:
                    steps.append(Step(side, "succeed"))
                continue
            if side == self._mortal and state.life == LIVES:
                steps.append(Step(side, "exit" if kind == "done" else "die"))
            if kind == "wait":
                bell, claim, timed = what
                if state.rung[bell]:
                    steps.append(Step(side, kind, bell, "rung"))
                if self._is_known_dead(state, claim):
                    steps.append(Step(side, kind, bell, "died"))
                if timed:
                    steps.append(Step(side, kind, bell, "late"))
            elif kind == "load":
                steps.append(Step(side, kind, what[0], _load(state, side, what[0])))
            elif kind in ("ring", "clear") or (kind == "await successor" and state.life == SUCCEEDED):
                steps.append(Step(side, kind, what[0]))
            elif kind == "drop":
                steps.append(Step(side, kind, tuple(what)))
        return steps

    def take(self, state: State, step: Step) -> list[State]:
        """The state after it, and those in which the side died on the way there. Raises Violation."""
        side, kind, what, answer = step
        if kind in ("die", "exit"):
            return [self._death(state, side)]
        node, at = state.at[side]
        if kind == "drain":
            state = self._drain(state, side)
        elif kind == "succeed":
            assert self._heir is not None
            state = state._replace(at=_put(state.at, side, (self._heir, 0)), life=SUCCEEDED)
        else:
            here = (_after(node, side, answer), 0) if kind in ("load", "wait", "await successor") else (node, at + 1)
            state = state._replace(at=_put(state.at, side, here), reading=_put(state.reading, side, ()))
            if kind in ("ring", "clear"):
                state = state._replace(rung=_put(state.rung, what, kind == "ring"))
            elif kind == "drop":
                held = list(state.held[side])
                held.remove(what)
                state = state._replace(held=_put(state.held, side, tuple(held)))
        deaths: list[State] = []
        return [self._run_on(state, side, deaths), *deaths]

    def check_end(self, state: State) -> None:
        """Nothing more happens. Raises Violation."""
        notes, stuck = [], []
        for side in self._sides:
            died = side == self._mortal and state.life != LIVES
            alive = not died or state.life == SUCCEEDED
            if alive and state.next_of(side)[0] != "done":
                stuck.append(f"the {SIDES[side]} is at {state.next_of(side)}")
            notes.append((*(state.past if died else ()), *(state.notes_of(side) if alive else ())))
        if stuck:
            raise Violation(f"{' and '.join(stuck)} for ever")
        try:
            self._scenario.check(End(notes, dict(zip(NAMES.values(), state.words, strict=True))))
        except AssertionError as error:
            shown = "; ".join(f"the {SIDES[side]} notes {_show_notes(notes[side])}" for side in self._sides)
            raise Violation(f"at the end {shown}{f', where {error}' * bool(str(error))}") from None

    def _run_on(self, state: State, side: int, deaths: list[State]) -> State:
        """All up to the next step. deaths: gets the states in which the side died on the way there."""
        mortal = side == self._mortal and state.life == LIVES
        if (side == self._mortal and state.life == DIED) or state.next_of(side)[0] in _STEPS:
            return state
        run, rests = _Run(state, side), 0
        while True:
            op = run.node.ops[run.at]
            kind, *what = op
            if kind in ("store", "write"):
                if mortal:
                    deaths.append(self._death(run.state(), side))
                self._check_store(state, side, op)
                run.stored = (*run.stored, op)
            elif kind == "hold":
                run.held = (*run.held, (what[0], what[1]))
            elif kind == "read":
                run.read(what[0], what[1])
                continue
            elif kind == "load" and (what[0] in OWN[side] or what[0] not in self._varying):
                run.answer(_load(run.state(), side, what[0]))
                continue
            elif kind == "rest":
                run.answer(None)
                rests += 1
                if rests == PATIENCE:
                    raise Violation(f"the {SIDES[side]} runs in circles")
                continue
            elif kind == "raised":
                raise Violation(f"the {SIDES[side]} fails: {what[0]}")
            elif kind != "note" and (kind != "fence" or run.stored):
                return run.state()
            run.at += 1

    def _check_store(self, state: State, side: int, op: Op) -> None:
        kind, where, value = op
        if kind == "write":
            _check_unused(state, side, where, where + len(value))
        elif where not in self._varying and self._is_looked_at(where):
            raise NotConstant(where)

    def _drain(self, state: State, side: int) -> State:
        """Up to the next word that others look at."""
        words, data = list(state.words), bytearray(state.data)
        buffer = state.buffers[side]
        drained = next((number for number, entry in enumerate(buffer, 1) if self._is_sync(entry)), len(buffer))
        for kind, where, value in buffer[:drained]:
            if kind == "write":
                data[where : where + len(value)] = value
            else:
                words[SLOT[where]] = value
        tail, head = words[SLOT[PRODUCER.position]], words[SLOT[CONSUMER.position]]
        if not head <= tail <= head + self._scenario.capacity:
            raise Violation(f"head {head} and tail {tail} of {self._scenario.capacity} bytes")
        reading = tuple((begin, end, ahead - drained) for begin, end, ahead in state.reading[side] if drained <= ahead)
        return state._replace(
            words=tuple(words),
            data=bytes(data),
            buffers=_put(state.buffers, side, buffer[drained:]),
            reading=_put(state.reading, side, reading),
        )

    def _death(self, state: State, side: int) -> State:
        return state._replace(
            held=_put(state.held, side, ()),
            reading=_put(state.reading, side, ()),
            life=DIED,
            past=state.notes_of(side),
        )

    def _is_looked_at(self, word: int) -> bool:
        return word not in (MESSAGES, PAYLOAD_BYTES) or len(self._sides) > 2

    def _is_sync(self, entry: Op) -> bool:
        return entry[0] == "store" and entry[1] in self._varying

    def _is_known_dead(self, state: State, claim: int) -> bool:
        if self._mortal is None or state.life == LIVES or claim != claim_word(self._mortal, 0):
            return False
        return state.life == SUCCEEDED or not state.buffers[self._mortal]


def _show_notes(notes: tuple[Any, ...]) -> str:
    return ", ".join(f"{note[:1].hex()}x{len(note)}" if isinstance(note, bytes) else str(note) for note in notes)


def _after(node: Node, side: int, answer: Answer) -> Node:
    try:
        return node.after(answer)
    except Endless:
        raise Violation(f"the {SIDES[side]} runs in circles") from None


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return items if items[index] is item else (*items[:index], item, *items[index + 1 :])


def _load(state: State, side: int, word: int) -> int:
    for kind, where, value in reversed(state.buffers[side]):
        if kind == "store" and where == word:
            assert isinstance(value, int)
            return value
    return state.words[SLOT[word]]


def _read(memory: bytes, stored: tuple[Op, ...], begin: int, end: int) -> bytes:
    data = bytearray(memory)
    for kind, where, value in stored:
        if kind == "write":
            data[where : where + len(value)] = value
    return bytes(data[begin:end])


def _check_complete(state: State, side: int, begin: int, end: int) -> None:
    for other, buffer in enumerate(state.buffers):
        for entry in buffer:
            if other != side and entry[0] == "write" and entry[1] < end and begin < entry[1] + len(entry[2]):
                raise Violation(f"the {SIDES[side]} reads data {begin}:{end} that memory may not have: torn")


def _check_unused(state: State, side: int, begin: int, end: int) -> None:
    for other, (held, reading) in enumerate(zip(state.held, state.reading, strict=True)):
        for a, b, *_ in (*held, *reading):
            if other != side and a < end and begin < b:
                raise Violation(f"the {SIDES[side]} writes data {begin}:{end} while the {SIDES[other]} uses {a}:{b}")
