"""The live state as a stream of server-sent events, for any number of viewers at the cost of one.

Rules
1. The state is read at most once in ``PERIOD_S``, whatever the number of viewers, and not at all without a viewer.
2. A viewer's first event, ``state``, has the whole state. Each ``change`` is a JSON merge patch of the state before. An
   event is made once and sent to every viewer. Nothing is sent while nothing changes, but a comment each ``COMMENT_S``,
   by which the kernel finds viewers that have gone. So a viewer adds its own clock's time since the last event to the
   event's ``at``.
3. A viewer that reads too slowly misses changes, and gets the whole state instead: at most ``KEPT`` events are kept.
4. There are at most ``MAX_VIEWERS`` viewers, and ``MAX_VIEWERS_PER_ADDRESS`` from one address.
5. The stream ends when the server begins to drain, after the event ``end``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import trio

from omni_actors.network_addresses import counted_address
from omni_actors.serve.api.merge_patch import merge_patch
from omni_actors.serve.api.responses import event
from omni_actors.serve.http.errors import HTTPError
from omni_actors.system import LiveState

PERIOD_S = 0.1
COMMENT_S = 10.0
KEPT = 32
MAX_VIEWERS = 16
MAX_VIEWERS_PER_ADDRESS = MAX_VIEWERS // 2
VIEWERS_RETRY_S = 10

_COMMENT = b":\n\n"


class StateFeed:
    """The events of one system's live state.

    Args:
        read: returns the live state.
        is_draining: whether the server has begun to drain.
    """

    def __init__(self, read: Callable[[], LiveState], is_draining: Callable[[], bool]) -> None:
        self._read, self._is_draining = read, is_draining
        self._state: dict[str, Any] = {}
        self._version = 0
        """How many changes there have been."""
        self._changes: deque[bytes] = deque(maxlen=KEPT)
        """The events of the latest changes; the last one led to ``_version``."""
        self._next_read = -float("inf")
        self._viewers: Counter[str] = Counter()
        """How many viewers each address has."""

    async def events(self, address: str) -> AsyncGenerator[bytes, None]:
        """Yield the events for a new viewer at ``address``. Raises HTTPError 503 instead of the first one."""
        address = counted_address(address)
        self._require_place(address)
        self._viewers[address] += 1
        try:
            self._refresh()
            seen, sent_at = self._version, trio.current_time()
            yield event(self._state, "state")  # it may take as long as the viewer takes to read
            while not self._is_draining():
                await trio.sleep_until(self._next_read)
                self._refresh()
                now = trio.current_time()
                if seen != self._version:
                    piece, seen, sent_at = self._since(seen), self._version, now
                    yield piece
                elif now - sent_at > COMMENT_S:
                    yield _COMMENT
                    sent_at = now
            yield event({}, "end")
        finally:
            self._viewers[address] -= 1
            if not self._viewers[address]:
                del self._viewers[address]

    def _require_place(self, address: str) -> None:
        """Raises HTTPError."""
        if self._viewers.total() >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} viewers have this stream already, which is the limit"
        elif self._viewers[address] >= MAX_VIEWERS_PER_ADDRESS:
            message = f"{MAX_VIEWERS_PER_ADDRESS} viewers of this address have this stream already, which is the limit"
        else:
            return
        raise HTTPError(503, message, code="too_many_viewers", retry_after_s=VIEWERS_RETRY_S)

    def _since(self, seen: int) -> bytes:
        """Return the events that lead from version ``seen`` to the current one."""
        missed = self._version - seen
        if missed > len(self._changes):
            return event(self._state, "state")
        return b"".join([*self._changes][-missed:])

    def _refresh(self) -> None:
        """Read the state, if it was not read in the last ``PERIOD_S``."""
        now = trio.current_time()
        if now < self._next_read:
            return
        self._next_read = now + PERIOD_S
        state = msgspec.to_builtins(self._read())
        patch = merge_patch(self._state, state)
        self._state = state  # also its `at`, from which a new viewer counts the time of what lasts
        if patch.keys() <= {"at"}:
            return
        self._version += 1
        self._changes.append(event(patch, "change"))
