"""Admission control of arriving requests.

A request is admitted on its head, because its body and its audio use memory before the system decides about it, and
again once its body is complete.

Rules
1. A request that is still uploading its body takes no place, so that a slow upload keeps no other request out. Only its
   bytes count. A head is refused if the system is full at that moment. If a server has several systems, the head does
   not tell which one the request is for: it passes.
2. A request with a complete body takes one of the system's ``max_requests`` places, as a request in flight does, while
   its files are fetched and its audio is decoded. It passes to the system without a checkpoint in between, so that no
   other request takes the place. If a server has several systems, the request takes the place when its body has named
   one (``choose``). One that becomes several requests, such as the choices of ``n``, takes the places of the others
   when the system has the first one (``take_places``), because there are checkpoints between their submissions.
3. The bytes of all arriving requests (bodies, and the files that they name) share one budget, and count as they arrive:
   a declared size costs nothing. If the budget is used up, the slowest upload that is older than ``UPLOAD_GRACE_S`` is
   ended. If there is none, the request that needs memory is refused.
4. A request that only calls engines takes no place (``needs_place``), so that it is answered while the system is full.
5. A ticket releases its places and its bytes together, once: when the system takes the request over, or when the
   request ends before that.
6. Decoded audio is far larger than its file, and the system keeps it for replays. So it counts in a budget of its own,
   ``MAX_AUDIO_BYTES``, until the response has ended. If that has no room, the request is refused.
"""

from __future__ import annotations

from collections import Counter

import trio

from omni_actors.errors import Overloaded
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.http.errors import HTTPError
from omni_actors.system import OmniSystem

SCOPE_KEY = "omni_actors.ticket"
"""The key of a request's ticket in its ASGI scope."""
UPLOAD_GRACE_S = 5.0
"""The age from which an upload's rate is judged."""
MAX_AUDIO_BYTES = 1 << 30
"""The decoded audio of all requests: that of nine largest requests, or 27 recordings of 600 s at 16 kHz."""


class AdmissionControl:
    """Limits the number and the bytes of arriving requests.

    Args:
        systems: those of the server. Each has places, and may end a request that its client reads slowly.
        max_bytes: the budget of all arriving requests.
        max_request_bytes: the limit of one request.
    """

    def __init__(self, *systems: OmniSystem, max_bytes: int, max_request_bytes: int) -> None:
        self.systems = systems
        self.max_bytes, self.max_request_bytes = max_bytes, max_request_bytes
        self.tickets: set[AdmissionTicket] = set()
        self.bytes = 0
        """The bytes of all tickets. Kept as a sum, because each piece of a body needs it."""
        self.audio_bytes = 0
        """The decoded audio of all requests, also of those in flight."""
        self.places: Counter[OmniSystem] = Counter()
        """How many places of each system the tickets have."""

    def admit(self, *, needs_place: bool = True) -> AdmissionTicket:
        """Return a ticket for a request whose head has arrived.

        Raises HTTPError 429 if it needs a place, and the only system is full.
        """
        if needs_place and len(self.systems) == 1:
            self.check_places(self.systems[0])
        ticket = AdmissionTicket(self, needs_place=needs_place)
        self.tickets.add(ticket)
        return ticket

    def check_places(self, system: OmniSystem, count: int = 1) -> None:
        """Make room in a full system by ending its slowest readers. Raises HTTPError 429 if too few are too slow."""
        max_requests = system.pipeline.limits.max_requests
        lacking = system.in_flight + self.places[system] + count - max_requests
        if lacking > 0 and not system.make_room(lacking):
            raise to_http_error(Overloaded(max_requests, system.retry_after_s))

    def end_all(self) -> None:
        """End all arriving requests, because the server shuts down: their clients get an error."""
        for ticket in self.tickets:
            ticket.arrival.cancel()

    def make_room(self, size: int) -> None:
        """End slow uploads until ``size`` more bytes fit into the budget. Raises HTTPError 429."""
        free = self.max_bytes - self.bytes
        while free < size:
            now = trio.current_time()
            slow = [each for each in self.tickets if not each.places and now - each.since >= UPLOAD_GRACE_S]
            if not slow:
                raise self._no_room(f"arriving requests use {self.max_bytes} bytes already")
            slowest = min(slow, key=lambda each: each.bytes / (now - each.since))
            free += slowest.bytes
            slowest.end_upload()

    def check_audio(self, size: int) -> None:
        """Raises HTTPError 429 if the budget of audio has no room for ``size`` more bytes."""
        if self.audio_bytes + size > MAX_AUDIO_BYTES:
            raise self._no_room(f"the decoded audio of requests uses {self.audio_bytes} of {MAX_AUDIO_BYTES} bytes")

    def _no_room(self, reason: str) -> HTTPError:
        retry_s = min(system.retry_after_s for system in self.systems)
        message = f"{reason}; try again in {retry_s:.0f} s"
        return HTTPError(429, message, code="overloaded", retry_after_s=retry_s)


class AdmissionTicket:
    """An arriving request's claim on places and on the budgets.

    bytes: the size of its body and its files so far. audio_bytes: of its decoded audio. since: trio's time of its head.
    upload: the cancel scope in which its body is to be read. arrival: the cancel scope of everything before the system
    has the request. was_ended: the upload was ended to make room for other requests.
    """

    def __init__(self, admission: AdmissionControl, *, needs_place: bool = True) -> None:
        self._admission, self._needs_place = admission, needs_place
        self.since = trio.current_time()
        self.upload, self.arrival = trio.CancelScope(), trio.CancelScope()
        self.bytes = self.audio_bytes = 0
        self.places = 0
        self.was_ended = False
        self._system = admission.systems[0] if len(admission.systems) == 1 else None
        """The system that gets the request; None as long as that is not known."""

    @property
    def max_bytes(self) -> int:
        """The limit of this request."""
        return self._admission.max_request_bytes

    def add_bytes(self, size: int) -> None:
        """Count ``size`` more bytes. Raises HTTPError 429 if the budget has no room for them.

        If this is itself the slowest upload, its scope is cancelled.
        """
        if self.was_ended:
            return
        self._admission.make_room(size)
        self.bytes += size
        if self in self._admission.tickets:
            self._admission.bytes += size

    def add_audio(self, size: int) -> None:
        """Count ``size`` more bytes of decoded audio, until ``end``. Raises HTTPError 429 if there is no room."""
        self._admission.check_audio(size)
        self.audio_bytes += size
        self._admission.audio_bytes += size

    def take_place(self) -> None:
        """Take a place, if it needs one and its system is known. The body is complete. Raises HTTPError 429."""
        if self._needs_place and self._system is not None and not self.places:
            self._take(self._system, 1)

    def take_places(self, count: int) -> None:
        """Take the places of ``count`` more requests of the system. Raises HTTPError 429."""
        if self._system is not None and count:
            self._take(self._system, count)

    def _take(self, system: OmniSystem, count: int) -> None:
        self._admission.check_places(system, count)
        self.places += count
        self._admission.places[system] += count

    def pass_place(self) -> None:
        """Give one place back, for a request that the system gets at once: there is no checkpoint in between."""
        if self._system is not None and self.places:
            self.places -= 1
            self._admission.places[self._system] -= 1

    def choose(self, system: OmniSystem) -> None:
        """Take a place of the system that the body names, if it needs one. Raises HTTPError 429."""
        self._system = system
        if self in self._admission.tickets:
            self.take_place()

    def end_upload(self) -> None:
        """Cancel the upload to make room for other requests."""
        self.was_ended = True
        self.release()
        self.upload.cancel()

    def release(self) -> None:
        """Give back the places and the bytes: the system has the request, or the request has ended. Idempotent."""
        if self in self._admission.tickets:
            self._admission.tickets.remove(self)
            self._admission.bytes -= self.bytes
            if self._system is not None:
                self._admission.places[self._system] -= self.places
                self.places = 0

    def end(self) -> None:
        """Give everything back: the response has ended. Idempotent."""
        self.release()
        self._admission.audio_bytes -= self.audio_bytes
        self.audio_bytes = 0
