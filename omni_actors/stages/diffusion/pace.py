"""How fast an engine makes denoising steps, and what follows from that: its figures for ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omni_actors.stages.base import NEXT_END

_WEIGHT = 0.2
"""The weight of the latest step in the mean of recent steps."""


class Pace:
    """The mean time of an engine's recent steps."""

    def __init__(self) -> None:
        self._step_seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Surround a step."""
        started = time.perf_counter()
        yield
        took = time.perf_counter() - started
        self._step_seconds += (took - self._step_seconds) * (_WEIGHT if self._step_seconds else 1.0)

    def gauges(self, steps_left: Sequence[int], *, taking_part: int, waiting: int) -> dict[str, float]:
        """Return how many requests take part in a step and wait, the steps that are left, and the mean time of a step.

        steps_left: of each request that takes turns or is paused.
        taking_part: how many of them take part in a step.
        waiting: how many other requests there are.
        """
        figures = {
            "running": float(taking_part),
            "waiting": float(waiting),
            "steps_left": float(sum(steps_left)),
            "step_seconds": self._step_seconds,
        }
        if taking_part and self._step_seconds:
            steps = min(steps_left) * len(steps_left) / taking_part
            figures[NEXT_END] = steps * self._step_seconds
        return figures
