"""How many replicas a stage is to have at its present load: a pure rule. Time and facts are arguments.

Terms
- A replica has ``concurrency`` places. A request with a place is *in service*. The other requests *queue*, in the order
  of their arrival.
- The *offered load* is the number of requests that would be in service if there were enough replicas. By Little's law,
  it is the arrivals per second times the seconds of service. It does not depend on the number of replicas.
- The *utilization* of some replicas is the offered load divided by their places.
- The *queue time* is how long the oldest queued request has waited. A long one shows that there are too few replicas. A
  short one does not show that there are too many.

Rules
1. Add. When the queue time exceeds ``queue_time_s``, the number becomes the least with a utilization of at most
   ``UP_UTILIZATION``. If so many replicas are ready already, and the queue time has not become shorter within
   ``STALL_S``, one more is added. A stage without replicas gets some with its first request.
2. Remove. Otherwise, the number becomes the least with a utilization of at most ``DOWN_UTILIZATION`` and a place for
   each request. ``DOWN_UTILIZATION`` is the lower one, so that the load may grow a little before rule 1 applies. The
   highest such number within the last ``down_after_s`` counts, so that a short lull removes no replica. Kubernetes'
   Horizontal Pod Autoscaler calls this time the stabilization window.
3. Do not add and remove by turns. When requests queue for too long although all replicas are ready, the rule remembers
   the number of replicas and the load, that of the last seconds if they are a burst (rule 5). Rule 2 returns to this
   number only when the load is less than ``RETRY_LOAD`` times the remembered one. At the same load, requests would
   queue again, and rule 1 would add a replica again. A short burst may not show in the load, so this is forgotten
   after ``FORGET_WINDOWS`` times ``down_after_s``.
4. The number is always within ``min`` and ``max``. It becomes 0 only if there was no request within ``down_after_s``.
5. Arrivals are counted over the last ``LOAD_S`` seconds, or over ``LOAD_SERVICES`` times the seconds of service if that
   is longer, but not over more than ``down_after_s``. So replicas that no request needs are removed after twice
   ``down_after_s`` at the latest. Rule 1 also looks at the last few seconds, because a load may just have begun. Their
   arrivals count if they exceed the expected number by more than ``BURST_DEVIATIONS`` standard deviations of a Poisson
   distribution.
6. While the stage does not serve, as in a pause, nothing is measured (``hold``). Afterwards, arrivals and queue times
   are measured anew, and rule 2 waits for ``down_after_s``. The seconds of service remain known.
7. A number that was raised by others counts as decided then: rule 2 keeps it for ``down_after_s``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from omni_actors.config import Autoscale

INTERVAL_S = 0.5
"""The time between two decisions."""
LOAD_S, LOAD_SERVICES = 60.0, 20.0
BURST_S, BURST_DEVIATIONS = 3.0, 4.0
UP_UTILIZATION, DOWN_UTILIZATION, RETRY_LOAD = 0.8, 0.6, 0.8
STALL_S = 10.0
FORGET_WINDOWS = 24.0
"""2 h by default: requests queue so seldom at most only because the rule tries a number again."""


@dataclass(frozen=True)
class Demand:
    """What is known of a stage at one time. Times are seconds of one clock.

    now: the time.
    arrived: the number of requests for the stage so far.
    unfinished: when the requests arrived that the stage has not finished, the earliest first.
    wanted: the number of replicas that the stage is to have.
    ready: the number of replicas that are ready.
    """

    now: float
    arrived: int
    unfinished: Sequence[float]
    wanted: int
    ready: int


@dataclass(frozen=True)
class _Sample:
    """Totals at one time. done: finished requests. service_s: the seconds that all requests have been in service."""

    at: float
    arrived: int
    done: int
    service_s: float


class AutoscaleRule:
    """The rule for one stage. ``decide`` is called at intervals.

    concurrency: how many requests one replica serves at a time.
    """

    def __init__(self, settings: Autoscale, concurrency: int) -> None:
        self._settings, self._concurrency = settings, concurrency
        self._samples = deque[_Sample]()
        """The samples of the time over which arrivals are counted, and the last one before."""
        self._service_s: float | None = None
        """The seconds of service of one request, as last measured."""
        self._down_numbers = deque[tuple[float, int]]()
        """Numbers by rule 2, each with its time. A number is dropped when a later one is as high, so they decrease."""
        self._measured_from = math.inf
        """When the present measurement began: at the first decision, or at the end of the last hold."""
        self._held_until = -math.inf
        self._overloads: dict[int, tuple[float, float]] = {}
        """Rule 3: for a number of replicas, when requests last queued for too long, and the least load at which."""
        self._known = math.inf
        """Rule 7: the higher one of the last number found and the last one decided."""
        self._stall: tuple[float, float] | None = None
        """Rule 1: since when all replicas are ready and requests queue for too long, and the queue time then."""

    @property
    def least(self) -> int:
        """The least number that it decides."""
        return self._settings.min

    def decide(self, demand: Demand) -> int:
        """Return how many replicas the stage is to have."""
        now, settings = demand.now, self._settings
        self._measured_from = min(self._measured_from, now)
        self._sample(demand)
        if demand.wanted > self._known:
            self._remember(now, demand.wanted)
        load, queue_s = self._load(demand), self._queue_s(demand)
        self._remember(now, self._down_number(load, demand))
        while self._down_numbers[0][0] < now - settings.down_after_s:
            self._down_numbers.popleft()
        wanted = demand.wanted
        if wanted == 0 and demand.unfinished:
            wanted = self._least(self._load_now(demand), UP_UTILIZATION)
        elif queue_s > settings.queue_time_s:
            wanted = self._up_number(demand, queue_s)
        else:
            self._stall = None
            if now - self._measured_from >= settings.down_after_s:
                wanted = min(wanted, self._down_numbers[0][1])
        wanted = min(max(wanted, settings.min), settings.max)
        if wanted > demand.wanted:
            self._remember(now, wanted)
        self._known = max(demand.wanted, wanted)
        return wanted

    def hold(self, now: float) -> None:
        """Note that the stage does not serve. Call it at intervals in place of ``decide``."""
        self._measured_from = self._held_until = now
        self._samples.clear()
        self._stall = None

    def _remember(self, now: float, number: int) -> None:
        """Add a number by rule 2, or one that rule 1 or others have just given, which is not to be undone at once."""
        while self._down_numbers and self._down_numbers[-1][1] <= number:
            self._down_numbers.pop()
        self._down_numbers.append((now, number))

    # measuring

    def _in_service(self, demand: Demand) -> int:
        return min(len(demand.unfinished), demand.ready * self._concurrency)

    def _sample(self, demand: Demand) -> None:
        """Add a sample, and measure the seconds of service."""
        done, service_s = demand.arrived - len(demand.unfinished), 0.0
        if self._samples:
            last = self._samples[-1]
            service_s = last.service_s + self._in_service(demand) * (demand.now - last.at)
        self._samples.append(_Sample(demand.now, demand.arrived, done, service_s))
        while len(self._samples) > 2 and self._samples[1].at <= demand.now - self._window_s():
            self._samples.popleft()
        first, newest = self._samples[0], self._samples[-1]
        if newest.done > first.done and newest.service_s > first.service_s:
            # A request in service has had half of its service, on average.
            services = newest.done - first.done + self._in_service(demand) / 2
            self._service_s = (newest.service_s - first.service_s) / services

    def _window_s(self) -> float:
        """Return over how many seconds arrivals are counted."""
        return min(self._settings.down_after_s, max(LOAD_S, LOAD_SERVICES * (self._service_s or 0.0)))

    def _rate(self) -> float:
        """Return the arrivals per second."""
        first, newest = self._samples[0], self._samples[-1]
        return (newest.arrived - first.arrived) / max(INTERVAL_S, newest.at - first.at)

    def _load(self, demand: Demand) -> float:
        """Return the offered load. Before a service was measured: that with which rule 1 gives each request a place."""
        if self._service_s is None:
            return len(demand.unfinished) * UP_UTILIZATION
        return self._rate() * self._service_s

    def _load_now(self, demand: Demand) -> float:
        """Return the offered load, or that of the last seconds if these are a burst (rule 5)."""
        load, service_s = self._load(demand), self._service_s
        if service_s is None:
            return load
        newest, rate = self._samples[-1], self._rate()
        for first in reversed(self._samples):
            seconds = newest.at - first.at
            if seconds > max(BURST_S, service_s):
                break
            found, expected = newest.arrived - first.arrived, rate * seconds
            is_burst = found > expected + BURST_DEVIATIONS * math.sqrt(expected) + 2
            if is_burst and seconds >= max(1.0, service_s / 2):
                load = max(load, found / seconds * service_s)
        return load

    def _queue_s(self, demand: Demand) -> float:
        """Return the queue time: 0 if no request queues. A pause does not count."""
        places = demand.ready * self._concurrency
        if len(demand.unfinished) <= places:
            return 0.0
        return demand.now - max(demand.unfinished[places], self._held_until)

    # the numbers

    def _least(self, load: float, utilization: float) -> int:
        """Return the least number of replicas, 1 at least, with at most this utilization."""
        return max(1, math.ceil(load / self._concurrency / utilization))

    def _overload(self, number: int, now: float) -> float:
        """Return the least load at which requests queued too long with a number of replicas; inf: none is known."""
        last, load = self._overloads.get(number, (-math.inf, math.inf))
        return load if now - last < FORGET_WINDOWS * self._settings.down_after_s else math.inf

    def _up_number(self, demand: Demand, queue_s: float) -> int:
        """Return the number by rule 1, for a queue time that is too long."""
        now, wanted = demand.now, demand.wanted
        load_now = self._load_now(demand)
        number = self._least(load_now, UP_UTILIZATION)
        if demand.ready < wanted:  # others load, and may be enough
            self._stall = None
            return max(wanted, number)
        self._overloads[wanted] = now, min(load_now, self._overload(wanted, now))
        if number > wanted:
            self._stall = None
            return number
        if self._stall is None:
            self._stall = now, queue_s
        began, queue_s_then = self._stall
        if now - began < STALL_S:
            return wanted
        self._stall = None
        return wanted + 1 if queue_s >= queue_s_then else wanted

    def _down_number(self, load: float, demand: Demand) -> int:
        """Return the number by rules 2 and 3; 0 if there was no request in the time over which arrivals are counted."""
        if not demand.unfinished and self._samples[0].arrived == demand.arrived:
            return 0
        number = max(self._least(load, DOWN_UTILIZATION), math.ceil(len(demand.unfinished) / self._concurrency))
        while number < demand.wanted and load >= RETRY_LOAD * self._overload(number, demand.now):
            number += 1
        return number
