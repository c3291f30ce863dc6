"""The route of the live state: once, or as a stream of server-sent events."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omni_actors.serve.api.responses import SSE, JSONResponse
from omni_actors.serve.pipelines import Pipelines
from omni_actors.serve.state_feed import StateFeed


async def live_state(request: Request) -> Response:
    """Return what happens in the system now: stages, rings and requests. ``?stream=true``: as server-sent events.

    ``?pipeline=NAME`` chooses one of several pipelines; by default it is the first.

    The first event, ``state``, has the whole state. Each event ``change`` is a JSON merge patch (RFC 7396) of it, at
    most ten per second, and only when something has changed.
    """
    pipelines: Pipelines = request.app.state.pipelines
    system = pipelines.named(request.query_params.get("pipeline", pipelines.first.pipeline.name))
    if request.query_params.get("stream", "false").lower() in ("true", "1"):
        feeds: dict[str, StateFeed] = request.app.state.state_feeds
        return _EventStream(feeds[system.pipeline.name])
    return JSONResponse(msgspec.to_builtins(system.live_state()))


class _EventStream(Response):
    """The events of a feed. They end when the server drains."""

    def __init__(self, feed: StateFeed) -> None:
        super().__init__(media_type=SSE)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # for proxies: they must not collect the stream
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events (ASGI). Raises HTTPError if there are too many viewers."""
        has_started = False
        async with aclosing(self._feed.events(scope["client"][0])) as events:
            async for piece in events:
                if not has_started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    has_started = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
