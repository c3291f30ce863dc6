"""The system keeps the latest ended requests with their errors. These keep nothing of the session that got them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import trio
import trio.testing
from starlette.websockets import WebSocket, WebSocketState

from omni_actors import OmniSystem
from omni_actors.serve.http.websocket import Drain
from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.realtime.config import PCM, ResponseParams, SessionConfig
from omni_actors.serve.realtime.conversation import Conversation, Entry
from omni_actors.serve.realtime.input_audio import Recording
from omni_actors.serve.realtime.items import Message, Part
from omni_actors.serve.realtime.outbox import Outbox
from omni_actors.serve.realtime.pipeline import SessionPipeline
from omni_actors.serve.realtime.response import Response
from omni_actors.serve.realtime.response_settings import ResponseSettings
from omni_actors.serve.realtime.session import Session, SessionLimits
from omni_actors.serve.realtime.transcribing import Transcriber
from tests.support.realtime import silence
from tests.support.served_engines import REFUSED_S

CONFIG = """\
name: reporter
stages:
  ear: {engine: "tests.support.served_engines:Ear", accepts: [audio], emits: transcript}
  mind: {engine: "tests.support.served_engines:Eye", accepts: [messages], inputs: [ear], emits: text}
"""


async def fail(omni: OmniSystem, outbox: Outbox) -> list[weakref.ref[Any]]:
    """Have a recording transcribed, and a response about it. Both fail. Return references to both."""
    pipeline = SessionPipeline(omni, "any", longest_s=60.0)
    item = Message(id="one", role="user", content=[Part("input_audio")])
    entry = Entry(item, {0: Recording(silence(REFUSED_S), PCM())})
    transcriber = Transcriber(pipeline, outbox, max_bytes=2**20)
    transcriber.add(entry, None)
    config = SessionConfig(type="realtime", model="any", output_modalities=["text"])
    settings = ResponseSettings(config, ResponseParams(), omni.pipeline, {})
    conversation = Conversation(max_items=8, max_bytes=2**20)
    response = Response(pipeline, outbox, conversation, settings=settings, entries=[entry])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transcriber.run)
        await response.run()
        nursery.cancel_scope.cancel()
    assert entry.error is not None
    return [weakref.ref(entry), weakref.ref(response)]


async def send(message: MutableMapping[str, Any]) -> None:
    """Take an event, as a client does."""


async def test_failed_transcripts_and_responses_are_freed(tmp_path: Path) -> None:
    file = tmp_path / "reporter.yaml"
    file.write_text(CONFIG)
    async with OmniSystem.open(file) as omni:
        found = await fail(omni, Outbox(WebSocket({"type": "websocket"}, trio.sleep_forever, send)))
        gc.collect()
        assert [each() for each in found] == [None, None]


async def test_an_ended_session_is_freed_without_a_collection(tmp_path: Path) -> None:
    """Full collections are rare in a server, and a session may hold 16 MiB of recordings."""
    file = tmp_path / "reporter.yaml"
    file.write_text(CONFIG)
    limits = SessionLimits(duration_s=60.0, max_items=8, max_bytes=2**20)
    async with OmniSystem.open(file) as omni:

        async def run(events: list[dict[str, Any]]) -> weakref.ref[Any]:
            texts = [msgspec.json.encode(event).decode() for event in events]
            messages: list[MutableMapping[str, Any]] = [{"type": "websocket.receive", "text": text} for text in texts]
            messages.append({"type": "websocket.disconnect", "code": 1005})

            async def receive() -> MutableMapping[str, Any]:
                await trio.testing.wait_all_tasks_blocked()
                return messages.pop(0)

            websocket = WebSocket({"type": "websocket"}, receive, send)
            websocket.client_state = websocket.application_state = WebSocketState.CONNECTED
            session = Session(websocket, omni, limits, model="any", params={}, drain=Drain())
            await session.run()
            return weakref.ref(session)

        heard = {"type": "input_audio_buffer.append", "audio": to_base64(silence(1))}
        asked = {"type": "response.create"}
        gc.collect()
        gc.disable()
        try:
            found = [await run([]), await run([heard, heard]), await run([heard, asked]), await run([{"type": "bad"}])]
            await trio.testing.wait_all_tasks_blocked()
            assert [each() for each in found] == [None] * 4
        finally:
            gc.enable()
