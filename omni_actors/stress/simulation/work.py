"""The steps that engines with checkpoints have made in a schedule. After each death, at most one is made twice."""

from __future__ import annotations

from collections import Counter


class Work:
    """Counts the starts of each request in each stage, and how often each of its steps was made."""

    def __init__(self) -> None:
        self._starts: Counter[tuple[str, int]] = Counter()
        self._steps: Counter[tuple[str, int, int]] = Counter()

    def clear(self) -> None:
        """Forget everything, before a schedule."""
        self._starts.clear()
        self._steps.clear()

    def started(self, stage: str, request: int) -> None:
        self._starts[stage, request] += 1

    def made(self, stage: str, request: int, step: int) -> None:
        self._steps[stage, request, step] += 1

    def repeated(self) -> list[str]:
        """Return, in words, each request of which more steps were repeated than it was started again."""
        repeated: Counter[tuple[str, int]] = Counter()
        for (stage, request, _), times in self._steps.items():
            repeated[stage, request] += times - 1
        return [
            f"{stage!r} repeated {steps} steps of request {request}, with {self._starts[stage, request]} starts"
            for (stage, request), steps in repeated.items()
            if steps >= self._starts[stage, request]
        ]


WORK = Work()
"""The work of the schedule that runs: engines are made by their import path."""
