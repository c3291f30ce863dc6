"""`python -m bench.nixl`: a link whose large records NIXL carries, beside a link of TCP alone, both on this machine.

Each node is a process with a ring and a pump; a link joins them over the loopback address. UCX_TLS says what UCX uses.

Rule 1: one run measures both. Rounds alternate between them, and a figure is the median of the rounds.
Rule 2: a stream's clock runs from before the first send until the far side has said that it has the last record.
Rule 3: CPU time is that of both nodes, their NIXL processes included.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import click
import psutil
from rich.console import Console
from rich.table import Table

from omni_actors.cluster.nixl_links import StagingLink
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.transfers import PACKAGE, Transfers
from ringbuf import Ring

fork = multiprocessing.get_context("fork")
SIZES = (1 << 20, 8 << 20, 32 << 20)
RING_BYTES = 128 << 20
SECRET = bytes(range(32))
WATCHDOG_S = 60.0


@contextmanager
def pump(nixl: bool) -> Iterator[Pump]:
    made = Pump(SECRET, "127.0.0.1", _fail, transfers=Transfers() if nixl else None)
    try:
        yield made
    finally:
        made.stop()


def _fail(link_id: int, why: str) -> None:
    print(f"link {link_id}: {why}", file=sys.stderr)


def far_side(near: Connection, nixl: bool) -> None:
    """Take records, and say when as many have arrived as the near side announces."""
    with pump(nixl) as far, Ring.create(RING_BYTES) as ring:
        consumer = ring.claim_consumer()
        far.receive(1, ring.claim_producer())
        near.send(far.address)
        while count := near.recv():
            for _ in range(count):
                consumer.recv(WATCHDOG_S).release()
            near.send(far.statistics()[1].by_reference)
        far.close(1)


class NearSide:
    """A node of this process, and a link to the far one. far: the connection to its process."""

    def __init__(self, far: Connection, ring: Ring, near: Pump) -> None:
        self._far, self._producer = far, ring.claim_producer()
        near.send(1, ring.claim_consumer(), far.recv())
        self.stream(1, 1)
        link = near._links[1]
        while isinstance(link, StagingLink) and not link._is_loaded:
            time.sleep(0.01)

    def stream(self, size: int, count: int) -> tuple[float, int]:
        """Send records. Returns the seconds that it took, and how many NIXL has carried so far."""
        message, begin = memoryview(bytearray(size)), time.monotonic()
        self._far.send(count)
        for _ in range(count):
            self._producer.send(message, timeout=WATCHDOG_S)
        carried: int = self._far.recv()
        return time.monotonic() - begin, carried


def cpu_s() -> float:
    """Return the CPU time of this process and its descendants."""
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(nixl: bool, count_bytes: int) -> dict[int, tuple[float, float]]:
    """Return bytes per second and CPU seconds per GB for each size."""
    figures = {}
    far, there = fork.Pipe()
    process = fork.Process(target=far_side, args=(there, nixl))
    process.start()
    with pump(nixl) as near, Ring.create(RING_BYTES) as ring:
        side = NearSide(far, ring, near)
        for size in SIZES:
            side.stream(size, 2)
            count = max(4, count_bytes // size)
            before = cpu_s()
            seconds, carried = side.stream(size, count)
            assert bool(carried) == nixl
            figures[size] = count * size / seconds, (cpu_s() - before) / (count * size / 1e9)
        near.close(1)
        far.send(0)
        process.join(WATCHDOG_S)
    return figures


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--megabytes", default=256, show_default=True, help="How much each stream carries.")
def main(rounds: int, megabytes: int) -> None:
    """Measure a link with NIXL beside one with TCP alone."""
    load = os.getloadavg()[0]
    measured = [{nixl: measure(nixl, megabytes << 20) for nixl in (False, True)} for _ in range(rounds)]
    table = Table(
        "record", "TCP", "NIXL", "NIXL / TCP", title=f"medians of {rounds} rounds; {PACKAGE}; load {load:.1f}"
    )
    for size in SIZES:
        cells = [
            f"{statistics.median(each[nixl][size][0] for each in measured) / 1e6:.0f} MB/s, "
            f"{statistics.median(each[nixl][size][1] for each in measured):.2f} s/GB"
            for nixl in (False, True)
        ]
        ratio = statistics.median(each[True][size][0] / each[False][size][0] for each in measured)
        table.add_row(f"{size >> 20} MiB", *cells, f"{ratio:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
