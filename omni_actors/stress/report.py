"""Counts, percentiles and tables.

Rules
1. A row is a fault at a load. A violation is counted at the last fault before it, in its own run. A completed request
   that was resumed or repeated is counted at the last fault before the death, and so is a standby that took over.
2. N counts all faults. Times are those of faults that no other fault disturbed (see ``driver``).
3. For a count of zero in N, the true rate is below 3/N with 95% confidence (the rule of three).
4. A percentile is a measured value: the smallest one that at least p percent do not exceed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from omni_actors.stress.judge import Kind, Violation

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(slots=True)
class Timing:
    """The times of one fault, in seconds since its injection. None: not observed, or overtaken by another fault.

    detected: the system reported the death. ready: a worker of the stage serves again. recovered: a request that needs
    the stage was answered. load: how long the new worker's engine loaded; part of ready.
    """

    detected_s: float | None = None
    ready_s: float | None = None
    recovered_s: float | None = None
    load_s: float | None = None

    @property
    def recovered_less_load_s(self) -> float | None:
        return None if self.recovered_s is None else max(0.0, self.recovered_s - (self.load_s or 0.0))


@dataclass
class Row:
    """The faults of one kind at one load, and the violations after them.

    resumed, repeated: completed requests of which a stage started again (see ``client``): a resumable one, another one.
    promotions: standbys that took over after a death (see ``health_watch``).
    """

    faults: int = 0
    timings: list[Timing] = field(default_factory=list)
    violations: Counter[Kind] = field(default_factory=Counter)
    resumed: int = 0
    repeated: int = 0
    promotions: int = 0

    @property
    def bound(self) -> float | None:
        """Upper bound of the true rate where no violation was found: 3 / faults; None without faults."""
        return 3 / self.faults if self.faults else None

    def add(self, other: Row) -> None:
        self.faults += other.faults
        self.timings += other.timings
        self.violations.update(other.violations)
        self.resumed += other.resumed
        self.repeated += other.repeated
        self.promotions += other.promotions

    def times(self) -> dict[str, list[float]]:
        """The times that were observed, in seconds, by name."""
        names = ("detected_s", "ready_s", "recovered_s", "recovered_less_load_s")
        values = {name: [getattr(timing, name) for timing in self.timings] for name in names}
        return {name: [value for value in some if value is not None] for name, some in values.items()}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that at least ``percent`` of all do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else None


@dataclass
class Tally:
    """Everything that a command counted."""

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    runs: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """The number of requests, by outcome."""
    found: list[Violation] = field(default_factory=list)
    """All violations; the rows count them."""

    @property
    def total(self) -> Row:
        """The sum of all rows."""
        total = Row()
        for row in self.rows.values():
            total.add(row)
        return total

    @property
    def faults(self) -> int:
        return self.total.faults

    def row(self, fault: str, load: str) -> Row:
        return self.rows.setdefault((fault, load), Row())

    def violated(self, fault: str, load: str, violation: Violation) -> None:
        """Count a violation at a fault."""
        self.row(fault, load).violations[violation.kind] += 1
        self.found.append(violation)

    def add(self, other: Tally) -> None:
        for (fault, load), row in other.rows.items():
            self.row(fault, load).add(row)
        self.runs += other.runs
        self.requests.update(other.requests)
        self.found += other.found

    def as_json(self) -> dict[str, Any]:
        """The figures, with all times in seconds, from which a reader can compute other percentiles."""
        return {
            "runs": self.runs,
            "faults": self.faults,
            "requests": dict(self.requests),
            "violations": len(self.found),
            "bound": self.total.bound,
            "rows": [
                {
                    "fault": fault,
                    "load": load,
                    "faults": row.faults,
                    **{kind: row.violations[kind] for kind in KINDS},
                    "resumed": row.resumed,
                    "repeated": row.repeated,
                    "promotions": row.promotions,
                    "bound": row.bound,
                    **{name: _quantiles(values) for name, values in row.times().items()},
                    "samples": row.times(),
                }
                for (fault, load), row in sorted(self.rows.items())
            ],
        }

    def as_markdown(self) -> str:
        times = ("detected p50 / p99", "recovered p50 / p99", "… less model load")
        header = ("fault", "load", "N", *KINDS, "resumed", "repeated", "promotions", *times, "3/N")
        rows = [(fault, load, *_counts(row, row.times())) for (fault, load), row in sorted(self.rows.items())]
        return markdown_table(header, [*rows, ("**all**", "", *_counts(self.total, None))], left=2)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table. left: how many columns are aligned to the left; the others contain numbers."""
    rule = "|" + "---|" * left + "---:|" * (len(header) - left)
    first, *others = ("| " + " | ".join(cells) + " |" for cells in (header, *rows))
    return "\n".join([first, rule, *others])


def _counts(row: Row, times: Mapping[str, Sequence[float]] | None) -> list[str]:
    """The cells of a row after its names. times: None leaves the cells of the times empty."""
    columns = ("detected_s", "recovered_s", "recovered_less_load_s")
    shown = [_pair(times[name]) if times else "" for name in columns]
    violations = [str(row.violations[kind]) for kind in KINDS]
    continued = [str(row.resumed), str(row.repeated), str(row.promotions)]
    return [str(row.faults), *violations, *continued, *shown, "–" if row.bound is None else f"{row.bound:.2g}"]


def _quantiles(values: Sequence[float]) -> dict[str, float | int | None]:
    return {"n": len(values), "p50": percentile(values, 50), "p99": percentile(values, 99)}


def _pair(values: Sequence[float]) -> str:
    p50, p99 = percentile(values, 50), percentile(values, 99)
    return "–" if p50 is None or p99 is None else f"{_duration(p50)} / {_duration(p99)}"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f} ms"
