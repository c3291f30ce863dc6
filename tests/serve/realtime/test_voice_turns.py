"""Turn taking on the pipeline "voice": hands-free questions with noise, over OpenAI's own client."""

from __future__ import annotations

import base64
import io
import re
import time
from typing import Any

import numpy as np
import pytest
import soundfile

from bench.turns import converse, say
from tests.support.http_server import Api
from tests.support.realtime import check_event, parts, pcm

pytestmark = [
    pytest.mark.voice,
    pytest.mark.slow,
    # The client calls websockets in a way that its newest version deprecates.
    pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning"),
]

QUESTION = "What is the capital of France?"
SEMANTIC: Any = {"type": "semantic_vad"}


def hear(connection: Any, sound: bytes) -> None:
    for audio in parts(sound, 960):
        connection.input_audio_buffer.append(audio=audio)


def until(connection: Any, type: str) -> list[Any]:
    found = []
    for event in connection:
        check_event(event.to_dict(mode="json"))
        found.append(event)
        if event.type == type:
            return found
    raise AssertionError("the connection ended")


@pytest.mark.parametrize(("noise_db", "semantic"), [(None, False), (20, False), (10, False), (10, True)])
def test_a_question_is_answered_when_its_speaker_stops(voice: Api, noise_db: int | None, semantic: bool) -> None:
    conversation = converse([say(QUESTION)], noise_db)
    with voice.openai() as client, client.realtime.connect(model="voice") as connection:
        if semantic:
            connection.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": SEMANTIC}}})
        hear(connection, pcm(conversation.sound))
        events = until(connection, "response.done")
        answer = b"".join(base64.b64decode(e.delta) for e in events if e.type == "response.output_audio.delta")
        file = io.BytesIO()
        soundfile.write(file, np.frombuffer(answer, "<i2"), 24_000, format="WAV")
        heard = client.audio.transcriptions.create(model="voice", file=("answer.wav", file.getvalue())).text
    stops = [event.audio_end_ms for event in events if event.type == "input_audio_buffer.speech_stopped"]
    assert len(stops) == 1
    [(_, end_ms)] = conversation.spoken_ms
    assert end_ms <= stops[0] <= end_ms + (420 if semantic else 620)  # 20 ms: the change of the sample rate
    words = "".join(event.delta for event in events if event.type == "response.output_audio_transcript.delta")
    assert "Paris" in words
    assert "paris" in heard.lower()


def test_speech_stops_an_answer_which_keeps_the_words_that_were_heard(voice: Api) -> None:
    with voice.openai() as client, client.realtime.connect(model="voice") as connection:
        text = "Tell me a long story about a fox."
        content: Any = [{"type": "input_text", "text": text}]
        connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        connection.response.create()
        before = [event for _ in range(8) for event in until(connection, "response.output_audio.delta")]
        time.sleep(1.5)  # the player has 1.6 s of sound: it plays on, or has played all of it
        hear(connection, pcm(say(QUESTION)))
        events = before + until(connection, "conversation.item.truncated")
        truncated = events[-1]
        done = next(event for event in events if event.type == "response.done")
        assert done.response.status_details.reason == "turn_detected"
        spoken = "".join(event.delta for event in events if event.type == "response.output_audio_transcript.delta")
        sent = b"".join(base64.b64decode(e.delta) for e in events if e.type == "response.output_audio.delta")
        assert 1400 <= truncated.audio_end_ms <= len(sent) / 48  # it begins after 0.1 s
        connection.conversation.item.retrieve(item_id=truncated.item_id)
        kept = until(connection, "conversation.item.retrieved")[-1].item.content[0].transcript
        assert spoken.startswith(kept)
        words = len(re.findall(r"\S+", kept))
        # Speech has fewer than ten words a second, and more than one.
        assert truncated.audio_end_ms // 1000 <= words <= truncated.audio_end_ms / 100 + 1
        hear(connection, bytes(48_000))
        assert "Paris" in "".join(
            event.delta
            for event in until(connection, "response.done")
            if event.type == "response.output_audio_transcript.delta"
        )
