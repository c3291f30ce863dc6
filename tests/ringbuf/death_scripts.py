"""Scripts of child processes (see child_processes.py) that die at a chosen step of their work with a ring.

Rule 1: a step is one access to what both sides share: a word's load or store, half a copy of a payload, a bell's ring
or clear, going to sleep at it. A child kills itself just before its n-th step of one kind; the last kind is the end of
its script. (Of one kind: how many steps there are in all depends on which of the two is faster.)
Rule 2: a child reports what it has done.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

from ringbuf import Frame, Ring, RingClosed
from ringbuf._claim import Waiter
from ringbuf._words import CONSUMER, HEADER, PRODUCER, RECORD, Bell
from tests.ringbuf.child_processes import WATCHDOG_S, Report

CAPACITY = 4096
START = 3328
"""Position at which the rings begin, so that the third message meets the end of the data area."""

MESSAGES = tuple(bytes([65 + n]) * size for n, size in enumerate((10, 500, 1000, 0, 64, 700)))
BIG = b"".join(n.to_bytes(4, "little") for n in range(CAPACITY // 4 * 3 // 2))
STREAM = (b"first", BIG, b"third")
FILLING = (b"a" * 1984, b"b" * 1984, b"c" * 100)

SLEEPING = "sleeping"
"""What a child reports each time that it goes to sleep."""

Step = Callable[[str], None]

NAMES = {8 * index: f"header word {index}" for index in range(HEADER // 8)} | {
    8 * getattr(column, field): f"{column.end}.{field}"
    for column in (PRODUCER, CONSUMER)
    for field in ("position", "waits", "closed", "claim")
}


def name_of(index: int) -> str:
    return NAMES[8 * index] if 8 * index < HEADER else f"record word {index % (RECORD // 8)}"


class SteppingWords:
    def __init__(self, words: memoryview, step: Step) -> None:
        self._words, self._step = words, step

    def __getitem__(self, index: int) -> int:
        self._step(f"load {name_of(index)}")
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._step(f"store {name_of(index)}")
        self._words[index] = value

    def release(self) -> None:
        self._words.release()


class SteppingData:
    def __init__(self, data: memoryview, step: Step) -> None:
        self._data, self._step = data, step

    def __getitem__(self, place: slice) -> memoryview:
        self._step("look at a payload")
        return self._data[place]

    def __setitem__(self, place: slice, piece: bytes | memoryview) -> None:
        middle = place.start + len(piece) // 2
        self._step("copy a payload")
        self._data[place.start : middle] = piece[: len(piece) // 2]
        self._step("copy a payload's second half")
        self._data[middle : place.stop] = piece[len(piece) // 2 :]

    def release(self) -> None:
        self._data.release()


def stepping(method: Callable[..., Any], label: str, step: Step) -> Callable[..., Any]:
    def stepped(*arguments: Any) -> Any:
        step(label)
        return method(*arguments)

    return stepped


def send_whole(ring: Ring, step: Step, report: Report) -> None:
    producer = ring.claim_producer()
    for number, message in enumerate(MESSAGES[:4]):
        producer.send(message)
        report(f"sent {number}")
    for number, message in enumerate(MESSAGES[4:], 4):
        for commit in (False, True):
            view = producer.try_reserve(len(message))
            assert view is not None
            view[: len(message) // 2] = message[: len(message) // 2]
            step("fill a reservation's second half")
            view[len(message) // 2 :] = message[len(message) // 2 :]
            if commit:
                producer.commit()
                report(f"sent {number}")
            else:
                producer.abandon()
    producer.close()


def send_all(ring: Ring, messages: tuple[bytes, ...], report: Report) -> None:
    producer = ring.claim_producer()
    for number, message in enumerate(messages):
        producer.send(message, timeout=WATCHDOG_S)
        report(f"sent {number}")
    producer.close()


def receive_whole(ring: Ring, step: Step, report: Report) -> None:
    consumer = ring.claim_consumer()
    held: dict[int, Frame] = {}

    def release(number: int) -> None:
        report(f"releasing {number}")
        held.pop(number).release()
        report(f"released {number}")

    for number, message in enumerate(MESSAGES):
        held[number] = consumer.recv()
        step("read a payload")
        assert held[number].data == message
        if number == 0:
            release(0)
        if number == 2:
            release(2)
            release(1)
    for number in (4, 3, 5):
        release(number)
    consumer.close()


def receive_all(ring: Ring, messages: tuple[bytes, ...], report: Report) -> None:
    consumer = ring.claim_consumer()
    for number, message in enumerate(messages):
        frame = consumer.recv(WATCHDOG_S)
        assert frame.data == message
        report(f"releasing {number}")
        frame.release()
        report(f"released {number}")
    try:
        consumer.recv(WATCHDOG_S)
    except RingClosed:
        consumer.close()


SCRIPTS: dict[str, Callable[[Ring, Step, Report], None]] = {
    "send whole": send_whole,
    "send fragments": lambda ring, step, report: send_all(ring, STREAM, report),
    "send into a full ring": lambda ring, step, report: send_all(ring, FILLING, report),
    "receive whole": receive_whole,
    "receive fragments": lambda ring, step, report: receive_all(ring, STREAM, report),
    "receive from an empty ring": lambda ring, step, report: receive_all(ring, MESSAGES[:2], report),
}


def live(ring: Ring, report: Report, script: str, fatal: str, occurrence: int) -> None:
    counts: Counter[str] = Counter()

    def step(kind: str) -> None:
        if kind == fatal and counts[kind] == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)
        counts[kind] += 1

    def go_to_sleep(kind: str) -> None:
        step(kind)
        report(SLEEPING)

    segment = ring._segment
    segment.words = SteppingWords(segment.words, step)  # type: ignore[assignment]
    segment.data = SteppingData(segment.data, step)  # type: ignore[assignment]
    Bell.ring = stepping(Bell.ring, "ring", step)  # type: ignore[method-assign]
    Bell.clear = stepping(Bell.clear, "clear", step)  # type: ignore[method-assign]
    Waiter.wait = stepping(Waiter.wait, "sleep", go_to_sleep)  # type: ignore[method-assign]
    SCRIPTS[script](ring, step, report)
    ring.close()
    step("end")
    report("took " + "; ".join(counts))
