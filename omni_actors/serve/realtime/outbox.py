"""The events that wait to be sent to a client.

Rules
1. Posting never waits, so that events which belong together stay together.
2. A task that may post without end waits for room (``wait_room``) between its steps. So few events are pending.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import trio
from starlette.websockets import WebSocket

from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.realtime.items import new_id

ROOM, ROOM_BYTES = 8, 256 * 1024
"""A task waits while so many events, or characters of them, are pending."""


class Outbox:
    """The pending events of one session."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._pending = deque[str]()
        self._size = 0
        """The characters of the pending events."""
        self._posted, self._sent = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()

    def post(self, type: str, /, **fields: Any) -> None:
        """Send an event, after those that are pending."""
        event = {"type": type, "event_id": new_id("event"), **fields}
        text = msgspec.json.encode(event).decode()
        self._pending.append(text)
        self._size += len(text)
        self._posted.unpark_all()

    def post_error(self, error: HTTPError, event_id: str | None = None) -> None:
        """Send an ``error`` event. event_id: of the client's event that caused it."""
        self.post("error", error={**error_object(error), "event_id": event_id})

    async def wait_room(self) -> None:
        """Wait until few events are pending."""
        await trio.lowlevel.checkpoint()
        while len(self._pending) >= ROOM or self._size >= ROOM_BYTES:
            await self._sent.park()

    async def wait_sent(self) -> None:
        """Wait until no event is pending."""
        while self._pending:
            await self._sent.park()

    async def run(self) -> None:
        """Send the events until cancelled. Raises WebSocketDisconnect."""
        while True:
            while self._pending:
                await self._websocket.send_text(self._pending[0])
                self._size -= len(self._pending.popleft())
                self._sent.unpark_all()
            await self._posted.park()


def error_object(error: HTTPError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
