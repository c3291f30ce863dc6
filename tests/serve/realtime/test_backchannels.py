"""Short speech of the user while an answer is made and played, in sessions that ignore backchannels."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bench.turns import SENTENCES, say
from tests.serve.realtime.test_turns import PLAYING_ON, answer, spoken
from tests.support.http_server import Server, Start
from tests.support.realtime import PCM_S, Session, pcm, session, silence

pytestmark = pytest.mark.voice


def ignore_backchannels(talk: Session, **others: Any) -> None:
    settings = {"type": "server_vad", "ignore_backchannels": True, **others}
    talk.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": settings}}})
    assert talk.websocket.recv(60)  # the client's types do not know this extension


@pytest.mark.parametrize(
    ("backchannel", "interruption"), [("Yeah.", SENTENCES[-1]), ("Mm-hm.", "Mm-hm, but what about tomorrow?")]
)
def test_an_answer_goes_on_through_a_backchannel(talk: Session, backchannel: str, interruption: str) -> None:
    ignore_backchannels(talk)
    first, second = (pcm(say(text)) for text in (backchannel, interruption))  # it takes a while to make them
    item_id = answer(talk)
    time.sleep(1)  # its player has begun, before the speech does
    talk.hear(silence(0.5) + first + silence(1))
    talk.hear(second)
    events = talk.until("conversation.item.truncated")
    starts = [event for event in events if event["type"] == "input_audio_buffer.speech_started"]
    assert len(starts) == 1
    backchannel_ms = 1500 + len(say(backchannel)) / 16
    assert starts[0]["audio_start_ms"] >= backchannel_ms - 400
    assert events[-1]["item_id"] == item_id


def test_short_speech_before_an_answer_is_heard_is_a_turn(slow: Server) -> None:
    """An answer of "hush" has words without end, and no sound."""
    with session(slow, additional_headers={"authorization": "Bearer sesame"}) as talk:
        ignore_backchannels(talk)
        talk.ask("hush")
        talk.send("response.create")
        talk.until("response.output_audio_transcript.delta")
        talk.hear(pcm(say("In Rome?")) + silence(1))
        done = talk.until("response.done")[-1]["response"]
        assert done["status_details"]["reason"] == "turn_detected"
        assert talk.until("input_audio_buffer.committed")


@pytest.mark.slow
def test_an_answer_goes_on_through_a_backchannel_in_a_pause_of_its_sound(start: Start) -> None:
    """A word is played for 0.1 s, and the next one comes a second later."""
    with start("-s", "stages.mouth.options.step_s=1.0") as server, session(server) as talk:
        ignore_backchannels(talk)
        talk.ask("hello " * 40)
        talk.send("response.create")
        for _ in range(12):  # more is played than the time until speech is found
            talk.until("response.output_audio.delta")
        talk.hear(silence(0.5) + pcm(say("Yeah.")) + silence(1))
        talk.send("conversation.item.retrieve", event_id="last", item_id="x")
        types = [event["type"] for event in talk.until("error")]
        assert "response.done" not in types, types
        assert "input_audio_buffer.committed" not in types
        talk.send("response.cancel")


def test_short_speech_that_began_before_the_first_sound_is_a_turn(talk: Session) -> None:
    """It arrives together with a second of the microphone's sound, of which the answer was played for less.

    The answer is in progress, and has 0.3 s of sound.
    """
    ignore_backchannels(talk)
    speech = pcm(say("Yeah."))
    talk.ask("word endless")
    talk.send("response.create")
    talk.until("response.output_audio.delta")
    talk.hear(speech + bytes(PCM_S - len(speech) % PCM_S), size=PCM_S)
    done = talk.until("response.done")[-1]["response"]
    assert done["status_details"]["reason"] == "turn_detected"
    talk.hear(silence(1))
    assert talk.until("input_audio_buffer.committed")


def test_a_backchannel_is_a_turn_after_the_client_has_stopped_the_answer(talk: Session) -> None:
    ignore_backchannels(talk)
    answer(talk)
    for _ in range(7):
        talk.until("response.output_audio.delta")  # 1.6 s of sound
    talk.send("response.cancel")
    talk.until("response.done")
    talk.hear(silence(0.5) + pcm(say("Yeah.")) + silence(1))
    talk.send("conversation.item.retrieve", event_id="last", item_id="x")
    assert "input_audio_buffer.committed" in [event["type"] for event in talk.until("error")]


def test_the_wait_for_a_silent_user_begins_again_after_a_backchannel(talk_ahead: Session) -> None:
    talk = talk_ahead
    ignore_backchannels(talk, idle_timeout_ms=5000, create_response=False)
    backchannel = say("Yeah.")
    spoken(talk, PLAYING_ON)
    time.sleep(1)  # its player has begun, before the speech does
    talk.hear(pcm(backchannel) + silence(27 + 5 + 1))
    talk.send("conversation.item.retrieve", event_id="last", item_id="x")
    events = talk.until("error")
    assert "input_audio_buffer.speech_started" not in [event["type"] for event in events]
    [waited] = [event for event in events if event["type"] == "input_audio_buffer.timeout_triggered"]
    assert waited["audio_start_ms"] > len(backchannel) / 16
