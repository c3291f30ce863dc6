"""The turn detection changes while a turn is in progress, or while the session waits for the user to speak."""

from __future__ import annotations

from typing import Any

import pytest

from bench.turns import SENTENCES, say
from tests.serve.realtime.test_turns import TEXT, TURN, answer, detect
from tests.support.realtime import Session, pcm, silence

pytestmark = pytest.mark.voice

STARTED, STOPPED = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"


def begin_turn(talk: Session) -> str:
    """Have the user begin a sentence; return the identifier of the turn's item."""
    speech = pcm(say(SENTENCES[0]))
    talk.hear(silence(1) + speech[: len(speech) // 4 * 2])
    item_id: str = talk.until(STARTED)[-1]["item_id"]
    return item_id


def test_a_turn_that_the_client_commits_itself_keeps_its_item(talk: Session) -> None:
    item_id = begin_turn(talk)
    detect(talk, None)
    talk.send("input_audio_buffer.commit")
    assert talk.until("input_audio_buffer.committed")[-1]["item_id"] == item_id
    talk.hear(silence(1))
    talk.send("input_audio_buffer.commit")
    assert talk.until("input_audio_buffer.committed")[-1]["item_id"] != item_id


def test_a_turn_that_the_client_clears_itself_leaves_no_item(talk: Session) -> None:
    item_id = begin_turn(talk)
    detect(talk, None)
    talk.send("input_audio_buffer.clear")
    talk.hear(silence(1))
    talk.send("input_audio_buffer.commit")
    assert talk.until("input_audio_buffer.committed")[-1]["item_id"] != item_id


def test_a_turn_goes_on_when_the_detection_is_off_for_a_while(talk: Session) -> None:
    speech = pcm(say(SENTENCES[0]))
    item_id = begin_turn(talk)
    detect(talk, None)
    talk.hear(speech[len(speech) // 4 * 2 :] + silence(1))
    detect(talk, {"type": "server_vad", "create_response": False})
    events = talk.until("conversation.item.done")
    assert [event["type"] for event in events] == TURN[1:]
    assert events[1]["item_id"] == item_id


def test_a_turn_that_new_settings_find_a_little_later_goes_on(talk: Session) -> None:
    """It has just begun. With a threshold of 0.9, it needs 160 ms more to be found than with the default."""
    sound = silence(1) + pcm(say(SENTENCES[2])) + silence(1)
    begun = 2 * 24 * 1200
    detect(talk, {"type": "server_vad", "create_response": False})
    talk.hear(sound[:begun])
    item_id = talk.until(STARTED)[-1]["item_id"]
    detect(talk, {"type": "server_vad", "threshold": 0.9, "create_response": False})
    talk.hear(sound[begun:])
    events = talk.until("conversation.item.done")
    assert [event["type"] for event in events] == TURN[1:]
    assert events[0]["item_id"] == item_id


def test_a_turn_that_new_settings_find_later_in_the_buffer_goes_on(talk: Session) -> None:
    """With a threshold of 0, it begins seconds before the speech."""
    speech = pcm(say(SENTENCES[0]))
    detect(talk, {"type": "server_vad", "threshold": 0.0, "create_response": False})
    talk.hear(silence(3) + speech[: len(speech) // 4 * 2])
    item_id = talk.until(STARTED)[-1]["item_id"]
    detect(talk, {"type": "server_vad", "create_response": False})
    talk.hear(speech[len(speech) // 4 * 2 :] + silence(1))
    events = talk.until("conversation.item.done")
    assert [event["type"] for event in events] == TURN[1:]
    assert events[0]["item_id"] == item_id


def test_a_turn_that_new_settings_do_not_find_is_stopped(talk: Session) -> None:
    """With a threshold of 0, everything is speech."""
    detect(talk, {"type": "server_vad", "threshold": 0.0, "create_response": False})
    talk.hear(silence(1))
    item_id = talk.until(STARTED)[-1]["item_id"]
    detect(talk, {"type": "server_vad", "create_response": False})
    stopped = talk.until(STOPPED)[-1]
    assert stopped["item_id"] == item_id
    assert 900 <= stopped["audio_end_ms"] <= 1000
    talk.hear(silence(20) + pcm(say(SENTENCES[0])) + silence(1))
    events = talk.until("conversation.item.done")
    assert [event["type"] for event in events] == TURN
    assert events[0]["item_id"] != item_id
    assert events[0]["audio_start_ms"] > 20_000


def test_an_announced_turn_is_no_backchannel(talk: Session) -> None:
    """The settings under which it would be one come when it has begun."""
    settings: dict[str, Any] = {"type": "server_vad", "create_response": False, "interrupt_response": False}
    detect(talk, settings)
    answer(talk)
    speech = pcm(say("Yeah."))
    talk.hear(silence(0.5) + speech[: len(speech) // 4 * 2])
    item_id = talk.until(STARTED)[-1]["item_id"]
    settings |= {"interrupt_response": True, "ignore_backchannels": True}
    # The client's types do not know this extension, so the answer to the update is not checked.
    talk.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": settings}}})
    while '"session.updated"' not in str(talk.websocket.recv(60)):
        pass
    talk.hear(speech[len(speech) // 4 * 2 :] + silence(1))
    assert talk.until("input_audio_buffer.committed")[-1]["item_id"] == item_id


@pytest.mark.parametrize("heard_s", [0.0, 3.0])
def test_the_wait_for_a_silent_user_goes_on_when_the_detection_changes(talk: Session, heard_s: float) -> None:
    settings = {"type": "server_vad", "idle_timeout_ms": 5000, "create_response": False}
    detect(talk, settings)
    talk.hear(silence(1))
    talk.ask("hello")
    talk.respond(**TEXT)
    talk.hear(silence(heard_s))
    detect(talk, {**settings, "silence_duration_ms": 600})
    talk.hear(silence(9 - heard_s))
    waited = talk.until("input_audio_buffer.timeout_triggered")[-1]
    assert 1000 - 32 <= waited["audio_start_ms"] <= 1000 + 32
    assert 5000 <= waited["audio_end_ms"] - waited["audio_start_ms"] <= 5000 + 64
