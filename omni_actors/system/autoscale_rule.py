"""How many replicas a stage is to have at its present load: a pure rule. Time and facts are arguments.

A replica serves ``concurrency`` requests at a time; further ones queue. The *offered load* is the number of requests
that would be in service if there were replicas enough: arrivals per second × seconds of service (Little's law). It does
not depend on the number of replicas. Queue time does: it tells when there are too few, but not how many are too many.

Rules
1. Up: the oldest queued request has waited for ``queue_time_s``. The number becomes what the offered load needs at
   ``TARGET`` of the capacity. If all these replicas serve and the queue still does not get shorter within
   ``PATIENCE_S``, one more is added. A stage without replicas gets one with its first request.
2. Down: the number that the load needs at ``SPARE`` of the capacity, which is less than ``TARGET``, so that the load
   may grow somewhat before rule 1 applies. The highest such number within the last ``down_after_s`` counts, as with the
   stabilization window of Kubernetes' Horizontal Pod Autoscaler: a short lull removes no replica.
3. A number of replicas at which requests queued too long is remembered with the load of that time. It is tried again
   only at less than ``RETRY`` of this load, because at the same load a replica would be added again.
4. The number is always within ``min`` and ``max``, and goes to 0 only without any request within ``down_after_s``.
5. Arrivals are counted over ``LOAD_S``, or ``LOAD_SERVICES`` times the seconds of service, if that is longer, but
   not longer than ``down_after_s``. So replicas that no request needs are removed after twice that time. Rule 1 also
   looks at the last seconds: a load that has just begun shows as more arrivals than chance explains (``CHANCE``
   standard deviations of a Poisson distribution).
6. Time without service, such as a pause, is no measure of the load (``hold``): arrivals, service and queueing are
   measured anew afterwards, and rule 2 waits for ``down_after_s`` from then on. Seconds of service remain known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from omni_actors.config import Autoscale

INTERVAL_S = 0.5
"""A decision is made so often."""
LOAD_S, LOAD_SERVICES = 60.0, 20.0
CHANCE = 4.0
TARGET, SPARE, RETRY = 0.8, 0.6, 0.8
RECENT_S, PATIENCE_S = 3.0, 10.0


@dataclass(frozen=True)
class Demand:
    """What is known of a stage at one time. Times are seconds of one clock.

    now: the time.
    arrived: requests for the stage so far.
    since: the arrival times of those that the stage has not finished, the earliest first.
    wanted: the number of replicas that it is to have.
    ready: the number of replicas that serve.
    """

    now: float
    arrived: int
    since: Sequence[float]
    wanted: int
    ready: int


@dataclass(frozen=True)
class _Sample:
    """A point of the past. busy_s: seconds of service that all requests together have had."""

    at: float
    arrived: int
    done: int
    busy_s: float


class AutoscaleRule:
    """The rule for one stage. ``decide`` is called at intervals.

    concurrency: how many requests one replica serves at a time.
    """

    def __init__(self, settings: Autoscale, concurrency: int) -> None:
        self._settings, self._concurrency = settings, concurrency
        self._samples = deque[_Sample]()
        """Those of the seconds over which arrivals are counted, and the one before."""
        self._service_s: float | None = None
        """Seconds of service of one request, as last measured."""
        self._needed = deque[tuple[float, int]]()
        """The numbers that the load needed by rule 2, with their times: decreasing, so that the first one counts."""
        self._began = math.inf
        """When the present measurement began: with the first decision, or at the end of the last hold."""
        self._held_until = -math.inf
        self._queued_at: dict[int, float] = {}
        """The load at which so many replicas did not suffice."""
        self._stalled: tuple[float, float] | None = None
        """Since when all replicas have served and requests queued too long, and how long they queued then."""

    def decide(self, demand: Demand) -> int:
        """Return how many replicas the stage is to have."""
        self._began = min(self._began, demand.now)
        self._sample(demand)
        load, queue_s = self._load(demand), self._queue_s(demand)
        needed = self._enough(load, demand)
        self._remember(demand.now, needed)
        while self._needed[0][0] < demand.now - self._settings.down_after_s:
            self._needed.popleft()
        wanted = demand.wanted
        if wanted == 0 and demand.since:
            wanted = self._for(self._load_now(demand))
        elif queue_s > self._settings.queue_time_s:
            wanted = self._more(demand, load, queue_s)
        else:
            self._stalled = None
            if demand.now - self._began >= self._settings.down_after_s:
                wanted = min(wanted, self._needed[0][1])
        wanted = min(max(wanted, self._settings.min), self._settings.max)
        if wanted > demand.wanted:
            self._remember(demand.now, wanted)
        return wanted

    def hold(self, now: float) -> None:
        """Note that the stage does not serve. Call it at intervals in place of ``decide``."""
        self._began = self._held_until = now
        self._samples.clear()
        self._stalled = None

    def _remember(self, now: float, needed: int) -> None:
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now, needed))

    # measuring

    def _sample(self, demand: Demand) -> None:
        done, busy = demand.arrived - len(demand.since), 0.0
        if self._samples:
            last = self._samples[-1]
            serving = min(len(demand.since), demand.ready * self._concurrency)
            busy = last.busy_s + serving * (demand.now - last.at)
        self._samples.append(_Sample(demand.now, demand.arrived, done, busy))
        while len(self._samples) > 2 and self._samples[1].at <= demand.now - self._horizon_s():
            self._samples.popleft()
        first, newest = self._samples[0], self._samples[-1]
        if newest.done > first.done and newest.busy_s > first.busy_s:
            half_done = min(len(demand.since), demand.ready * self._concurrency) / 2  # those in service, on average
            self._service_s = (newest.busy_s - first.busy_s) / (newest.done - first.done + half_done)

    def _horizon_s(self) -> float:
        """Return over how many seconds arrivals are counted."""
        return min(self._settings.down_after_s, max(LOAD_S, LOAD_SERVICES * (self._service_s or 0.0)))

    def _load(self, demand: Demand) -> float:
        """Return the offered load. While no service was measured, what is there is to fit, without room to spare."""
        if self._service_s is None:
            return len(demand.since) * TARGET
        return self._rate() * self._service_s

    def _rate(self) -> float:
        """Return the arrivals per second."""
        first, newest = self._samples[0], self._samples[-1]
        return (newest.arrived - first.arrived) / max(INTERVAL_S, newest.at - first.at)

    def _load_now(self, demand: Demand) -> float:
        """Return the offered load, or that of the last seconds if chance does not explain their arrivals."""
        load, service_s = self._load(demand), self._service_s
        if service_s is None:
            return load
        newest, usual = self._samples[-1], self._rate()
        for first in reversed(self._samples):
            seconds = newest.at - first.at
            if seconds > max(RECENT_S, service_s):
                break
            recent, mean = newest.arrived - first.arrived, usual * seconds
            if seconds >= max(1.0, service_s / 2) and recent > mean + CHANCE * math.sqrt(mean) + 2:
                load = max(load, recent / seconds * service_s)
        return load

    def _queue_s(self, demand: Demand) -> float:
        """Return how long the oldest queued request has waited. Requests are served in the order of their arrival."""
        served = demand.ready * self._concurrency
        return demand.now - max(demand.since[served], self._held_until) if len(demand.since) > served else 0.0

    # the numbers

    def _for(self, load: float) -> int:
        return max(1, math.ceil(load / self._concurrency / TARGET))

    def _more(self, demand: Demand, load: float, queue_s: float) -> int:
        """Return the number by rule 1."""
        now, wanted = demand.now, demand.wanted
        if demand.ready < wanted:  # those that load count already
            self._stalled = None
            return max(wanted, self._for(self._load_now(demand)))
        self._queued_at[wanted] = min(load, self._queued_at.get(wanted, math.inf))
        enough = self._for(self._load_now(demand))
        if enough > wanted:
            self._stalled = None
            return enough
        if self._stalled is None:
            self._stalled = now, queue_s
        began, queued_s = self._stalled
        if now - began < PATIENCE_S:
            return wanted
        self._stalled = None
        return wanted + 1 if queue_s >= queued_s else wanted

    def _enough(self, load: float, demand: Demand) -> int:
        """Return the least number that serves the load and all present requests, by rules 2 and 3."""
        if not demand.since and self._samples[0].arrived == demand.arrived:
            return 0
        present = len(demand.since) / self._concurrency
        number = max(1, math.ceil(load / self._concurrency / SPARE), math.ceil(present))
        while number < demand.wanted and load >= RETRY * self._queued_at.get(number, math.inf):
            number += 1
        return number
