"""A simulated stage with an ``AutoscaleRule``: requests arrive, queue, are served in order, and leave; replicas load.

As in the system, one change runs at a time: the next decision is carried out when the replicas of the last one serve.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from omni_actors.config import Autoscale
from omni_actors.system.autoscale_rule import INTERVAL_S, AutoscaleRule, Demand


@dataclass
class Run:
    """What happened. Times are seconds."""

    changes: list[tuple[float, int]] = field(default_factory=list)
    """When the number that is wanted changed, and to what."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When each request arrived, and how long it queued."""

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
    queue, serving = deque[float](), list[tuple[float, float]]()
    """The arrival times of queued requests, and the ends and arrival times of those in service."""
    coming, arrived, ready, wanted, serves_at = deque(sorted(arrivals)), 0, replicas, replicas, 0.0
    for tick in range(1, round(until / INTERVAL_S) + 1):
        now = tick * INTERVAL_S
        while True:  # every event up to now, in order
            ended, arrival = serving[0][0] if serving else until, coming[0] if coming else until
            at = min(ended, arrival)
            if at >= now:
                break
            if ended <= arrival:
                heapq.heappop(serving)
            else:
                arrived += 1
                queue.append(coming.popleft())
            _serve(run, queue, serving, ready * concurrency, at, service_s)
        if ready != wanted and now >= serves_at:
            ready = wanted
            _serve(run, queue, serving, ready * concurrency, now, service_s)
        since = sorted([began for _, began in serving] + [*queue])
        decided = rule.decide(Demand(now, arrived, since, wanted, ready))
        if decided != wanted and ready == wanted:
            run.changes.append((now, decided))
            serves_at, wanted = now + load_s * (decided > wanted), decided
    return run


def _serve(
    run: Run,
    queue: deque[float],
    serving: list[tuple[float, float]],
    places: int,
    now: float,
    service_s: Callable[[], float],
) -> None:
    while queue and len(serving) < places:
        began = queue.popleft()
        run.waits.append((began, now - began))
        heapq.heappush(serving, (now + service_s(), began))
