"""The source of the live state: the server's stream of it (``serve/state_feed.py``)."""

from __future__ import annotations

import time
from typing import Any

import httpx2
import msgspec
import trio

from omni_actors.cli.server_client import Server, ServerError, decoding, events
from omni_actors.plain_text import clean
from omni_actors.serve.api.merge_patch import apply_patch
from omni_actors.system import LiveState

RECONNECT_S = 1.0


class StateSource:
    """Follows the live state of a server. ``state`` has the latest, and ``lost`` why there is no newer one.

    pipeline: one of several that the server has; None: its first one.
    """

    def __init__(self, server: Server, pipeline: str | None = None) -> None:
        self._server = server
        self._params = {"stream": "true"} | ({} if pipeline is None else {"pipeline": pipeline})
        self._document: dict[str, Any] = {}
        self.state: LiveState | None = None
        self.lost: str | None = None
        self._received = 0.0
        """When the latest state arrived, by the monotonic clock."""
        self.arrived = trio.Event()
        """Set when the first state is there."""

    def now(self) -> float:
        """Return the server's Unix time: that of the latest state, and the time since it arrived."""
        assert self.state is not None
        return self.state.at + time.monotonic() - self._received

    async def follow(self) -> None:
        """Follow the state until cancelled, and connect again after a loss.

        Raises ServerError: the first connection failed, or the server has no live state.
        """
        while True:
            try:
                await self._read()
                self.lost = "the server has ended"
            except ServerError as error:
                if self.state is None:
                    raise
                self.lost = str(error)
            await trio.sleep(RECONNECT_S)

    async def _read(self) -> None:
        async with self._server.stream("GET", "state", params=self._params) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise ServerError("invalid answer", f"{self._server.url} has no live state: it is another server")
            async for document in events(response, self._document_after):
                if document is not None:
                    self._document, self.lost = document, None
                    self.state, self._received = _typed(document), time.monotonic()
                    self.arrived.set()

    def _document_after(self, event: httpx2.ServerSentEvent) -> dict[str, Any] | None:
        """Return the document after an event; None if the event does not change it."""
        with decoding():
            if event.event == "state":
                return msgspec.json.decode(event.data, type=dict[str, Any])
            if event.event == "change":
                return apply_patch(self._document, msgspec.json.decode(event.data, type=dict[str, Any]))
        return None


def _typed(document: dict[str, Any]) -> LiveState:
    """Return a document as a live state with clean texts. Raises ServerError: the server is of another version."""
    with decoding():
        return msgspec.convert(_cleaned(document), LiveState)


def _cleaned(value: Any) -> Any:
    """Return a JSON value with clean strings, also as names."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(name): _cleaned(each) for name, each in value.items()}
    return [_cleaned(each) for each in value] if isinstance(value, list) else value
