"""One side of a ring, run alone: the real classes over memory that answers from a list.

Rule 1: a side is a function. What it does next follows from what it was told so far (loads, bytes read, how a wait
ended), so a run with a list of answers gives its next operations, up to the first question beyond them.
Rule 2: nothing is kept here. Stores, fences and bells are handed out as operations, in program order; what they do to
memory, and what a load is told, is the machine's business.
Rule 3: the ring's own code runs. Mapping, eventfd and poll are replaced beneath it; nothing in it knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from ringbuf import Consumer, Frame, PeerDied, Producer
from ringbuf._words import CONSUMER, HEADER, PRODUCER, Column, ConsumerEnd, ProducerEnd, Segment

COLUMNS = (PRODUCER, CONSUMER)
SIDES = ("producer", "consumer", "onlooker")
FIRST_DATA_WORD = HEADER >> 3
LINE = 64
PATIENCE = 1000
"""Answers after which a side is said to run in circles."""

Told: TypeAlias = "int | bytes | str | None"
Op: TypeAlias = tuple[Any, ...]
"""Commands: store word value | write offset bytes | fence | ring side | hush side | hold begin end | drop begin end |
note item. Questions: load word | read begin end | wait side claim timed | await successor side. Ends: done | raised error."""


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


class Side:
    """What a script has in hand."""

    def __init__(self, role: Role, told: tuple[Told, ...]) -> None:
        self._role, self._told, self._told_so_far = role, told, 0
        self.ops: list[Op] = []
        self.stopped = False
        self._line: tuple[int, bytes] | None = None
        self._slice: tuple[int, bytearray, bytes] | None = None
        self._places: dict[int, tuple[int, int]] = {}
        self._written = 100 * role.life
        self.segment = _Segment(self, role.capacity, role.parts.clears_words_first)
        self.waiter = _Waiter(self, role.side)

    def producer(self) -> Producer:
        self._claim(PRODUCER)
        end = self._role.parts.producer_end(self.segment, _Bell(self, 0), _Bell(self, 1))
        self._wake(end)
        return self._role.parts.producer(self.segment, end, self.waiter, -1)

    def consumer(self) -> Consumer:
        self._claim(CONSUMER)
        end = self._role.parts.consumer_end(self.segment, _Bell(self, 1), _Bell(self, 0))
        self._wake(end)
        return self._role.parts.consumer(self.segment, end, self.waiter, -1)

    def message(self, size: int) -> bytes:
        """Other bytes each time."""
        self._written += 1
        return bytes([self._written]) * size

    def note(self, item: Any) -> None:
        """For the scenario's check at the end."""
        self.do("note", item)

    def take(self, frame: Frame) -> Frame:
        """Note a frame's bytes. From here to ``release`` nobody may write to its place in the ring."""
        if isinstance(frame._owner, Consumer) and self._slice is not None:
            begin, buffer, _ = self._slice
            self._places[id(frame)] = begin, begin + len(buffer)
            self.do("hold", *self._places[id(frame)])
        self.note(bytes(frame.data))
        return frame

    def release(self, frame: Frame) -> None:
        if id(frame) in self._places:
            self.do("drop", *self._places.pop(id(frame)))
        frame.release()

    def await_successor(self, side: int) -> None:
        self.ask("await successor", side)

    def do(self, *op: Any) -> None:
        if not self.stopped:
            self._line = None
            self._write_slice()
            self.ops.append(op)

    def ask(self, *question: Any) -> Any:
        if self.stopped:
            raise OutOfAnswers
        self.do(*question)
        if self._told_so_far == len(self._told):
            self.stopped = True
            raise OutOfAnswers
        self._told_so_far += 1
        self.ops.clear()
        return self._told[self._told_so_far - 1]

    def read(self, begin: int, end: int) -> bytes:
        told: bytes = self.ask("read", begin, end)
        return told

    def read_word(self, offset: int) -> int:
        """A line at a time: nothing comes between the loads of one header."""
        at = offset % LINE
        if self._line is None or self._line[0] != offset - at:
            told = self.read(offset - at, offset - at + LINE)
            self._line = offset - at, told
        return int.from_bytes(self._line[1][at : at + 8], "little")

    def slice(self, begin: int, end: int) -> memoryview:
        """What is written to it is stored before this side's next operation."""
        told = self.read(begin, end)
        buffer = bytearray(told)
        self._slice = begin, buffer, told
        return memoryview(buffer)

    def _write_slice(self) -> None:
        if self._slice is not None:
            begin, buffer, before = self._slice
            if buffer != before:
                self._slice = begin, buffer, bytes(buffer)
                self.ops.append(("write", begin, bytes(buffer)))

    def _claim(self, column: Column) -> None:
        if self._role.claims:
            self.segment.store_claim(column, claim_word(self._role.side, self._role.life))
            self.do("fence")  # the lock's release

    def _wake(self, end: ProducerEnd | ConsumerEnd) -> None:
        if self._role.claims:
            end.wake()


class OutOfAnswers(BaseException):
    pass


class Endless(Exception):
    pass


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
    def __init__(self, side: Side) -> None:
        self._side = side

    def __getitem__(self, place: slice) -> memoryview:
        return self._side.slice(place.start, place.stop)

    def __setitem__(self, place: slice, piece: bytes | memoryview) -> None:
        assert place.stop - place.start == len(piece)
        if piece:
            self._side.do("write", place.start, bytes(piece))


class _Lock:
    def __init__(self, side: Side) -> None:
        self._side = side

    def acquire(self) -> None:
        self._side.do("fence")

    def release(self) -> None:
        pass


class _Segment(Segment):
    def __init__(self, side: Side, capacity: int, clears_words_first: bool) -> None:
        self._side, self.capacity = side, capacity
        self.words: Any = _Words(side, clears_words_first)
        self.data: Any = _Data(side)

    def fence(self) -> Any:
        return _Lock(self._side)


class _Bell:
    def __init__(self, side: Side, sleeper: int) -> None:
        self._side, self._sleeper = side, sleeper

    def ring(self) -> None:
        self._side.do("ring", self._sleeper)

    def hush(self) -> None:
        self._side.do("hush", self._sleeper)


class _Waiter:
    """As the real one: it learns whom to watch from the peer's claim, then sleeps at its bell."""

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


class Node:
    """A side that has been told certain answers: what it does until it asks again."""

    __slots__ = ("_after", "_role", "_script", "_told", "before", "ops")

    def __init__(
        self, role: Role, script: Callable[[Side], None], told: tuple[Told, ...] = (), before: tuple[Op, ...] = ()
    ) -> None:
        self._role, self._script, self._told = role, script, told
        self.before = before
        """Its notes until then."""
        self._after: dict[Told, Node] = {}
        self.ops = self._run()

    def after(self, answer: Told) -> Node:
        """Raises Endless."""
        if (node := self._after.get(answer)) is None:
            if len(self._told) == PATIENCE:
                raise Endless
            notes = tuple(op for op in self.ops if op[0] == "note")
            node = Node(self._role, self._script, (*self._told, answer), (*self.before, *notes))
            self._after[answer] = node
        return node

    def count(self) -> int:
        """Nodes from here on."""
        nodes = [self]
        for node in nodes:
            nodes.extend(node._after.values())
        return len(nodes)

    def _run(self) -> tuple[Op, ...]:
        side = Side(self._role, self._told)
        try:
            self._script(side)
        except OutOfAnswers:
            pass
        except Exception as error:  # noqa: BLE001  # whatever a side raises is a finding
            side.do("raised", f"{type(error).__name__}: {error}")
        else:
            side.do("done")
        side.stopped = True
        return tuple(side.ops)
