"""The limit of sessions of one address, without a system."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from starlette.websockets import WebSocket

from omni_actors.serve.http.websocket import DRAIN
from omni_actors.serve.routes import realtime
from omni_actors.serve.routes.realtime import Realtime
from omni_actors.serve.settings import ServerSettings


class EndlessSession:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    async def run(self) -> None:
        await trio.sleep_forever()


class AnyPipeline:
    """Stands for the pipelines, a system and its pipeline."""

    name = "any"

    def choose(self, model: str | None) -> AnyPipeline:
        return self

    @property
    def pipeline(self) -> AnyPipeline:
        return self


async def test_all_addresses_of_a_network_have_the_sessions_of_one(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realtime, "Session", EndlessSession)
    monkeypatch.setattr(realtime, "require_served", lambda path, pipeline: None)
    pipelines: Any = AnyPipeline()
    sessions = Realtime(pipelines, ServerSettings(max_sessions=4, max_sessions_per_address=2))
    answers: list[Any] = []

    async def connect(host: str) -> Any:
        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            answers.append(message.get("status", 101))

        scope = {"type": "websocket", "path": realtime.PATH, "headers": [], "query_string": b"", "subprotocols": []}
        scope |= {"client": (host, 1), "extensions": {"websocket.http.response": {}}, DRAIN: None}
        nursery.start_soon(sessions.serve, WebSocket(scope, receive, send))
        await trio.testing.wait_all_tasks_blocked()
        status, *_ = answers
        answers.clear()
        return status

    assert [await connect(f"2001:db8::{number}") for number in (1, 2, 3)] == [101, 101, 429]
    assert await connect("2001:db8:0:1::1") == 101
