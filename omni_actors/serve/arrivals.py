"""Who may come in. Decided on a request's head: its body and its sound cost memory before the system is asked.

Rules
1. A request that arrives (its body is read, its files come, its sound is decoded) takes one of the system's
   ``max_requests`` places, as one in flight does. It leaves for the system without a wait in between, so nobody else
   gets its place.
2. The bytes of all that arrive (bodies, and files that they name) share one budget, and count while they come: what a
   client declares costs nothing.
3. Place and bytes are given back together, once: when the system takes the request over, or at its end before that.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_actors.errors import Overloaded
from omni_actors.serve.problems import Problem, as_problem

SCOPE_KEY = "omni_actors.arrival"
"""Where in its ASGI scope a request's Arrival is."""


class Arrivals:
    """The requests that arrive now. in_flight: how many the system has. max_bytes: of all that arrive.

    max_request_bytes: of one of them. retry_after_s: when a place is likely to be free. make_room: frees a place of the
    system, or gives False.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        retry_after_s: Callable[[], float],
        *,
        max_requests: int,
        max_bytes: int,
        max_request_bytes: int,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self._in_flight, self.retry_after_s, self._make_room = in_flight, retry_after_s, make_room
        self._max_requests = max_requests
        self.max_bytes, self.max_request_bytes = max_bytes, max_request_bytes
        self._present: set[Arrival] = set()

    def __len__(self) -> int:
        return len(self._present)

    @property
    def bytes(self) -> int:
        return sum(arrival.bytes for arrival in self._present)

    def admit(self) -> Arrival:
        """Take a place. Raises Problem 429."""
        if self._in_flight() + len(self) >= self._max_requests and not self._make_room():
            raise as_problem(Overloaded(self._max_requests, self.retry_after_s()))
        arrival = Arrival(self)
        self._present.add(arrival)
        return arrival

    def remove(self, arrival: Arrival) -> None:
        self._present.discard(arrival)


class Arrival:
    """One request that arrives. bytes: of its body and its files, so far."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self.bytes = 0

    @property
    def max_bytes(self) -> int:
        """Of this request."""
        return self._arrivals.max_request_bytes

    def hold(self, size: int) -> None:
        """Count ``size`` more bytes. Raises Problem 429 where all that arrive have no room for them."""
        if self._arrivals.bytes + size > self._arrivals.max_bytes:
            retry_s = self._arrivals.retry_after_s()
            message = (
                f"more than {self._arrivals.max_bytes} bytes of requests are coming in; try again in {retry_s:.0f} s"
            )
            raise Problem(429, message, type="rate_limit_error", code="overloaded", retry_after_s=retry_s)
        self.bytes += size

    def leave(self) -> None:
        """The system takes the request over, or it is over. Harmless when it has left."""
        self._arrivals.remove(self)
