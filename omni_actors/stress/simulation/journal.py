"""What one simulated schedule did and found: a log, counts, violations."""

from __future__ import annotations

import traceback

import trio

from omni_actors.stress import judge
from omni_actors.stress.report import Row, Tally

LOAD = "simulated"


class Journal:
    """Collects log lines, injected faults and violations of one schedule, that of ``seed``."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.log: list[str] = []
        self.tally = Tally(runs=1)
        self.steps = 0
        """Steps that trio's tasks have taken."""
        self._fault = "(none)"

    def note(self, line: str) -> None:
        """Add a line to the log, with the step count and the virtual time."""
        now = trio.current_time() if trio.lowlevel.in_trio_run() else 0.0
        self.log.append(f"{self.steps:6} {now:9.3f}  {line}")

    def injected(self, fault: str) -> None:
        """Count a fault. Later violations are counted at this one."""
        self._fault = fault
        self.row.faults += 1

    @property
    def row(self) -> Row:
        """The row of the latest fault."""
        return self.tally.row(self._fault, LOAD)

    def violated(self, kind: judge.Kind, what: str) -> None:
        self.tally.violated(self._fault, LOAD, judge.Violation(kind, what))
        self.note(f"VIOLATED: {kind}: {what}")

    def unexpected(self, where: str, error: BaseException) -> None:
        """Record an exception that no code handles."""
        self.log += traceback.format_exception(error)
        self.violated("disturbed", f"{where} raised {error!r}")
