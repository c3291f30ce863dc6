"""One transport, measured by a process on each node."""

from __future__ import annotations

import multiprocessing
import statistics
import struct
import time
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from tests.support.network import Namespace

fork = multiprocessing.get_context("fork")
STREAM_SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 8 << 20)
ECHO_SIZES = (64, 4 << 10)
WATCHDOG_S = 120.0
_WORD = struct.Struct("<Q")
_LAST = 1 << 63


class End(Protocol):
    """One end of a transport, which carries messages both ways."""

    def send(self, message: memoryview) -> None: ...

    def receive(self, size: int) -> memoryview:
        """Return the next message, which has ``size`` bytes. It is valid until the next call."""
        ...

    def cpu_s(self) -> float:
        """Return the CPU time of other processes that this end needs."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    name: str

    def open(self, host: str, other: Connection, is_near: bool) -> End:
        """Called in a process of its own on each node. other: the process on the other node, to exchange addresses."""
        ...


class Figures(NamedTuple):
    """bytes_per_s and cpu_s_per_gb by the size of a stream's messages; round_trip_s (median) by that of an echo."""

    bytes_per_s: dict[int, float]
    cpu_s_per_gb: dict[int, float]
    round_trip_s: dict[int, float]


def far_side(end: End) -> None:
    """Check a stream of each size, and send each echo back."""
    for size in STREAM_SIZES:
        cpu, number, word = -_cpu_s(end), 0, 0
        while not word & _LAST:
            message = end.receive(size)
            word = _WORD.unpack_from(message)[0]
            if word & ~_LAST != number or _WORD.unpack_from(message, size - 8)[0] != number:
                raise ValueError(f"message {word:#x} where {number:#x} was expected")
            number += 1
        cpu += _cpu_s(end)
        end.send(memoryview(struct.pack("<d", cpu)))
    for size in ECHO_SIZES:
        for _ in range(int.from_bytes(end.receive(8), "little")):
            end.send(end.receive(size))


def near_side(end: End, seconds: float) -> Figures:
    rates, costs, trips = {}, {}, {}
    for size in STREAM_SIZES:
        message = memoryview(bytearray(size))
        cpu, number, begin = -_cpu_s(end), 0, time.monotonic()
        while True:
            is_last = time.monotonic() - begin > seconds and number > 2
            _WORD.pack_into(message, size - 8, number)
            _WORD.pack_into(message, 0, number | (_LAST if is_last else 0))
            end.send(message)
            number += 1
            if is_last:
                break
        far_cpu = struct.unpack("<d", end.receive(8))[0]
        amount = number * size
        rates[size] = amount / (time.monotonic() - begin)
        costs[size] = (cpu + _cpu_s(end) + far_cpu) / (amount / 1e9)
    for size in ECHO_SIZES:
        count = int(1000 * seconds)
        end.send(memoryview(count.to_bytes(8, "little")))
        message, times = memoryview(bytearray(size)), []
        for _ in range(count):
            begin = time.perf_counter()
            end.send(message)
            end.receive(size)
            times.append(time.perf_counter() - begin)
        trips[size] = statistics.median(times)
    return Figures(rates, costs, trips)


def _cpu_s(end: End) -> float:
    return time.process_time() + end.cpu_s()


def measure(transport: Transport, nodes: tuple[Namespace, Namespace], seconds: float) -> Figures:
    """Run both sides, each in a process on its node."""
    here, answer = fork.Pipe()
    near, far = fork.Pipe()

    def run(node: Namespace, other: Connection, is_near: bool) -> None:
        with node.entered():
            end = transport.open(node.address, other, is_near)
            if is_near:
                answer.send(near_side(end, seconds))
            else:
                far_side(end)
            other.send("done")
            other.recv()
            end.close()

    processes = [
        fork.Process(target=run, args=(node, other, is_near))
        for node, other, is_near in ((nodes[0], near, True), (nodes[1], far, False))
    ]
    for process in processes:
        process.start()
    try:
        if not here.poll(WATCHDOG_S):
            raise TimeoutError(f"{transport.name}: not done within {WATCHDOG_S:g} s")
        figures: Figures = here.recv()
        return figures
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
