"""A load of requests, measured in the parent of a contender's processes.

Rules
1. The loop is closed: ``in_flight`` clients each send a request, read its answer, and send the next one.
2. The window opens when as many requests as are in flight have been answered. Only requests that are answered within
   the window count.
3. A contender runs in a process of its own, so that all CPU time of that process and of its descendants is its own.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple, Protocol

import psutil

fork = multiprocessing.get_context("fork")


class Plan(NamedTuple):
    """How long to measure: at least ``window_s`` and ``least`` answers, at most ``longest_s``."""

    window_s: float = 2.0
    least: int = 200
    longest_s: float = 30.0
    idle_s: float = 2.0


class Cell(NamedTuple):
    """One load. size: bytes of each request's payload."""

    in_flight: int
    size: int


class Sample(NamedTuple):
    """A measured load. CPU times are user and system time in seconds."""

    p50_s: float
    p99_s: float
    per_s: float
    parent_cpu_s: float
    """CPU time of the parent for each request, its clients included."""
    cpu_s: float
    """CPU time of all processes for each request."""
    idle_cpu: float
    """CPU time of all processes per second without a request."""


class Failure(NamedTuple):
    reason: str


class Contender(Protocol):
    """A parent and three processes that pass each request on."""

    name: str

    def run(self, meter: Meter) -> None:
        """Start the processes, carry the load of ``meter``, wait through ``meter.idle``, and end the processes."""
        ...


class Meter:
    """Numbers the requests of a load and measures them. Its calls are made in the parent."""

    def __init__(self, cell: Cell, plan: Plan) -> None:
        self.cell, self.plan = cell, plan
        self.payload = bytes(cell.size)
        self._numbers = 0
        self._sent: dict[int, float] = {}
        self._answered = 0
        self._latencies_s: list[float] = []
        self._began = self._ended = 0.0
        self._cpu_before = self._cpu_after = (0.0, 0.0)
        self._idle_cpu = 0.0
        self._processes: list[psutil.Process] = []

    def submit(self) -> int | None:
        """Return the number of the next request, which is sent now; None when the load is over."""
        if self._ended:
            return None
        self._numbers += 1
        self._sent[self._numbers] = time.perf_counter()
        return self._numbers

    def complete(self, number: int, size: int) -> None:
        """Record the answer to a request. Raises ValueError if it is not what was sent. size: of its payload, bytes."""
        now = time.perf_counter()
        latency_s = now - self._sent.pop(number)
        if size != self.cell.size:
            raise ValueError(f"request {number}: {size} bytes came back of {self.cell.size}")
        self._answered += 1
        if self._ended:
            return
        if not self._began:
            if self._answered >= self.cell.in_flight + self.plan.least // 10:
                self._processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
                self._cpu_before, self._began = self._cpu(), time.perf_counter()
            return
        self._latencies_s.append(latency_s)
        window_s, count = now - self._began, len(self._latencies_s)
        enough = window_s >= self.plan.window_s and count >= max(self.plan.least, self.cell.in_flight)
        if enough or window_s >= self.plan.longest_s:
            self._cpu_after, self._ended = self._cpu(), now

    @contextmanager
    def idle(self) -> Iterator[float]:
        """Surround a pause without requests. Yields how long it is to last, in seconds."""
        before, began = sum(self._cpu()), time.perf_counter()
        yield self.plan.idle_s
        self._idle_cpu = (sum(self._cpu()) - before) / (time.perf_counter() - began)

    @property
    def sample(self) -> Sample:
        """What was measured, after the load."""
        count = len(self._latencies_s)
        parent_s, others_s = (after - before for before, after in zip(self._cpu_before, self._cpu_after, strict=True))
        return Sample(
            p50_s=statistics.median(self._latencies_s),
            p99_s=sorted(self._latencies_s)[int(0.99 * (count - 1))],
            per_s=count / (self._ended - self._began),
            parent_cpu_s=parent_s / count,
            cpu_s=(parent_s + others_s) / count,
            idle_cpu=self._idle_cpu,
        )

    def _cpu(self) -> tuple[float, float]:
        """Return the CPU time of the parent, and of its descendants."""
        seconds = [sum(process.cpu_times()[:2]) for process in self._processes]
        return seconds[0], sum(seconds[1:])


def measure(contender: Contender, cell: Cell, plan: Plan) -> Sample | Failure:
    """Measure one load of a contender, in a process of its own."""
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_measure, args=(contender, cell, plan, there))
    process.start()
    there.close()
    try:
        result: Sample | Failure = here.recv()
    except EOFError:
        result = Failure("its process ended")
    process.join()
    return result


def _measure(contender: Contender, cell: Cell, plan: Plan, result: Connection) -> None:
    meter = Meter(cell, plan)
    try:
        contender.run(meter)
        result.send(meter.sample)
    except ImportError as error:
        result.send(Failure(f"not installed: {error.name}"))
    except Exception as error:  # noqa: BLE001 - one contender must not lose the others' figures
        result.send(Failure(f"{type(error).__name__}: {error}"))


@contextmanager
def running(stage: Callable[[Any, Any], None], ends: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Run a process for each pair of ends. Leaving the block kills them."""
    processes: list[ForkProcess] = [fork.Process(target=stage, args=pair) for pair in ends]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
