"""How fast places become free: what a client who is refused is told to wait."""

from __future__ import annotations

import collections

SHORTEST_S, LONGEST_S = 1.0, 60.0
RECENT = 32
"""Requests whose time tells how long one takes."""


class RetryAfterEstimator:
    """Knows how long the latest requests took."""

    def __init__(self) -> None:
        self._took_s = collections.deque[float](maxlen=RECENT)

    def note(self, took_s: float) -> None:
        self._took_s.append(took_s)

    def retry_after_s(self, in_flight: int, oldest_s: float) -> float:
        """Of n requests in flight that take T seconds each, one ends every T / n (Little's law).

        oldest_s: how long one of them has taken already; when nothing ends, that is what shows it.
        """
        mean_s = sum(self._took_s) / len(self._took_s) if self._took_s else 0.0
        return min(max(SHORTEST_S, max(mean_s, oldest_s) / max(1, in_flight)), LONGEST_S)
