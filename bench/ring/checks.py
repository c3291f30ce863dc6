"""Checks beside the table of sizes: round trips between event loops, idleness, and a long run."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import trio

from bench.ring.measure import fork
from bench.ring.transports import SPIN_S, receive, send
from ringbuf import Ring, RingClosed

SIZE = 64
RINGS, RINGS_AWAKE, RAW_SOCKET = "ours, trio to trio", "ours, trio to trio, awake 50 µs", "Unix socket, blocking"
_WORD = struct.Struct("<Q")


class RingTrips:
    """Both ends run in ``trio.run``, with a ring in each direction."""

    name = RINGS
    spin_s = 0.0

    def __init__(self) -> None:
        self.rings = Ring.create(), Ring.create()

    def echo(self) -> None:
        trio.run(self._echo)

    async def _echo(self) -> None:
        consumer, producer = self.rings[0].claim_consumer(), self.rings[1].claim_producer()
        try:
            while True:
                with await receive(consumer, self.spin_s) as frame:
                    await send(producer, frame.data)
        except RingClosed:
            producer.close()

    def trips(self, count: int) -> float:
        return trio.run(self._trips, count)

    async def _trips(self, count: int) -> float:
        producer, consumer = self.rings[0].claim_producer(), self.rings[1].claim_consumer()
        message = bytearray(SIZE)
        for number in range(count + count // 10):
            if number == count // 10:
                began = time.monotonic()
            _WORD.pack_into(message, 0, number)
            await send(producer, memoryview(message))
            with await receive(consumer, self.spin_s) as frame:
                assert _WORD.unpack_from(frame.data)[0] == number
        seconds = time.monotonic() - began
        producer.close()
        return seconds / count


class RingTripsAwake(RingTrips):
    """Spins for a moment before it sleeps; its event loop stops for that time."""

    name = RINGS_AWAKE
    spin_s = SPIN_S


class SocketTrips:
    """Both ends block on a plain Unix stream socket."""

    name = RAW_SOCKET

    def __init__(self) -> None:
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def echo(self) -> None:
        self.ends[0].close()
        end, buffer = self.ends[1], bytearray(SIZE)
        while end.recv_into(buffer, SIZE, socket.MSG_WAITALL):
            end.sendall(buffer)

    def trips(self, count: int) -> float:
        self.ends[1].close()
        end, buffer = self.ends[0], bytearray(SIZE)
        for number in range(count + count // 10):
            if number == count // 10:
                began = time.monotonic()
            _WORD.pack_into(buffer, 0, number)
            end.sendall(buffer)
            end.recv_into(buffer, SIZE, socket.MSG_WAITALL)
            assert _WORD.unpack_from(buffer)[0] == number
        seconds = time.monotonic() - began
        end.close()
        return seconds / count


class TrioSocketTrips(SocketTrips):
    """Both ends run in ``trio.run`` with a ``SocketStream``."""

    name = "Unix socket, trio to trio"

    def echo(self) -> None:
        self.ends[0].close()
        trio.run(self._echo)

    async def _echo(self) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self.ends[1]))
        async for data in stream:
            await stream.send_all(data)

    def trips(self, count: int) -> float:
        self.ends[1].close()
        return trio.run(self._trips, count)

    async def _trips(self, count: int) -> float:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self.ends[0]))
        buffer = bytearray(SIZE)
        for number in range(count + count // 10):
            if number == count // 10:
                began = time.monotonic()
            _WORD.pack_into(buffer, 0, number)
            await stream.send_all(buffer)
            answer = await stream.receive_some(SIZE)
            assert _WORD.unpack_from(answer)[0] == number
        seconds = time.monotonic() - began
        await stream.aclose()
        return seconds / count


ROUND_TRIPS: tuple[type[RingTrips | SocketTrips], ...] = (RingTrips, RingTripsAwake, SocketTrips, TrioSocketTrips)


def round_trip_s(kind: type[RingTrips | SocketTrips], count: int, cores: tuple[int, int]) -> float:
    """Return the mean seconds of ``count`` round trips of 64 bytes between two processes, each on its own core."""
    path = kind()
    echo = fork.Process(target=_on, args=(cores[1], path.echo))
    here, there = fork.Pipe(duplex=False)
    caller = fork.Process(target=lambda: _on(cores[0], lambda: there.send(path.trips(count))))
    echo.start()
    caller.start()
    there.close()
    if isinstance(path, RingTrips):
        for ring in path.rings:
            ring.close()
    else:
        for end in path.ends:
            end.close()
    seconds: float = here.recv()
    here.close()
    for process in (caller, echo):
        process.join()
    return seconds


def _on(core: int, work: Callable[[], None]) -> None:
    os.sched_setaffinity(0, {core})
    work()


class Idle(NamedTuple):
    """What a process does while it waits for a message that does not arrive."""

    seconds: float
    wake_ups: int
    """Context switches, voluntary and not."""
    cpu_ns: int


def idle(seconds: float, *, in_trio: bool) -> Idle:
    """Measure a process that blocks in ``recv``, or waits for the doorbell in ``trio.run``."""
    with Ring.create() as ring:
        waiter = fork.Process(target=_wait_for_nothing, args=(ring, in_trio))
        waiter.start()
        try:
            assert waiter.pid is not None
            before = _activity(waiter.pid)
            time.sleep(0.2)
            while (now := _activity(waiter.pid)) != before:  # until it has started
                before = now
                time.sleep(0.2)
            time.sleep(seconds)
            after = _activity(waiter.pid)
        finally:
            waiter.kill()
            waiter.join()
    return Idle(seconds, after[0] - before[0], after[1] - before[1])


def _wait_for_nothing(ring: Ring, in_trio: bool) -> None:
    consumer = ring.claim_consumer()
    if in_trio:
        trio.run(receive, consumer)
    else:
        consumer.recv()


def _activity(pid: int) -> tuple[int, int]:
    """Return (context switches, CPU ns) of a single-threaded process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    switches = sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)
    return switches, int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


class Mark(NamedTuple):
    at: float
    """The fraction of the messages that had passed, 0 to 1."""
    rss: tuple[int, int]
    """Resident bytes: producer, consumer."""
    fds: tuple[int, int]


def long_run(messages: int, cores: tuple[int, int]) -> tuple[list[Mark], float]:
    """Return memory and descriptors of both ends while ``messages`` of 64 bytes pass, and messages per second."""
    marks_at = [messages // 100, messages // 2, messages - 1]
    with Ring.create() as ring:
        here, there = fork.Pipe(duplex=False)
        consumer = fork.Process(target=lambda: _on(cores[1], lambda: there.send(_drain(ring, messages, marks_at))))
        mine, theirs = fork.Pipe(duplex=False)
        producer = fork.Process(target=lambda: _on(cores[0], lambda: theirs.send(_pour(ring, messages, marks_at))))
        began = time.monotonic()
        consumer.start()
        producer.start()
        poured, drained = mine.recv(), here.recv()
        seconds = time.monotonic() - began
        for process in (producer, consumer):
            process.join()
        for end in (here, there, mine, theirs):
            end.close()
    pairs = zip(marks_at, poured, drained, strict=True)
    marks = [Mark(at / messages, (p[0], c[0]), (p[1], c[1])) for at, p, c in pairs]
    return marks, messages / seconds


def _pour(ring: Ring, messages: int, marks_at: list[int]) -> list[tuple[int, int]]:
    producer, message, marks = ring.claim_producer(), bytearray(SIZE), []
    for number in range(messages):
        _WORD.pack_into(message, 0, number)
        producer.send(message)
        if number in marks_at:
            marks.append(_footprint())
    return marks


def _drain(ring: Ring, messages: int, marks_at: list[int]) -> list[tuple[int, int]]:
    consumer, marks = ring.claim_consumer(), []
    for number in range(messages):
        with consumer.recv() as frame:
            assert _WORD.unpack_from(frame.data)[0] == number
        if number in marks_at:
            marks.append(_footprint())
    return marks


def _footprint() -> tuple[int, int]:
    """Return (resident bytes, open descriptors) of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))
