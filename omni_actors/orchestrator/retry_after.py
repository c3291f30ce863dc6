"""Estimates when a place becomes free: the ``Retry-After`` of a refused request."""

from __future__ import annotations

import collections

SHORTEST_S, LONGEST_S = 1.0, 60.0
RECENT = 32
"""How many of the latest requests the mean duration is taken of."""


class RetryAfterEstimator:
    """Estimates the time until a place is free from how long the latest requests took."""

    def __init__(self) -> None:
        self._durations_s = collections.deque[float](maxlen=RECENT)

    def add(self, duration_s: float) -> None:
        """Record the duration of a request that has ended."""
        self._durations_s.append(duration_s)

    def retry_after_s(self, in_flight: int, oldest_s: float) -> float:
        """Return the seconds until a place is expected to be free, from 1 to 60.

        By Little's law, of n requests in flight that take T seconds each, one ends every T / n seconds.

        in_flight: the number of requests in flight.
        oldest_s: the age of the oldest of them: T is at least that, also if no request has ended for a while.
        """
        mean_s = sum(self._durations_s) / len(self._durations_s) if self._durations_s else 0.0
        return min(max(SHORTEST_S, max(mean_s, oldest_s) / max(1, in_flight)), LONGEST_S)
