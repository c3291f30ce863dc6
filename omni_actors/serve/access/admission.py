"""Admission of requests. It is decided on a request's head, since its body and its sound cost memory before the system
is asked, and once more when its body is whole.

Rules
1. A request whose body is being uploaded takes no place: however slow it is, it keeps no other request out. Only its
   bytes count. A head is refused where the system is full at that moment.
2. A request whose body is whole takes one of the system's ``max_requests`` places, as one in flight does, while its
   files are fetched and its sound is decoded. It leaves for the system without a wait in between, so that no other
   request gets its place.
3. The bytes of all arriving requests (bodies, and files that they name) share one budget, and count while they come:
   what a client declares costs nothing. Where the budget is used up, the slowest upload that is older than ``GRACE_S``
   is ended to make room; where there is none, the request that needs room is refused.
4. Place and bytes are given back together, once: when the system takes the request over, or at its end before that.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from omni_actors.errors import Overloaded
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.http.errors import HTTPError

SCOPE_KEY = "omni_actors.arrival"
"""Where in its ASGI scope a request's AdmissionTicket is."""
GRACE_S = 5.0
"""An upload's rate is judged from then on."""


class AdmissionControl:
    """The requests that arrive now. in_flight: how many the system has. max_bytes: of all that arrive.

    max_request_bytes: of one of them. retry_after_s: when a place is likely to be free. free_place: ends a request of
    the system that is read slowly; False where there is none.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        retry_after_s: Callable[[], float],
        *,
        max_requests: int,
        max_bytes: int,
        max_request_bytes: int,
        free_place: Callable[[], bool] = lambda: False,
    ) -> None:
        self._in_flight, self.retry_after_s, self._free_place = in_flight, retry_after_s, free_place
        self._max_requests = max_requests
        self.max_bytes, self.max_request_bytes = max_bytes, max_request_bytes
        self._present: set[AdmissionTicket] = set()
        self.bytes = self._placed = 0
        """Bytes of all that are present, and how many of them have a place. Kept up to date, since each piece of a body
        asks for them."""

    def __len__(self) -> int:
        return len(self._present)

    def admit(self) -> AdmissionTicket:
        """Begin an upload. Raises HTTPError 429."""
        self.require_place()
        ticket = AdmissionTicket(self)
        self._present.add(ticket)
        return ticket

    def require_place(self) -> None:
        """Raises HTTPError 429 where the system is full."""
        if self._in_flight() + self._placed >= self._max_requests and not self._free_place():
            raise to_http_error(Overloaded(self._max_requests, self.retry_after_s()))

    def make_room(self, size: int) -> None:
        """End slow uploads until ``size`` more bytes fit into the budget. Raises HTTPError 429."""
        free = self.max_bytes - self.bytes
        while free < size:
            now = trio.current_time()
            slow = [each for each in self._present if not each.has_place and now - each.began >= GRACE_S]
            if not slow:
                retry_s = self.retry_after_s()
                message = f"more than {self.max_bytes} bytes of requests are coming in; try again in {retry_s:.0f} s"
                raise HTTPError(429, message, type="rate_limit_error", code="overloaded", retry_after_s=retry_s)
            slowest = min(slow, key=lambda each: each.bytes / (now - each.began))
            free += slowest.bytes
            slowest.end_upload()

    def place(self, ticket: AdmissionTicket) -> None:
        """Give an ticket a place. Raises HTTPError 429."""
        self.require_place()
        ticket.has_place = True
        self._placed += 1

    def count(self, ticket: AdmissionTicket, size: int) -> None:
        """An ticket brings ``size`` more bytes."""
        ticket.bytes += size
        if ticket in self._present:
            self.bytes += size

    def remove(self, ticket: AdmissionTicket) -> None:
        """Give back the place and the bytes of an ticket. Harmless when it has left."""
        if ticket in self._present:
            self._present.remove(ticket)
            self.bytes -= ticket.bytes
            self._placed -= ticket.has_place


class AdmissionTicket:
    """One request that arrives. bytes: of its body and its files, so far. began: trio's time of its head.

    upload: the cancel scope in which its body is to be read. was_ended: it was cancelled to make room for others.
    """

    def __init__(self, admission: AdmissionControl) -> None:
        self._arrivals = admission
        self.began = trio.current_time()
        self.upload = trio.CancelScope()
        self.bytes = 0
        self.has_place = self.was_ended = False

    @property
    def max_bytes(self) -> int:
        """Of this request."""
        return self._arrivals.max_request_bytes

    def hold(self, size: int) -> None:
        """Count ``size`` more bytes. Raises HTTPError 429 where all that arrive have no room for them.

        It may find that it is itself the slowest upload; then its own scope is cancelled.
        """
        if self.was_ended:
            return
        self._arrivals.make_room(size)
        self._arrivals.count(self, size)

    def take_place(self) -> None:
        """Its body is whole. Raises HTTPError 429."""
        self._arrivals.place(self)

    def end_upload(self) -> None:
        """Make room for another request."""
        self.was_ended = True
        self.leave()
        self.upload.cancel()

    def leave(self) -> None:
        """The system takes the request over, or it is over. Harmless when it has left."""
        self._arrivals.remove(self)
