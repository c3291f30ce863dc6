"""Estimates when a place becomes free: the ``Retry-After`` of a refused request.

Where an engine measures when the next of its requests ends, as a denoiser knows the steps that are left and what one
costs, that counts. For other requests, the durations of the latest ones do.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Mapping

from omni_actors.orchestrator.request import Request

SHORTEST_S, LONGEST_S = 1.0, 60.0
SAMPLED = 256
"""How many requests in flight are looked at, so that a refusal costs the same however many there are."""
RECENT = 32
"""How many of the latest requests the estimate is taken from."""


class RetryAfterEstimator:
    """Estimates the time until a place is free from how long the latest requests took for their work.

    The requests of one route are compared: one with twice the work, such as a picture with twice the denoising steps,
    is expected to take twice as long.
    """

    def __init__(self) -> None:
        self._ended = collections.deque[tuple[tuple[str, ...], float, float]](maxlen=RECENT)
        """The stages, the work and the duration of each."""

    def add(self, request: Request) -> None:
        """Record a request that has ended."""
        assert request.finished is not None
        self._ended.append((request.route.stages, request.work, request.finished - request.submitted))

    def retry_after_s(self, in_flight: Collection[Request], now: float, measured: Mapping[str, float]) -> float:
        """Return the seconds until a place is expected to be free, from 1 to 60.

        in_flight: the oldest request first.
        now: CLOCK_MONOTONIC.
        measured: the stages whose engines know when the next of their requests ends, and the seconds until then.
        """
        oldest = list(itertools.islice(in_flight, SAMPLED))
        others = [request for request in oldest if not measured.keys() & set(request.route.stages)]
        seconds = min(measured.values(), default=math.inf)
        if others or not measured:
            seconds = min(seconds, self._by_history(others, len(in_flight) / max(1, len(oldest)), now))
        return min(max(SHORTEST_S, seconds), LONGEST_S)

    def _by_history(self, sample: Collection[Request], scale: float, now: float) -> float:
        """Return the seconds until one of the requests in flight ends.

        By Little's law, of n requests that take T seconds each on average, one ends every T / n seconds.

        T is at least the age of the oldest, also if no request has ended for a while. scale: n for each in the sample.
        """
        if not sample:
            return SHORTEST_S
        work, seconds = (collections.defaultdict[tuple[str, ...], float](float) for _ in range(2))
        for stages, amount, duration_s in self._ended:
            work[stages] += amount
            seconds[stages] += duration_s
        expected_s = sum(
            request.work * seconds[request.route.stages] / (work[request.route.stages] or 1.0) for request in sample
        )
        oldest_s = now - next(iter(sample)).submitted
        return max(expected_s / len(sample), oldest_s) / (scale * len(sample))
