"""The limits of a request, and a spoken answer that is computed sooner than it is played."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
import trio
from starlette.websockets import WebSocket

from omni_actors import OmniSystem
from omni_actors.serve.realtime import response as response_module
from omni_actors.serve.realtime.config import ResponseParams, SessionConfig
from omni_actors.serve.realtime.conversation import Entry
from omni_actors.serve.realtime.items import Message, Part
from omni_actors.serve.realtime.outbox import Outbox
from omni_actors.serve.realtime.pipeline import SessionPipeline
from omni_actors.serve.realtime.response import Response
from omni_actors.serve.realtime.response_settings import ResponseSettings

CONFIG = """\
name: speaker
limits: LIMITS
stages:
  mind: {engine: echo, accepts: [messages], emits: text}
  mouth:
    replicas: REPLICAS
    engine: "tests.support.served_engines:Speaker"
    accepts: [script]
    inputs: [mind]
    emits: audio
    ring_bytes: 16384
    options: {step_s: 0.02}
"""


async def answer(tmp_path: Path, text: str, *, mouths: int = 1, limits: str = "{deadline_s: 0.5}") -> dict[str, Any]:
    """Have a text answered aloud, as it is, by so many replicas of the mouth. Return the finished response."""
    events: list[dict[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        events.append(json.loads(message["text"]))

    file = tmp_path / "speaker.yaml"
    file.write_text(CONFIG.replace("REPLICAS", str(mouths)).replace("LIMITS", limits))
    websocket = WebSocket({"type": "websocket"}, trio.sleep_forever, send)
    websocket.application_state = websocket.application_state.CONNECTED
    async with OmniSystem.open(file) as omni, trio.open_nursery() as nursery:
        outbox = Outbox(websocket)
        nursery.start_soon(outbox.run)
        config = SessionConfig(type="realtime", model="any", output_modalities=["audio"])
        settings = ResponseSettings(config, ResponseParams(), omni.pipeline, {})
        entries = [Entry(Message(role="user", content=[Part("input_text", text=text)]))]
        pipeline = SessionPipeline(omni, "any", longest_s=60.0)
        await Response(pipeline, outbox, None, settings=settings, entries=entries).run()
        await outbox.wait_sent()
        nursery.cancel_scope.cancel()
    done: dict[str, Any] = events[-1]["response"]
    return done


async def test_speech_may_last_longer_than_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lasts 8 s, of which 2 s leave at once, and 0.2 s wait to leave. No single wait for a worker is that long."""
    monkeypatch.setattr(response_module, "QUEUED_CHUNKS", 2)
    done = await answer(tmp_path, "word " * 80, limits="{deadline_s: 5.0}")
    assert done["status"] == "completed", done["status_details"]


@pytest.mark.slow
async def test_stages_wait_while_speech_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 s of sound are computed in 1.6 s, and 2 s leave at once. The rest is more than a client may leave unread."""
    monkeypatch.setattr(response_module, "QUEUED_CHUNKS", 2)
    limits = "{output_bytes: 200_000, window_bytes: 10_000}"
    done = await answer(tmp_path, "word " * 80, limits=limits)
    assert done["status"] == "completed", done["status_details"]


async def test_a_pipeline_that_makes_no_sound_in_time_fails_the_response(tmp_path: Path) -> None:
    done = await answer(tmp_path, "word", mouths=0)
    assert (done["status"], done["status_details"]["error"]["code"]) == ("failed", "deadline_exceeded")
