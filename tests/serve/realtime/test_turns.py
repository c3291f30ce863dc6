"""Sessions that find the user's turns in hibari's speech, on a pipeline without models."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from bench.turns import SENTENCES, Sound, say
from tests.support.http_server import Start
from tests.support.realtime import Session, session

pytestmark = pytest.mark.voice

PCM_S = 48_000
"""Bytes of a second of PCM16."""
TEXT: Any = {"output_modalities": ["text"]}
LONG = "word " * 100
"""The answer to this lasts 30 s."""
TURN = [
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
]


def pcm(sound: Sound) -> bytes:
    """PCM16 at 24 kHz of a sound at 16 kHz."""
    return bytes((soxr.resample(sound, 16_000, 24_000).clip(-1, 1) * 32767).astype("<i2").tobytes())


def silence(seconds: float) -> bytes:
    return bytes(2 * round(24_000 * seconds))


def hear(talk: Session, sound: bytes, size: int = PCM_S // 2 + 1) -> None:
    """Send sound of the user. Frames are cut."""
    for at in range(0, len(sound), size):
        talk.send("input_audio_buffer.append", audio=base64.b64encode(sound[at : at + size]).decode())


def detect(talk: Session, detection: dict[str, Any] | None, **audio: Any) -> dict[str, Any]:
    """Set the turn detection; return what the session says it is."""
    settings = {"input": {"turn_detection": detection, **audio}}
    talk.send("session.update", session={"type": "realtime", "audio": settings})
    updated: dict[str, Any] = talk.until("session.updated")[-1]["session"]["audio"]["input"]["turn_detection"]
    return updated


def answer(talk: Session) -> str:
    """Have an answer of 30 s begin; return its item's identifier."""
    talk.ask(LONG)
    talk.send("response.create")
    identifier: str = talk.until("response.output_audio.delta")[-1]["item_id"]
    return identifier


def test_a_session_finds_a_turn_and_answers_it(talk: Session) -> None:
    speech = say(SENTENCES[0])
    hear(talk, silence(1) + pcm(speech) + silence(1))
    events = talk.until("response.done")
    assert [event["type"] for event in events[:6]] == [*TURN, "response.created"]
    started, stopped, committed, added = events[:4]
    assert len({started["item_id"], stopped["item_id"], committed["item_id"], added["item"]["id"]}) == 1
    end_ms = 1000 + len(speech) / 16
    assert 1000 - 300 - 32 <= started["audio_start_ms"] <= 1000
    assert end_ms + 400 <= stopped["audio_end_ms"] <= end_ms + 600
    assert events[-1]["response"]["status"] == "completed"
    talk.send("conversation.item.retrieve", item_id=committed["item_id"])
    [part] = talk.until("conversation.item.retrieved")[-1]["item"]["content"]
    duration_ms = stopped["audio_end_ms"] - started["audio_start_ms"]
    assert abs(len(base64.b64decode(part["audio"])) * 1000 / PCM_S - duration_ms) <= 2


def test_two_turns_in_one_event_are_two_items(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "create_response": False})
    hear(talk, 2 * (silence(1) + pcm(say(SENTENCES[0])) + silence(1)), size=20 * PCM_S)
    events = [event for _ in range(2) for event in talk.until("conversation.item.done")]
    assert [event["type"] for event in events] == TURN * 2
    assert events[2]["item_id"] == events[7]["previous_item_id"]
    assert talk.error("response.cancel")["code"] == "response_cancel_not_active"


def test_speech_cuts_the_answer_and_keeps_what_was_heard(talk: Session) -> None:
    item_id = answer(talk)
    hear(talk, pcm(say(SENTENCES[0])))
    talk.until("input_audio_buffer.speech_started")
    done = talk.until("response.done")[-1]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
    truncated = talk.until("conversation.item.truncated")[-1]
    assert truncated["item_id"] == item_id
    talk.send("conversation.item.retrieve", item_id=item_id)
    [part] = talk.until("conversation.item.retrieved")[-1]["item"]["content"]
    assert LONG.startswith(part["transcript"])
    assert len(part["transcript"].split()) <= truncated["audio_end_ms"] / 100 + 1  # each word takes 0.1 s
    hear(talk, silence(1))
    assert talk.until("response.done")[-1]["response"]["status"] == "completed"


def test_speech_cuts_nothing_if_it_may_not(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "interrupt_response": False})
    answer(talk)
    hear(talk, pcm(say(SENTENCES[0])) + silence(1))
    assert "response.done" not in [event["type"] for event in talk.until("input_audio_buffer.committed")]
    talk.send("response.cancel")
    done = talk.until("response.done")[-1]["response"]
    assert done["status_details"]["reason"] == "client_cancelled"


def test_an_answer_goes_on_through_a_backchannel(talk: Session) -> None:
    settings = {"type": "server_vad", "ignore_backchannels": True}
    talk.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": settings}}})
    assert talk.websocket.recv(60)  # the client's types do not know this extension
    item_id = answer(talk)
    hear(talk, silence(0.5) + pcm(say("Yeah.")) + silence(1))
    hear(talk, pcm(say(SENTENCES[-1])))
    events = talk.until("conversation.item.truncated")
    starts = [event for event in events if event["type"] == "input_audio_buffer.speech_started"]
    assert len(starts) == 1
    backchannel_ms = 1500 + len(say("Yeah.")) / 16
    assert starts[0]["audio_start_ms"] >= backchannel_ms - 400
    assert events[-1]["item_id"] == item_id


def test_a_user_who_says_nothing_is_answered(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "idle_timeout_ms": 5000})
    talk.ask("hello")
    talk.respond()
    hear(talk, silence(9))
    events = talk.until("response.done")
    assert [event["type"] for event in events[:2]] == [
        "input_audio_buffer.timeout_triggered",
        "input_audio_buffer.committed",
    ]
    waited_ms = events[0]["audio_end_ms"] - events[0]["audio_start_ms"]
    assert 5000 <= waited_ms <= 5000 + 32


def test_a_client_may_take_or_drop_a_turn_in_progress(talk: Session) -> None:
    speech = pcm(say(SENTENCES[0]))
    hear(talk, speech)
    started = talk.until("input_audio_buffer.speech_started")[-1]
    talk.send("input_audio_buffer.commit")
    assert talk.until("input_audio_buffer.committed")[-1]["item_id"] == started["item_id"]
    hear(talk, silence(1) + speech)
    assert talk.until("input_audio_buffer.speech_started")[-1]["item_id"] != started["item_id"]
    talk.send("input_audio_buffer.clear")
    assert talk.until("input_audio_buffer.cleared")
    hear(talk, silence(1))
    assert talk.error("response.cancel")["code"] == "response_cancel_not_active"  # there was no turn


def test_a_turn_that_fills_the_buffer_ends(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "silence_duration_ms": 60_000, "create_response": False})
    hear(talk, pcm(np.tile(say(SENTENCES[5]), 50))[: 125 * PCM_S], size=2 * PCM_S)
    events = talk.until("conversation.item.done")
    assert [event["type"] for event in events] == TURN
    assert abs(events[1]["audio_end_ms"] - 120_000) <= 2100


def test_a_turn_that_the_conversation_refuses_is_dropped(start: Start) -> None:
    with start("--session-items", "2") as server, session(server) as talk:
        talk.send("session.update", session={"truncation": "disabled"})
        talk.until("session.updated")
        talk.ask("one")
        talk.ask("two")
        speech = pcm(say(SENTENCES[0]))
        hear(talk, 2 * (silence(1) + speech + silence(1)), size=20 * PCM_S)
        for _ in range(2):
            events = talk.until("error")
            assert [event["type"] for event in events] == [*TURN[:2], "error"]
            assert events[-1]["error"]["code"] == "conversation_full"
        assert talk.error("input_audio_buffer.commit")["code"] == "conversation_full"


def test_telephone_speech_is_found(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "create_response": False}, format={"type": "audio/pcmu"})
    file = io.BytesIO()
    sound = np.concatenate([np.zeros(16_000, np.float32), say(SENTENCES[0]), np.zeros(16_000, np.float32)])
    soundfile.write(file, soxr.resample(sound, 16_000, 8000), 8000, format="RAW", subtype="ULAW")
    hear(talk, file.getvalue(), size=1000)
    assert [event["type"] for event in talk.until("conversation.item.done")] == TURN


def test_semantic_detection_finds_a_turn(talk: Session) -> None:
    shown = detect(talk, {"type": "semantic_vad", "eagerness": "high", "create_response": False})
    assert shown["eagerness"] == "high"
    speech = say(SENTENCES[0])
    hear(talk, silence(1) + pcm(speech) + silence(1))
    events = talk.until("conversation.item.done")
    assert [event["type"] for event in events] == TURN
    assert events[1]["audio_end_ms"] <= 1000 + len(speech) / 16 + 400


@pytest.mark.parametrize(
    ("detection", "param"),
    [
        ({"type": "other"}, "session.audio.input.turn_detection"),
        ({"type": "server_vad", "threshold": 2}, "session.audio.input.turn_detection.threshold"),
        ({"type": "server_vad", "idle_timeout_ms": 1}, "session.audio.input.turn_detection.idle_timeout_ms"),
        ({"type": "semantic_vad", "silence_duration_ms": 1}, "session.audio.input.turn_detection"),
    ],
)
def test_wrong_settings_are_refused_and_change_nothing(talk: Session, detection: dict[str, Any], param: str) -> None:
    error = talk.error("session.update", session={"audio": {"input": {"turn_detection": detection}}})
    assert error["param"].startswith(param)
    hear(talk, pcm(say(SENTENCES[0])) + silence(1))
    assert talk.until("input_audio_buffer.committed")
