"""The bounds that a benchmark has to meet, and their table. Without anything measured, a value is infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from omni_actors.stress.report import percentile


@dataclass
class Bound:
    """One bound. most: of ``found``."""

    what: str
    found: float
    most: float
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.found <= self.most


def quantile(values: Iterable[float], share: int) -> float:
    """Return a percentile of the finite values; infinity if there are none."""
    found = percentile([value for value in values if math.isfinite(value)], share)
    return math.inf if found is None else found


def finite(value: Any) -> Any:
    """Return a value of JSON in which null stands for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_bounds(console: Console, bounds: Sequence[Bound]) -> None:
    """Print whether each bound is met."""
    table = Table("bound", "found", "most", "")
    for each in bounds:
        values = [
            "none" if math.isinf(value) else f"{round(value, 2):g} {each.unit}".strip()
            for value in (each.found, each.most)
        ]
        table.add_row(each.what, *values, "[green]met" if each.is_met else "[red]missed")
    console.print(table)
