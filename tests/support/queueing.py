"""A simulated stage with an ``AutoscaleRule``: requests arrive, queue, are served in order, and leave; replicas load.

As in the system, the next decision is carried out when the new replicas of the last one serve. A removed replica first
ends its requests. Until then, it may be taken back.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from omni_actors.config import Autoscale
from omni_actors.system.autoscale_rule import INTERVAL_S, AutoscaleRule, Demand
from omni_actors.system.scale_rule import plan_change


@dataclass
class Run:
    """What happened. Times are seconds."""

    changes: list[tuple[float, int]] = field(default_factory=list)
    """When the number that is wanted changed, and to what."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When each request arrived, and how long it queued."""
    taken_back: int = 0
    """How often a replica was taken back while it drained."""

    def wanted(self, at: float) -> int:
        """Return the number that was wanted at a time."""
        return [number for time, number in self.changes if time <= at][-1]

    def changes_within(self, start: float, end: float) -> list[tuple[float, int]]:
        return [(time, number) for time, number in self.changes if start < time <= end]


def poisson(draw: random.Random, rate: float, start: float, end: float) -> Iterator[float]:
    """Yield the times of independent arrivals, ``rate`` a second on average."""
    at = start + draw.expovariate(rate) if rate else end
    while at < end:
        yield at
        at += draw.expovariate(rate)


def bursts(size: int, every_s: float, start: float, end: float) -> Iterator[float]:
    """Yield the times of bursts of ``size`` arrivals."""
    at = start
    while at < end:
        yield from [at] * size
        at += every_s


class _Stage:
    """Replicas with numbers, and the requests that they serve. concurrency: of one replica."""

    def __init__(self, run: Run, concurrency: int, service_s: Callable[[], float], replicas: int) -> None:
        self._run, self._concurrency, self._service_s = run, concurrency, service_s
        self.ready, self._draining = list(range(replicas)), list[int]()
        self.queue = deque[float]()
        """The arrival times of queued requests."""
        self.serving = list[tuple[float, float, int]]()
        """The ends, the arrival times and the replicas of those in service: a heap."""
        self._held = Counter[int]()
        """By replica, how many requests it serves."""

    @property
    def unfinished(self) -> list[float]:
        return sorted([arrival for _, arrival, _ in self.serving] + [*self.queue])

    def serve(self, now: float) -> None:
        """Place queued requests on the ready replicas with the fewest requests."""
        while self.queue and (free := [each for each in self.ready if self._held[each] < self._concurrency]):
            replica, arrival = min(free, key=lambda each: (self._held[each], each)), self.queue.popleft()
            self._run.waits.append((arrival, now - arrival))
            self._held[replica] += 1
            heapq.heappush(self.serving, (now + self._service_s(), arrival, replica))

    def end_one(self) -> None:
        """End the service that ends first."""
        *_, replica = heapq.heappop(self.serving)
        self._held[replica] -= 1
        self._draining = [each for each in self._draining if self._held[each]]

    def change(self, replicas: int) -> None:
        """Remove replicas, or take back those that drain. New ones come with ``add``."""
        order = sorted(self.ready, key=lambda each: (self._held[each], -each))
        change = plan_change(replicas, order, sorted(self._draining, key=lambda each: -self._held[each]))
        self.ready = [each for each in self.ready if each not in change.leaving] + [*change.returning]
        staying = [each for each in self._draining if each not in change.returning]
        self._draining = staying + [each for each in change.leaving if self._held[each]]
        self._run.taken_back += len(change.returning)

    def add(self, replicas: int) -> None:
        """Make new replicas ready until there are so many."""
        numbers = (each for each in itertools.count() if each not in (*self.ready, *self._draining))
        while len(self.ready) < replicas:
            self.ready.append(next(numbers))


def simulate(
    settings: Autoscale,
    arrivals: list[float],
    service_s: Callable[[], float],
    *,
    until: float,
    load_s: float = 20.0,
    concurrency: int = 1,
    replicas: int = 1,
) -> Run:
    """Run a stage until a time. load_s: the time that replicas take to load. replicas: their number at first."""
    rule, run = AutoscaleRule(settings, concurrency), Run([(0.0, replicas)])
    stage, coming, arrived, wanted = _Stage(run, concurrency, service_s, replicas), deque(sorted(arrivals)), 0, replicas
    loaded_at = 0.0
    for tick in range(1, round(until / INTERVAL_S) + 1):
        now = tick * INTERVAL_S
        while True:  # every event up to now, in order
            ended, arrival = stage.serving[0][0] if stage.serving else until, coming[0] if coming else until
            at = min(ended, arrival)
            if at >= now:
                break
            if ended <= arrival:
                stage.end_one()
            else:
                arrived += 1
                stage.queue.append(coming.popleft())
            stage.serve(at)
        if now >= loaded_at:
            stage.add(wanted)
        stage.serve(now)
        decided = rule.decide(Demand(now, arrived, stage.unfinished, wanted, len(stage.ready)))
        if decided != wanted and len(stage.ready) == wanted:
            run.changes.append((now, decided))
            stage.change(decided)
            stage.serve(now)
            loaded_at, wanted = now + load_s, decided
    return run
