"""One transport at one size, measured in two processes.

Rule 1: every transport carries the same messages, made by one generator (``Source``), and delivers them to one
function (``Sink.check``), which reads the first and the last word of each: a message that is not readable in the
consumer, out of order or torn ends the run. The first message is compared whole.
Rule 2: a session is a stream (throughput, CPU) and then a paced series (latency: the queue is empty and the consumer
asleep when a message is sent).
Rule 3: times are CLOCK_MONOTONIC. A stream lasts from before its first send to after its last check; a latency, from
before the send to the check.

Message: word 0 is its number and marks, word 1 the time it was made, the last word repeats word 0.
"""

from __future__ import annotations

import multiprocessing
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

fork = multiprocessing.get_context("fork")

_HEAD = struct.Struct("<QQ")
_WORD = struct.Struct("<Q")
_NUMBER = (1 << 60) - 1
_BEGIN, _END, _PACED, _LAST = 1 << 60, 1 << 61, 1 << 62, 1 << 63

Check = Callable[[Any], bool]
"""Takes a message (any buffer). Returns whether it was the last."""


class Plan(NamedTuple):
    """How long to measure. Slow transports get at least ``least`` messages in each part."""

    warm_s: float = 0.1
    stream_s: float = 0.3
    paced_s: float = 0.3
    pause_s: float = 0.0002
    least: int = 8
    trips: int = 3000
    """Round trips per repetition; 0 for none."""
    cores: tuple[int, int] = (0, 1)
    """The cores of the producer and of the consumer."""
    watchdog_s: float = 120.0


class Result(NamedTuple):
    messages_per_s: float
    bytes_per_s: float
    cpu_s_per_gb: float
    """CPU time of both processes together."""
    latencies_ns: list[int]


class Failure(NamedTuple):
    reason: str


class Notes(NamedTuple):
    """What one end measured. A figure that only the other end knows stays 0."""

    messages: int
    stream_ns: int
    cpu_ns: int
    latencies_ns: list[int]


class Transport(Protocol):
    """Moves messages from one process to another. ``open`` and ``close`` run in the parent, around both processes."""

    name: str

    def takes(self, size: int) -> bool: ...

    def open(self, size: int) -> None: ...

    def produce(self, messages: Iterable[memoryview]) -> None: ...

    def consume(self, check: Check) -> None: ...

    def close(self) -> None: ...


class Alone(Protocol):
    """Measured by a single process: memcpy has no other end, and Ray starts the other end itself."""

    name: str

    def takes(self, size: int) -> bool: ...

    def open(self, size: int) -> None: ...

    def run(self, messages: Iterable[memoryview], sink: Sink, consumer_core: int) -> Notes: ...

    def close(self) -> None: ...


def content(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes with a period that divides no page, so that misplaced bytes are detected."""
    return np.resize(np.arange(251, dtype=np.uint8), size)


class Source:
    """The messages of a session, all in one buffer. Asking for the next message ends the use of the last."""

    def __init__(self, size: int, plan: Plan, ack: Path) -> None:
        self._message, self._plan = content(size).data, plan
        self._ack = os.open(ack, os.O_RDWR)
        self.cpu_ns = 0
        self._number = 0

    def __iter__(self) -> Iterator[memoryview]:
        yield from self._stream()
        yield from self._paced()

    def _stream(self) -> Iterator[memoryview]:
        message, plan, now = self._message, self._plan, time.monotonic_ns
        head, word, tail = _HEAD.pack_into, _WORD.pack_into, len(self._message) - 8
        number, at = 0, now()
        until = at + int(plan.warm_s * 1e9)
        while at < until or number < plan.least:
            head(message, 0, number, at)
            word(message, tail, number)
            yield message
            number += 1
            at = now()
        cpu = time.process_time_ns()
        until, least, marks = at + int(plan.stream_s * 1e9), number + plan.least, _BEGIN
        while not marks & _END:
            at = now()
            if at >= until and number >= least:
                marks |= _END
            head(message, 0, number | marks, at)
            word(message, tail, number | marks)
            yield message
            number += 1
            marks &= _END
        self._wait()
        self.cpu_ns = time.process_time_ns() - cpu
        self._number = number

    def _paced(self) -> Iterator[memoryview]:
        message, plan, number = self._message, self._plan, self._number
        tail, marks = len(message) - 8, _PACED
        until, least = time.monotonic() + plan.paced_s, number + plan.least
        while not marks & _LAST:
            time.sleep(plan.pause_s)  # by then the consumer sleeps
            at = time.monotonic_ns()
            if at >= until * 1e9 and number >= least:
                marks |= _LAST
            _HEAD.pack_into(message, 0, number | marks, at)
            _WORD.pack_into(message, tail, number | marks)
            yield message
            self._wait()
            number += 1

    def _wait(self) -> None:
        """Wait until the consumer has checked the message. Blocks in a read, so a transport's other threads run."""
        os.read(self._ack, 1)


class Sink:
    """Checks messages and records when they arrive. It may live in another process than its ``Source``."""

    def __init__(self, size: int, ack: Path) -> None:
        self.size, self.ack = size, ack
        self.notes = Notes(0, 0, 0, [])
        self.check = self._checker()

    def _checker(self) -> Check:
        head, word, tail, now = _HEAD.unpack_from, _WORD.unpack_from, self.size - 8, time.monotonic_ns
        ack = os.open(self.ack, os.O_RDWR)
        expected = first = began = cpu = 0
        latencies: list[int] = []

        def check(view: Any) -> bool:
            nonlocal expected, first, began, cpu
            front, made = head(view)
            if front & _NUMBER != expected or word(view, tail)[0] != front or len(view) != self.size:
                raise ValueError(f"message {front & _NUMBER:#x} where {expected:#x} was expected")
            expected += 1
            if front <= _NUMBER:
                if expected == 1:
                    self._compare(view)
                return False
            at = now()
            if front & _BEGIN:
                first, began, cpu = expected, made, time.process_time_ns()
            if front & _END:
                self.notes = Notes(expected - first + 1, at - began, time.process_time_ns() - cpu, latencies)
                os.write(ack, b".")
            elif front & _PACED:
                latencies.append(at - made)
                os.write(ack, b".")
            return bool(front & _LAST)

        return check

    def _compare(self, view: Any) -> None:
        if not np.array_equal(np.frombuffer(view, np.uint8)[16:-8], content(self.size)[16:-8]):
            raise ValueError("the first message did not arrive as it was sent")


def measure(transport: Transport | Alone, size: int, plan: Plan) -> Result | Failure:
    """Run one session. Returns a Failure with the reason if the transport fails, hangs or delivers wrong data."""
    with tempfile.TemporaryDirectory(prefix="bench-ring-") as folder:
        ack = Path(folder) / "ack"
        os.mkfifo(ack)
        transport.open(size)
        try:
            ends = (_alone,) if hasattr(transport, "run") else (_producer, _consumer)
            noted = _together(ends, (transport, size, plan, ack), plan.watchdog_s)
        finally:
            transport.close()
    if isinstance(noted, Failure):
        return noted
    consumer = noted[-1]
    seconds, amount = consumer.stream_ns / 1e9, consumer.messages * size
    cpu_s = sum(notes.cpu_ns for notes in noted) / 1e9
    return Result(consumer.messages / seconds, amount / seconds, cpu_s / (amount / 1e9), consumer.latencies_ns[3:])


def _producer(transport: Transport, size: int, plan: Plan, ack: Path) -> list[Notes]:
    os.sched_setaffinity(0, {plan.cores[0]})
    source = Source(size, plan, ack)
    transport.produce(source)
    return [Notes(0, 0, source.cpu_ns, [])]


def _consumer(transport: Transport, size: int, plan: Plan, ack: Path) -> list[Notes]:
    os.sched_setaffinity(0, {plan.cores[1]})
    sink = Sink(size, ack)
    transport.consume(sink.check)
    return [sink.notes]


def _alone(transport: Alone, size: int, plan: Plan, ack: Path) -> list[Notes]:
    os.sched_setaffinity(0, {plan.cores[0]})
    source = Source(size, plan, ack)
    consumer = transport.run(source, Sink(size, ack), plan.cores[1])
    return [Notes(0, 0, source.cpu_ns, []), consumer]


def _together(
    ends: Iterable[Callable[..., list[Notes]]], arguments: tuple[Any, ...], watchdog_s: float
) -> list[Notes] | Failure:
    """Return the measurements of the ends, in order. All processes have ended on return."""
    processes: list[ForkProcess] = []
    answers: list[connection.Connection] = []
    deadline = time.monotonic() + watchdog_s
    try:
        for end in ends:
            here, there = fork.Pipe(duplex=False)
            process = fork.Process(target=_report, args=(there, end, arguments))
            process.start()
            there.close()
            processes.append(process)
            answers.append(here)
        noted: dict[int, list[Notes]] = {}
        while len(noted) < len(processes):
            open_ends = {answers[n]: n for n in range(len(processes)) if n not in noted}
            ready = connection.wait(list(open_ends), deadline - time.monotonic())
            if not ready:
                return Failure(f"not done within {watchdog_s:g} s")
            for answer in ready:
                assert isinstance(answer, connection.Connection)
                try:
                    noted[open_ends[answer]] = answer.recv()
                except EOFError:
                    return Failure("an end died: its traceback is on standard error")
        return [notes for n in range(len(processes)) for notes in noted[n]]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
        for answer in answers:
            answer.close()


def _report(answer: connection.Connection, end: Callable[..., list[Notes]], arguments: tuple[Any, ...]) -> None:
    answer.send(end(*arguments))
