"""What follows from the death of a worker: a pure rule, after Erlang/OTP's supervisors.

Rules
1. ``type`` says which deaths are followed by a restart: all (permanent), all but exit code 0 (transient), none
   (temporary). What is not restarted has failed: its stage is given up.
2. ``strategy`` says who is restarted with the dead one: nobody (one_for_one), all workers of the stages below it
   (rest_for_one), all workers (one_for_all). A temporary one among them is stopped, and has failed.
3. More than ``intensity`` restarts within ``period_s`` and it is given up. Failed starts count, and are not forgotten
   while no start succeeds, however long each takes. Restarts that another's death has caused do not count, and of the
   deaths that one request causes only the first one does.
4. A replica that was given up by rule 3 is tried again after ``retry_s``, with one worker. If that one gives it up too,
   the time until the next try doubles. A worker that served for longer than ``period_s`` resets that time.
5. No clock here: time is an argument, in seconds.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from omni_actors.errors import WorkerExit


@dataclass(frozen=True)
class RestartPolicy:
    """More than ``intensity`` restarts within ``period_s`` give the stage up; delays double from ``backoff_s``."""

    intensity: int
    period_s: float
    backoff_s: float
    backoff_max_s: float
    type: Literal["permanent", "transient", "temporary"] = "permanent"
    strategy: Literal["one_for_one", "rest_for_one", "one_for_all"] = "one_for_one"
    retry_s: float = 0.0
    """0: a replica that was given up is not tried again."""
    retry_max_s: float = 600.0

    def retry_delay_s(self, tries: int) -> float | None:
        """Seconds until a replica that was given up is tried again, after ``tries`` tries that failed; None: never."""
        return min(self.retry_max_s, self.retry_s * 2.0 ** min(tries, 64)) if self.retry_s else None

    def delay_s(self, recent: int) -> float:
        """Before the restart that follows ``recent`` others: exponential, with jitter so that replicas spread."""
        bounded = min(self.backoff_max_s, self.backoff_s * 2.0 ** min(recent, 64))
        return bounded * random.uniform(0.5, 1.0)

    def why_never(self, exit: WorkerExit) -> str | None:
        """Why this death is not followed by a restart whatever the intensity; None where it is."""
        if self.type == "temporary" or (self.type == "transient" and exit.exit_code == 0):
            return f"{exit}; it is {self.type}"
        return None


class RecentRestarts:
    """Those of one replica that count."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._times: collections.deque[float] = collections.deque()

    def count(self, now: float, *, served: bool) -> int:
        """served: whether the worker that has just died had been ready."""
        while served and self._times and self._times[0] < now - self._period_s:
            self._times.popleft()
        return len(self._times)

    def add(self, now: float) -> None:
        self._times.append(now)


def downstream_stages(stage: str, inputs: Mapping[str, Iterable[str]]) -> set[str]:
    """All that take what ``stage`` gives, directly or through others. inputs: by stage, in topological order."""
    reached = {stage}
    for name, sources in inputs.items():
        if reached & set(sources):
            reached.add(name)
    return reached - {stage}
