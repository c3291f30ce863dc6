"""The route for speech: formats, events and speed, as OpenAI's own client uses it."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import av
import numpy as np
import openai
import pytest

from omni_actors.outputs import AudioChunk
from omni_actors.serve.media.tempo import TimeStretch
from tests.support.http_server import Server, Start

WORDS = "la " * 20
SECONDS = 2.0


def duration(data: bytes, container: str) -> float:
    """Decode a file of a known container; return its seconds."""
    with av.open(io.BytesIO(data), format=container) as file:
        frames = list(file.decode(audio=0))
    return float(sum(frame.samples for frame in frames) / frames[0].sample_rate)


def test_aac_is_streamed(client: openai.OpenAI) -> None:
    speech = client.audio.speech.with_streaming_response.create
    with speech(model="studio", voice="any", input=WORDS, response_format="aac") as response:
        pieces = list(response.iter_bytes())
        assert response.headers["content-type"] == "audio/aac"
    assert len(pieces) > 1
    assert SECONDS <= duration(b"".join(pieces), "aac") < SECONDS + 0.2


@pytest.mark.parametrize(
    ("format", "container"), [("mp3", "mp3"), ("opus", "ogg"), ("aac", "aac"), ("flac", "flac"), ("wav", "wav")]
)
def test_events_carry_a_file_in_pieces(studio: Server, format: str, container: str) -> None:
    events = read_events(studio, {"response_format": format})
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert (len(deltas) > 1) == (format != "flac")
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    assert done == {"type": "speech.audio.done", "usage": usage}
    data = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert SECONDS <= duration(data, container) < SECONDS + 0.2


@pytest.mark.slow
def test_gaps_in_a_file_that_is_sent_when_it_is_complete_are_no_underruns(start: Start) -> None:
    """Each word takes longer than it lasts."""
    with start("-s", "stages.mouth.options.step_s=0.3") as server:
        for format, are_heard in (("flac", False), ("mp3", True)):
            read_events(server, {"response_format": format, "input": "la la la"})
            assert (server.metric("omni_speech_underruns_total") > 0) == are_heard


def read_events(server: Server, changes: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"model": "studio", "voice": "any", "input": WORDS, "stream_format": "sse", **changes}
    answer = server.http.post("/v1/audio/speech", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 4.0])
def test_the_sound_of_an_engine_without_a_speed_is_stretched(client: openai.OpenAI, speed: float) -> None:
    def speak(speed: float) -> bytes:
        arguments: Any = {"model": "studio", "voice": "any", "input": WORDS, "response_format": "pcm"}
        return client.audio.speech.create(**arguments, speed=speed).content

    assert len(speak(speed)) * speed == pytest.approx(len(speak(1.0)), rel=0.05)


@pytest.mark.parametrize("speed", [0.25, 0.7, 2.0])
def test_a_stretched_tone_keeps_its_pitch(speed: float) -> None:
    rate, tone = 24000, 440
    samples = np.sin(2 * np.pi * tone * np.arange(2 * rate) / rate).astype(np.float32)
    stretch = TimeStretch(speed)
    chunks = [stretch.push(AudioChunk(part, rate)) for part in np.array_split(samples, 7)]
    rest = stretch.finish()
    assert rest is not None
    found = np.concatenate([chunk.samples for chunk in (*chunks, rest)])
    loudest = np.argmax(np.abs(np.fft.rfft(found))) * rate / len(found)
    assert loudest == pytest.approx(tone, abs=5)


def test_a_stretch_of_nothing_has_no_end() -> None:
    assert TimeStretch(2.0).finish() is None
