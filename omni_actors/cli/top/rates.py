"""Rates between two live states: the counters of rings and links, and the requests that have ended.

Nodes report their counters every 0.5 s, so the rate of a link is that of the last ``LINK_WINDOW_S``.
"""

from __future__ import annotations

from collections import deque

from omni_actors.system import LiveState

LINK_WINDOW_S = 2.0
ENDED = frozenset({"done", "failed", "aborted"})


class Rates:
    """The rates of one refresh. ``update`` begins the next one."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._payload: dict[str, int] = {}
        self._messages: dict[str, int] = {}
        self._ended: set[str] = set()
        self.bytes_s: dict[str, float] = {}
        """Payload bytes per second of each ring that was there before."""
        self.messages_s: dict[str, float] = {}
        self.requests_s: float | None = None
        """Requests that ended per second; None before the second state, and if more ended than the state shows."""
        self._links: deque[tuple[float, dict[str, int], dict[str, int]]] = deque()
        """When, and the payload bytes and messages of each link then."""
        self.link_bytes_s: dict[str, float] = {}
        self.link_messages_s: dict[str, float] = {}

    def update(self, state: LiveState, at: float) -> None:
        """Take the state that the client has at a time of its monotonic clock."""
        payload = {name: ring.payload_bytes for name, ring in state.rings.items()}
        messages = {name: ring.messages for name, ring in state.rings.items()}
        ended = {name for name, request in state.requests.items() if request.state in ENDED}
        if self._at is not None and at > self._at:
            elapsed = at - self._at
            self.bytes_s = _per_second(self._payload, payload, elapsed)
            self.messages_s = _per_second(self._messages, messages, elapsed)
            has_overlap = not self._ended or bool(self._ended & ended)
            self.requests_s = len(ended - self._ended) / elapsed if has_overlap else None
        self._at, self._payload, self._messages, self._ended = at, payload, messages, ended
        self._update_links(state, at)

    def _update_links(self, state: LiveState, at: float) -> None:
        payload = {name: link.payload_bytes for name, link in state.links.items()}
        messages = {name: link.messages for name, link in state.links.items()}
        self._links.append((at, payload, messages))
        while len(self._links) > 2 and self._links[1][0] <= at - LINK_WINDOW_S:
            self._links.popleft()
        began, payload_then, messages_then = self._links[0]
        if at > began:
            self.link_bytes_s = _per_second(payload_then, payload, at - began)
            self.link_messages_s = _per_second(messages_then, messages, at - began)


def _per_second(before: dict[str, int], now: dict[str, int], elapsed: float) -> dict[str, float]:
    """Return the rate of each counter. A counter that has begun again counts from 0."""
    return {
        name: (value - before[name] if value >= before[name] else value) / elapsed
        for name, value in now.items()
        if name in before
    }
