"""One side of a ring, run alone: the real classes on a memory that answers from a list.

Rule 1: a side is a function. Its next operations follow from the answers that it has received (loads, bytes read, how a
wait ended). A run with a list of answers gives these operations, up to the first question beyond the list.
Rule 2: a side keeps no memory. It hands out stores, fences and bells as operations, in program order; the machine
decides what they do to memory and what a load answers.
Rule 3: the ring's own code runs, once an end is claimed. Mapping, eventfd and poll are replaced beneath it.
Rule 4: a script is a sequence of actions. Between two actions a side *rests*: no code of the ring is running, so the
state of the side is the state of its objects. Histories that rest in the same state are one from there on.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ringbuf import Consumer, Frame, PeerDied, Producer
from ringbuf._consumer import Whole
from ringbuf._words import CONSUMER, HEADER, PRODUCER, ConsumerEnd, End, ProducerEnd, Segment

COLUMNS = (PRODUCER, CONSUMER)
SIDES = ("producer", "consumer", "onlooker")
FIRST_DATA_WORD = HEADER >> 3
LINE = 64
PATIENCE = 150
"""Answers after which a side counts as running in circles."""

Action: TypeAlias = "Callable[[Side], bool | None]"
"""True: once more."""
Script: TypeAlias = tuple[Action, ...]
Answer: TypeAlias = "int | bytes | str | None"
Op: TypeAlias = tuple[Any, ...]
"""Commands: store word value | write offset bytes | fence | ring side | clear side | hold begin end | drop begin end |
note item. Questions: load word | read begin end | wait side claim timed | await successor side | rest likeness.
Ends: done | raised error."""


class Parts(NamedTuple):
    """What sides are made of; a planted bug replaces one."""

    producer: type[Producer] = Producer
    consumer: type[Consumer] = Consumer
    producer_end: type[ProducerEnd] = ProducerEnd
    consumer_end: type[ConsumerEnd] = ConsumerEnd
    clears_words_first: bool = False
    """As struct.pack_into does."""


class Role(NamedTuple):
    """side: index in SIDES. life: 0, and 1 for the successor of one that died."""

    side: int
    life: int
    capacity: int
    parts: Parts
    claims: bool
    """It claims its end when it starts; else both ends are claimed from the beginning."""


def claim_word(side: int, life: int) -> int:
    return 10 * (side + 1) + life


class OutOfAnswers(BaseException):
    pass


class Endless(Exception):
    pass


class Side:
    """What a script has in hand."""

    def __init__(self, role: Role, answers: tuple[Answer, ...]) -> None:
        self._role, self._answers, self._answered = role, answers, 0
        self.ops: list[Op] = []
        self.stopped = False
        self.noted = 0
        """Notes before the first of ``ops``."""
        self._line: tuple[int, bytes] | None = None
        self._slice: tuple[int, bytearray, bytes] | None = None
        self.segment = _Segment(self, role.capacity, role.parts.clears_words_first)
        self.waiter = _Waiter(self, role.side)
        # From here on, what actions leave to each other.
        self.producer: Producer | None = None
        self.consumer: Consumer | None = None
        self.held: list[tuple[Frame, tuple[int, int] | None]] = []
        self.notes: list[Any] = []
        self.written = 100 * role.life

    def begin(self) -> bool:
        """As Ring.claim_producer and Ring.claim_consumer do. False: its end is closed."""
        side, parts, segment = self._role.side, self._role.parts, self.segment
        if side >= len(COLUMNS):
            return True
        if self._role.claims:
            if segment.is_closed(COLUMNS[side]):
                return False
            segment.check_positions()
            segment.store_claim(COLUMNS[side], claim_word(side, self._role.life))
        mine, peers = _Bell(self, side), _Bell(self, 1 - side)
        end: Any = (parts.producer_end, parts.consumer_end)[side](segment, mine, peers)
        if self._role.claims:
            end.wake()
        if side == 0:
            self.producer = parts.producer(segment, end, self.waiter, -1)
        else:
            self.consumer = parts.consumer(segment, end, self.waiter, -1)
        return True

    def message(self, size: int) -> bytes:
        """Other bytes each time."""
        self.written += 1
        return bytes([self.written]) * size

    def note(self, item: Any) -> None:
        """For the scenario's check at the end."""
        self.do("note", item)
        self.notes.append(item)

    def take(self, frame: Frame) -> None:
        """Note a frame's bytes. Until ``release``, no side may write to its place in the ring."""
        place = None
        if isinstance(frame._owner, Consumer) and self._slice is not None:
            begin, buffer, _ = self._slice
            place = begin, begin + len(buffer)
            self.do("hold", *place)
        self.held.append((frame, place))
        self.note(bytes(frame.data))

    def release(self, index: int) -> None:
        frame, place = self.held.pop(index)
        if place is not None:
            self.do("drop", *place)
        frame.release()

    def await_successor(self) -> None:
        self.ask("await successor", 1 - self._role.side)

    def rest(self, action: int) -> None:
        """Before an action."""
        if self.producer is None or self.producer._reserved is None:
            self._slice = None
        kept = (self.producer, self.consumer, self.held, self.notes, self.written, self._slice)
        self.ask("rest", None if self._answered < len(self._answers) else (action, _likeness(kept, [])))

    def do(self, *op: Any) -> None:
        if not self.stopped:
            self._line = None
            self._write_slice()
            self.ops.append(op)

    def ask(self, *question: Any) -> Any:
        if self.stopped:
            raise OutOfAnswers
        self.do(*question)
        if self._answered == len(self._answers):
            self.stopped = True
            raise OutOfAnswers
        self._answered += 1
        self.noted = len(self.notes)
        self.ops.clear()
        return self._answers[self._answered - 1]

    def read(self, begin: int, end: int) -> bytes:
        found: bytes = self.ask("read", begin, end)
        return found

    def read_word(self, offset: int) -> int:
        """A line at a time: nothing comes between the loads of one header."""
        at = offset % LINE
        if self._line is None or self._line[0] != offset - at:
            found = self.read(offset - at, offset - at + LINE)
            self._line = offset - at, found
        return int.from_bytes(self._line[1][at : at + 8], "little")

    def slice(self, begin: int, end: int) -> memoryview:
        """What is written to it is stored before this side's next operation."""
        found = self.read(begin, end)
        buffer = bytearray(found)
        self._slice = begin, buffer, found
        return memoryview(buffer)

    def _write_slice(self) -> None:
        if self._slice is not None:
            begin, buffer, before = self._slice
            if buffer != before:
                self._slice = begin, buffer, bytes(buffer)
                self.ops.append(("write", begin, bytes(buffer)))


class _Words:
    def __init__(self, side: Side, clears_first: bool) -> None:
        self._side, self._clears_first = side, clears_first

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return array("Q", [self[each] for each in range(index.start, index.stop)])
        if index >= FIRST_DATA_WORD:
            return self._side.read_word(8 * index - HEADER)
        return self._side.ask("load", index)

    def __setitem__(self, index: int, value: int) -> None:
        for stored in (0, value) if self._clears_first else (value,):
            if index >= FIRST_DATA_WORD:
                self._side.do("write", 8 * index - HEADER, stored.to_bytes(8, "little"))
            else:
                self._side.do("store", index, stored)


class _Data:
    def __init__(self, side: Side, capacity: int) -> None:
        self._side, self._capacity = side, capacity

    def __getitem__(self, place: slice) -> memoryview:
        return self._side.slice(place.start, min(place.stop, self._capacity))

    def __setitem__(self, place: slice, piece: bytes | memoryview) -> None:
        if min(place.stop, self._capacity) - place.start != len(piece):
            raise ValueError(f"{len(piece)} bytes do not fit {place.start}:{place.stop}")
        if piece:
            self._side.do("write", place.start, bytes(piece))


class _Lock:
    def __init__(self, side: Side) -> None:
        self._side = side

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        self._side.do("fence")


class _Segment(Segment):
    def __init__(self, side: Side, capacity: int, clears_words_first: bool) -> None:
        self._side, self.capacity = side, capacity
        self.words: Any = _Words(side, clears_words_first)
        self.data: Any = _Data(side, capacity)

    def fence(self) -> Any:
        return _Lock(self._side)


class _Bell:
    def __init__(self, side: Side, sleeper: int) -> None:
        self._side, self._sleeper = side, sleeper

    def ring(self) -> None:
        self._side.do("ring", self._sleeper)

    def clear(self) -> None:
        self._side.do("clear", self._sleeper)


class _Waiter:
    """Like the real one, it reads from the peer's claim which process to watch, then sleeps at its bell."""

    def __init__(self, side: Side, sleeper: int) -> None:
        self._side, self._sleeper = side, sleeper

    def wait(self, deadline: float | None) -> bool:
        peer = COLUMNS[1 - self._sleeper]
        claim = self._side.ask("load", peer.claim)
        ended = self._side.ask("wait", self._sleeper, claim, deadline is not None)
        if ended == "died":
            raise PeerDied(peer.end, claim)
        return bool(ended == "rung")

    def close(self) -> None:
        pass


def _likeness(thing: Any, seen: list[Any]) -> Any:
    """A value that is equal for things which will do the same. Raises TypeError for what it does not know."""
    if thing is None or isinstance(thing, (int, str, bytes)):
        return thing
    if isinstance(thing, (bytearray, memoryview)):
        return bytes(thing)
    for number, other in enumerate(seen):
        if other is thing:
            return "seen", number
    seen.append(thing)
    if isinstance(thing, (tuple, list, deque)):
        return tuple(_likeness(each, seen) for each in thing)
    if isinstance(thing, np.ndarray):
        return len(thing)  # memory to be used again
    if isinstance(thing, Whole):
        return thing.total, bytes(thing.memory[: thing.filled])
    if isinstance(thing, (_Words, _Data, _Segment, _Bell, _Waiter)) or (
        isinstance(thing, MethodType) and isinstance(thing.__self__, _Lock)
    ):
        return None
    if isinstance(thing, (Producer, Consumer, Frame, End)):
        slots = [name for base in type(thing).__mro__ for name in getattr(base, "__slots__", ())]
        names = (*slots, *getattr(thing, "__dict__", ()))
        return tuple(_likeness(getattr(thing, name), seen) for name in names)
    raise TypeError(f"what a {type(thing)} will do is not known")


class Node:
    """A side after certain answers: its operations until it asks again."""

    __slots__ = ("_after", "_answers", "_origin", "notes", "ops")

    def __init__(self, origin: Origin, answers: tuple[Answer, ...] = ()) -> None:
        self._origin, self._answers = origin, answers
        self._after: dict[Answer, Node] = {}
        side = origin.run(answers)
        self.ops = tuple(side.ops)
        self.notes = tuple(side.notes[: side.noted])
        """Before the first of ``ops``."""

    def after(self, answer: Answer) -> Node:
        """Raises Endless."""
        kind, *what = self.ops[-1]
        known: dict[Any, Node] = self._origin.rests if kind == "rest" else self._after
        key = what[0] if kind == "rest" else answer
        if (node := known.get(key)) is None:
            if len(self._answers) == PATIENCE:
                raise Endless
            node = known[key] = Node(self._origin, (*self._answers, answer))
        return node


class Origin:
    """A script in a role, and all that is known of what it does."""

    def __init__(self, role: Role, script: Script) -> None:
        self._role, self._script = role, script
        self.rests: dict[Any, Node] = {}
        self.runs = 0

    def run(self, answers: tuple[Answer, ...]) -> Side:
        self.runs += 1
        side = Side(self._role, answers)
        try:
            for number, action in enumerate(self._script if side.begin() else ()):
                side.rest(number)
                while action(side):
                    side.rest(number)
            side.rest(len(self._script))
        except OutOfAnswers:
            pass
        except Exception as error:  # noqa: BLE001  # whatever a side raises is a finding
            side.do("raised", f"{type(error).__name__}: {error}")
        else:
            side.do("done")
        side.stopped = True
        return side
