"""Counts, percentiles and tables.

Rules
1. A row is a fault at a load. A violation is counted at the last fault before it, in its own run.
2. N counts all faults. Times are those of faults that no other fault disturbed (see ``driver``).
3. For a count of zero in N, the true rate is below 3/N with 95% confidence (the rule of three).
4. A percentile is a measured value: the smallest one that at least p percent do not exceed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from omni_actors.stress.judge import Kind

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
    faults: int = 0
    timings: list[Timing] = field(default_factory=list)
    violations: Counter[Kind] = field(default_factory=Counter)


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
    """By outcome."""

    @property
    def faults(self) -> int:
        return sum(row.faults for row in self.rows.values())

    @property
    def violations(self) -> int:
        return sum(row.violations.total() for row in self.rows.values())

    def row(self, fault: str, load: str) -> Row:
        return self.rows.setdefault((fault, load), Row())

    def add(self, other: Tally) -> None:
        for (fault, load), row in other.rows.items():
            mine = self.row(fault, load)
            mine.faults += row.faults
            mine.timings += row.timings
            mine.violations.update(row.violations)
        self.runs += other.runs
        self.requests.update(other.requests)

    def as_json(self) -> dict[str, Any]:
        """The figures, with all times in seconds, from which a reader can compute other percentiles."""
        return {
            "runs": self.runs,
            "faults": self.faults,
            "requests": dict(self.requests),
            "violations": self.violations,
            "bound": 3 / self.faults if self.faults else None,
            "rows": [
                {
                    "fault": fault,
                    "load": load,
                    "faults": row.faults,
                    **{kind: row.violations[kind] for kind in KINDS},
                    "bound": 3 / row.faults if row.faults else None,
                    **{name: _quantiles(values) for name, values in _times(row).items()},
                    "samples": _times(row),
                }
                for (fault, load), row in sorted(self.rows.items())
            ],
        }

    def as_markdown(self) -> str:
        header = ["fault", "load", "N", *KINDS, "detected p50 / p99", "recovered p50 / p99", "… less model load", "3/N"]
        lines = ["| " + " | ".join(header) + " |", "|" + "---|" * 2 + "---:|" * (len(header) - 2)]
        everything = Row()
        for (fault, load), row in sorted(self.rows.items()):
            lines.append(_line(fault, load, row))
            everything.faults += row.faults
            everything.timings += row.timings
            everything.violations.update(row.violations)
        lines.append(_line("**all**", "", everything, timed=False))
        return "\n".join(lines)


def _times(row: Row) -> dict[str, list[float]]:
    names = ("detected_s", "ready_s", "recovered_s", "recovered_less_load_s")
    return {name: [value for timing in row.timings if (value := getattr(timing, name)) is not None] for name in names}


def _quantiles(values: Sequence[float]) -> dict[str, float | int | None]:
    return {"n": len(values), "p50": percentile(values, 50), "p99": percentile(values, 99)}


def _line(fault: str, load: str, row: Row, *, timed: bool = True) -> str:
    times = _times(row)
    columns = ("detected_s", "recovered_s", "recovered_less_load_s")
    shown = [_pair(times[name]) if timed else "" for name in columns]
    counts = [str(row.violations[kind]) for kind in KINDS]
    bound = f"{3 / row.faults:.2g}" if row.faults else "–"
    return "| " + " | ".join([fault, load, str(row.faults), *counts, *shown, bound]) + " |"


def _pair(values: Sequence[float]) -> str:
    p50, p99 = percentile(values, 50), percentile(values, 99)
    return "–" if p50 is None or p99 is None else f"{duration(p50)} / {duration(p99)}"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f} ms"
