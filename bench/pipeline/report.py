"""The figures of all contenders as tables, and the bounds that ours must meet."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from rich.table import Table

from bench.pipeline.load import Cell, Failure, Sample

ALONE, BUSY, FULL = 1, 64, 10_000
LATENCY_S, LATENCY_RATIO, PER_S, FLAT = 0.0012, 3.0, 4000.0, 1.15
LARGE = 1024 * 1024


class Bound(NamedTuple):
    """A bound that ours must meet."""

    name: str
    measured: float
    accepted: str
    met: bool


class Figures:
    """The samples of a run, by contender and load."""

    def __init__(self) -> None:
        self._samples: defaultdict[tuple[str, Cell], list[Sample]] = defaultdict(list)
        self.failures: dict[tuple[str, Cell], str] = {}

    def add(self, name: str, cell: Cell, result: Sample | Failure) -> None:
        """Add one result."""
        if isinstance(result, Failure):
            self.failures[name, cell] = result.reason
        else:
            self._samples[name, cell].append(result)

    def median(self, name: str, cell: Cell) -> Sample | None:
        """Return the median of each figure over the repetitions; None if there is none."""
        samples = self._samples.get((name, cell))
        return Sample(*map(statistics.median, zip(*samples, strict=True))) if samples else None

    def medians(self, cell: Cell) -> dict[str, Sample]:
        """Return the medians of one load by contender."""
        names = {name for name, of in self._samples if of == cell}
        return {name: sample for name in sorted(names) if (sample := self.median(name, cell)) is not None}

    def as_json(self) -> dict[str, Any]:
        """Return all samples and failures as plain data."""
        samples = [
            {"name": name, **cell._asdict(), "samples": [sample._asdict() for sample in samples]}
            for (name, cell), samples in self._samples.items()
        ]
        failures = [{"name": name, **cell._asdict(), "reason": why} for (name, cell), why in self.failures.items()]
        return {"samples": samples, "failures": failures}


COLUMNS: tuple[tuple[str, Callable[[Sample], str]], ...] = (
    ("p50", lambda sample: f"{sample.p50_s * 1e3:.2f} ms"),
    ("p99", lambda sample: f"{sample.p99_s * 1e3:.2f} ms"),
    ("requests/s", lambda sample: f"{sample.per_s:,.0f}"),
    ("CPU of the parent", lambda sample: f"{sample.parent_cpu_s * 1e6:,.0f} µs"),
    ("CPU of all", lambda sample: f"{sample.cpu_s * 1e6:,.0f} µs"),
    ("idle CPU", lambda sample: f"{sample.idle_cpu:.1%}"),
)


def table(figures: Figures, size: int, names: list[str], in_flight: list[int], reference: str) -> Table:
    """Return the table of one payload size. reference: the contender that the ratios of p50 and rate refer to."""
    drawn = Table(title=f"payload of {size:,} bytes", title_justify="left")
    headings = ("in flight", "", *(heading for heading, _ in COLUMNS), "p50, ratio", "rate, ratio")
    for number, column in enumerate(headings):
        drawn.add_column(column, justify="left" if number == 1 else "right")
    for count in in_flight:
        cell = Cell(count, size)
        base = figures.median(reference, cell)
        for name in names:
            sample = figures.median(name, cell)
            if sample is None:
                drawn.add_row(f"{count:,}", name, figures.failures.get((name, cell), ""))
                continue
            ratios = [f"{sample.p50_s / base.p50_s:.2f}", f"{sample.per_s / base.per_s:.2f}"] if base else []
            drawn.add_row(f"{count:,}", name, *(text(sample) for _, text in COLUMNS), *ratios)
        drawn.add_section()
    return drawn


def bounds(
    figures: Figures, sizes: list[int], in_flight: list[int], *, ours: str, peers: Collection[str], reference: str
) -> Iterator[Bound]:
    """Yield the bounds whose loads were measured. peers: the contenders that are not ours; ``reference`` is one."""
    small = min(sizes)
    alone, base = figures.median(ours, Cell(ALONE, small)), figures.median(reference, Cell(ALONE, small))
    busy, full = figures.median(ours, Cell(BUSY, small)), figures.median(ours, Cell(FULL, small))
    if alone:
        yield Bound("p50 of a request alone, ms", alone.p50_s * 1e3, "<= 1.2", alone.p50_s <= LATENCY_S)
    if alone and base:
        ratio = alone.p50_s / base.p50_s
        yield Bound(f"p50 of a request alone / {reference}", ratio, "<= 3", ratio <= LATENCY_RATIO)
    if busy:
        yield Bound("requests/s, 64 in flight", busy.per_s, ">= 4000", busy.per_s >= PER_S)
    if busy and full:
        ratio = busy.per_s / full.per_s
        yield Bound("time per request, 10,000 in flight / 64", ratio, "0.87 to 1.15", 1 / FLAT <= ratio <= FLAT)
    for cell in (Cell(count, size) for size in sizes if size >= LARGE for count in in_flight):
        medians = figures.medians(cell)
        others = [sample.per_s for name, sample in medians.items() if name in peers]
        if ours in medians and others:
            ratio = medians[ours].per_s / max(others)
            yield Bound(f"rate / best peer, {cell.in_flight:,} in flight, 1 MiB", ratio, ">= 1", ratio >= 1)
