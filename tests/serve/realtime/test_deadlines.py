"""The limits of a request, and a spoken answer that is computed sooner than it is played."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
import trio
from starlette.websockets import WebSocket
from trio.testing import MockClock

from omni_actors import OmniSystem
from omni_actors.errors import Overloaded
from omni_actors.orchestrator.unread import ROOM_GRACE_S
from omni_actors.serve.realtime import response as response_module
from omni_actors.serve.realtime.config import ResponseParams, SessionConfig
from omni_actors.serve.realtime.conversation import Entry
from omni_actors.serve.realtime.items import Message, Part
from omni_actors.serve.realtime.outbox import Outbox
from omni_actors.serve.realtime.pipeline import SessionPipeline
from omni_actors.serve.realtime.response import Response
from omni_actors.serve.realtime.response_settings import ResponseSettings
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import WorkerBehavior
from tests.support.simulated_system import until

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
    options: {step_s: STEP_S}
"""


def speaker(tmp_path: Path, *, mouths: int = 1, limits: str = "{deadline_s: 0.5}", step_s: float = 0.02) -> Path:
    """Write the pipeline's file, with so many replicas of the mouth. Return its path."""
    file = tmp_path / "speaker.yaml"
    config = CONFIG.replace("REPLICAS", str(mouths)).replace("LIMITS", limits).replace("STEP_S", str(step_s))
    file.write_text(config)
    return file


async def respond(omni: OmniSystem, text: str, *, reads: trio.Event | None = None) -> dict[str, Any]:
    """Have a text answered aloud, as it is. Return the finished response.

    reads: when the client begins to take events; None: from the beginning.
    """
    events: list[dict[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        if reads is not None:
            await reads.wait()
        events.append(json.loads(message["text"]))

    websocket = WebSocket({"type": "websocket"}, trio.sleep_forever, send)
    websocket.application_state = websocket.application_state.CONNECTED
    async with trio.open_nursery() as nursery:
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


async def answer(tmp_path: Path, text: str, **settings: Any) -> dict[str, Any]:
    """Have a text answered aloud by real workers. settings: see ``speaker``."""
    async with OmniSystem.open(speaker(tmp_path, **settings)) as omni:
        return await respond(omni, text)


async def test_speech_may_last_longer_than_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It lasts 8 s, of which 2 s leave at once, and 0.2 s wait to leave. No single wait for a worker is that long."""
    monkeypatch.setattr(response_module, "QUEUED_CHUNKS", 2)
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.02), lambda line: None)
    async with OmniSystem.open(speaker(tmp_path, limits="{deadline_s: 5.0}", step_s=0.0), spawner=spawner) as omni:
        began = trio.current_time()
        done = await respond(omni, "word " * 80)
        assert trio.current_time() - began > 5.0
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


async def test_a_full_system_refuses_a_request_and_ends_no_spoken_answer_that_waits_for_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """First its stages wait because sound that may not leave yet fills the window; then all of it is computed."""
    monkeypatch.setattr(response_module, "QUEUED_CHUNKS", 2)
    file = speaker(tmp_path, limits="{max_requests: 1, window_bytes: 400_000}", step_s=0.0)
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.001), lambda line: None)
    done: dict[str, Any] = {}

    async def run() -> None:
        done.update(await respond(omni, "word " * 200))

    async with OmniSystem.open(file, spawner=spawner) as omni:
        gauge = omni.metrics.registry.get_sample_value
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await until(lambda: gauge("omni_requests_paused") == 1)
            await trio.sleep(ROOM_GRACE_S + 0.1)
            assert gauge("omni_requests_paused") == 1
            with pytest.raises(Overloaded):
                omni.generate("another")
            await until(lambda: omni._orchestrator.readers.unread.places == 1)
            await trio.sleep(ROOM_GRACE_S + 0.1)
            assert omni.in_flight == 1
            with pytest.raises(Overloaded):
                omni.generate("another")
    assert done["status"] == "completed", done["status_details"]


@pytest.mark.parametrize("reads_again", [True, False])
async def test_a_full_system_ends_a_spoken_answer_whose_client_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, reads_again: bool
) -> None:
    """Unless the client takes what there is before another request needs the place."""
    monkeypatch.setattr(response_module, "QUEUED_CHUNKS", 2)
    file = speaker(tmp_path, limits="{max_requests: 1, window_bytes: 400_000}", step_s=0.0)
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.001), lambda line: None)
    done: dict[str, Any] = {}
    reads = trio.Event()

    async def run() -> None:
        done.update(await respond(omni, "word " * 200, reads=reads))

    async with OmniSystem.open(file, spawner=spawner) as omni:
        gauge = omni.metrics.registry.get_sample_value
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await until(lambda: gauge("omni_requests_paused") == 1)
            await trio.sleep(2 * ROOM_GRACE_S + 0.1)
            if reads_again:
                reads.set()
                await trio.sleep(ROOM_GRACE_S)
                with pytest.raises(Overloaded):
                    omni.generate("another")
            else:
                omni.generate("another").abort()
                reads.set()
    failed = ("failed", "slow_consumer")
    found = done["status"], None if reads_again else done["status_details"]["error"]["code"]
    assert found == (("completed", None) if reads_again else failed)
