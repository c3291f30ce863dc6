"""Sessions that find the user's turns in hibari's speech, on a pipeline without models."""

from __future__ import annotations

import base64
import io
import time
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from bench.turns import SENTENCES, say
from tests.support.http_server import Server, Start
from tests.support.realtime import PCM_S, Session, pcm, session, silence
from tests.support.served_engines import WORDLESS

pytestmark = pytest.mark.voice

TEXT: Any = {"output_modalities": ["text"]}
LONG = "word " * 100
"""The answer to this lasts 30 s."""
PLAYING_ON = "word " * 90
"""The answer to this lasts 27 s. In the session ``talk_ahead`` it ends at once, and plays on."""
TURN = [
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
]


@pytest.fixture(scope="module", autouse=True)
def _voice_is_loaded() -> None:
    """An answer would play on while it loads."""
    say(SENTENCES[0])


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


def recorded_ms(talk: Session, item_id: str) -> float:
    """Return the duration of an item's recording."""
    talk.send("conversation.item.retrieve", item_id=item_id)
    [part] = talk.until("conversation.item.retrieved")[-1]["item"]["content"]
    return len(base64.b64decode(part["audio"])) * 1000 / PCM_S


def test_a_session_finds_a_turn_and_answers_it(talk: Session) -> None:
    speech = say(SENTENCES[0])
    talk.hear(silence(1) + pcm(speech) + silence(1))
    events = talk.until("response.done")
    assert [event["type"] for event in events[:6]] == [*TURN, "response.created"]
    started, stopped, committed, added = events[:4]
    assert len({started["item_id"], stopped["item_id"], committed["item_id"], added["item"]["id"]}) == 1
    end_ms = 1000 + len(speech) / 16
    assert 1000 - 300 - 32 <= started["audio_start_ms"] <= 1000
    assert end_ms + 400 <= stopped["audio_end_ms"] <= end_ms + 600
    assert events[-1]["response"]["status"] == "completed"
    duration_ms = stopped["audio_end_ms"] - started["audio_start_ms"]
    assert recorded_ms(talk, committed["item_id"]) == pytest.approx(duration_ms, abs=2)


def test_two_turns_in_one_event_are_two_items(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "create_response": False})
    talk.hear(2 * (silence(1) + pcm(say(SENTENCES[0])) + silence(1)), size=20 * PCM_S)
    events = [event for _ in range(2) for event in talk.until("conversation.item.done")]
    assert [event["type"] for event in events] == TURN * 2
    assert events[2]["item_id"] == events[7]["previous_item_id"]
    assert talk.error("response.cancel")["code"] == "response_cancel_not_active"


def test_speech_cuts_the_answer_and_keeps_what_was_heard(talk: Session) -> None:
    item_id = answer(talk)
    for _ in range(7):
        talk.until("response.output_audio.delta")  # 1.6 s of sound: the player has it all, or plays on
    time.sleep(1)
    talk.hear(pcm(say(SENTENCES[0])))
    talk.until("input_audio_buffer.speech_started")
    done = talk.until("response.done")[-1]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
    truncated = talk.until("conversation.item.truncated")[-1]
    assert truncated["item_id"] == item_id
    assert truncated["audio_end_ms"] >= 900, "the player begins after 0.1 s"
    talk.send("conversation.item.retrieve", item_id=item_id)
    [part] = talk.until("conversation.item.retrieved")[-1]["item"]["content"]
    assert LONG.startswith(part["transcript"])
    words = len(part["transcript"].split())
    # Each word takes 0.1 s. While the sound is not complete, words count as longer, as in usual speech.
    assert truncated["audio_end_ms"] // 500 <= words <= truncated["audio_end_ms"] / 100 + 1
    talk.hear(silence(1))
    assert talk.until("response.done")[-1]["response"]["status"] == "completed"


def test_an_answer_that_is_cut_before_its_first_sound_keeps_no_word(slow: Server) -> None:
    """An answer of "hush" has words without end, and no sound."""
    with session(slow, additional_headers={"authorization": "Bearer sesame"}) as talk:
        talk.ask("hush")
        talk.send("response.create")
        item_id = talk.until("response.output_audio_transcript.delta")[-1]["item_id"]
        talk.hear(pcm(say(SENTENCES[0])))
        truncated = talk.until("conversation.item.truncated")[-1]
        assert (truncated["item_id"], truncated["audio_end_ms"]) == (item_id, 0)
        talk.send("conversation.item.retrieve", item_id=item_id)
        [part] = talk.until("conversation.item.retrieved")[-1]["item"]["content"]
        assert part["transcript"] == ""


def transcript(talk: Session, item_id: str) -> str:
    talk.send("conversation.item.retrieve", item_id=item_id)
    [part] = talk.until("conversation.item.retrieved")[-1]["item"]["content"]
    words: str = part["transcript"]
    return words


def spoken(talk: Session, text: str) -> str:
    """Have a text answered aloud; return the identifier of the answer's item. Each word lasts 0.3 s."""
    talk.ask(text)
    [item] = talk.respond()[-1]["response"]["output"]
    identifier: str = item["id"]
    return identifier


def test_speech_cuts_all_answers_that_play_each_at_what_was_heard_of_it(talk_ahead: Session) -> None:
    """The first one has ended and plays on, and the second one is played behind it."""
    talk = talk_ahead
    speech = pcm(say(SENTENCES[0]))
    first = spoken(talk, PLAYING_ON)
    second = answer(talk)
    talk.hear(speech)
    cuts = [talk.until("conversation.item.truncated")[-1] for _ in range(2)]
    assert [cut["item_id"] for cut in cuts] == [first, second]
    assert cuts[0]["audio_end_ms"] < 27_000
    assert cuts[1]["audio_end_ms"] == 0
    assert len(transcript(talk, first).split()) < 270
    assert transcript(talk, second) == ""


def test_speech_cuts_a_spoken_answer_behind_which_a_written_one_has_ended(talk_ahead: Session) -> None:
    talk = talk_ahead
    speech = pcm(say(SENTENCES[0]))
    item_id = spoken(talk, PLAYING_ON)
    talk.respond(**TEXT)
    talk.hear(speech)
    cut = talk.until("conversation.item.truncated")[-1]
    assert cut["item_id"] == item_id
    assert cut["audio_end_ms"] < 27_000
    assert len(transcript(talk, item_id).split()) < 270


def test_the_wait_for_a_silent_user_begins_when_all_answers_were_played(talk_ahead: Session) -> None:
    talk = talk_ahead
    detect(talk, {"type": "server_vad", "idle_timeout_ms": 5000, "create_response": False})
    spoken(talk, PLAYING_ON)
    talk.respond(**TEXT)
    talk.hear(silence(27 + 5 + 1))
    assert talk.until("input_audio_buffer.timeout_triggered")[-1]["audio_start_ms"] > 500


def test_speech_cuts_nothing_if_it_may_not(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "interrupt_response": False})
    answer(talk)
    talk.hear(pcm(say(SENTENCES[0])) + silence(1))
    assert "response.done" not in [event["type"] for event in talk.until("input_audio_buffer.committed")]
    talk.send("response.cancel")
    done = talk.until("response.done")[-1]["response"]
    assert done["status_details"]["reason"] == "client_cancelled"


@pytest.mark.parametrize("settings", [{}, {"interrupt_response": False}, {"create_response": False}])
def test_the_end_of_a_turn_cuts_an_answer_that_has_begun_meanwhile(talk: Session, settings: dict[str, Any]) -> None:
    """If it may not cut the answer, or gets none of its own, the answer goes on."""
    detect(talk, {"type": "server_vad", **settings})
    speech = pcm(say(SENTENCES[0]))
    half = len(speech) // 4 * 2
    talk.hear(speech[:half])
    talk.until("input_audio_buffer.speech_started")
    item_id = answer(talk)
    talk.hear(speech[half:] + silence(1))
    events = talk.until("input_audio_buffer.committed")
    if settings:
        assert "response.done" not in [event["type"] for event in events]
        return
    [done] = [event["response"] for event in events if event["type"] == "response.done"]
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
    [truncated] = [event for event in events if event["type"] == "conversation.item.truncated"]
    assert truncated["item_id"] == item_id
    assert talk.until("response.done")[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize("event", ["response.cancel", "output_audio_buffer.clear", "conversation.item.truncate"])
def test_speech_does_not_restore_the_words_that_the_client_dropped(talk: Session, event: str) -> None:
    item_id = answer(talk)
    for _ in range(7):
        talk.until("response.output_audio.delta")  # 1.6 s of sound
    if event != "conversation.item.truncate":
        talk.send(event)
        talk.until("response.done")
    talk.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=300)
    talk.until("conversation.item.truncated")
    talk.hear(pcm(say(SENTENCES[0])) + silence(1))
    assert "conversation.item.truncated" not in [each["type"] for each in talk.until("input_audio_buffer.committed")]
    talk.send("conversation.item.retrieve", item_id=item_id)
    [part] = talk.until("conversation.item.retrieved")[-1]["item"]["content"]
    assert len(part["transcript"].split()) <= 3


def test_a_user_who_says_nothing_is_answered(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "idle_timeout_ms": 5000})
    talk.ask("hello")
    talk.respond()
    talk.hear(silence(9))
    events = talk.until("response.done")
    assert [event["type"] for event in events[:2]] == [
        "input_audio_buffer.timeout_triggered",
        "input_audio_buffer.committed",
    ]
    waited_ms = events[0]["audio_end_ms"] - events[0]["audio_start_ms"]
    assert 5000 <= waited_ms <= 5000 + 32


def test_a_turn_without_words_gets_an_empty_response(talk: Session) -> None:
    def hear(prompt: str | None) -> dict[str, Any]:
        detect(talk, {"type": "server_vad"}, transcription={"prompt": prompt})
        talk.hear(pcm(say(SENTENCES[0])) + silence(1))
        response: dict[str, Any] = talk.until("response.done")[-1]["response"]
        return response

    talk.send("session.update", session=TEXT)
    talk.until("session.updated")
    assert hear(WORDLESS)["output"] == []
    assert hear(None)["output"] != []
    wordless = hear(WORDLESS)
    assert (wordless["status"], wordless["output"]) == ("completed", [])
    assert talk.respond()[-1]["response"]["output"] != [], "the client asks for it"


def test_a_turn_without_words_that_cuts_an_answer_before_its_first_sound_gets_an_answer(slow: Server) -> None:
    """An answer of "hush" has words without end, and no sound."""
    with session(slow, additional_headers={"authorization": "Bearer sesame"}) as talk:
        detect(talk, {"type": "server_vad"}, transcription={"prompt": WORDLESS})
        talk.ask("hush")
        talk.send("response.create")
        talk.until("response.output_audio_transcript.delta")
        talk.hear(pcm(say(SENTENCES[0])) + silence(1))
        assert talk.until("response.done")[-1]["response"]["status_details"]["reason"] == "turn_detected"
        talk.until("response.created")
        events = talk.until("response.output_item.added")
        assert "response.done" not in [event["type"] for event in events]


def test_a_user_is_not_asked_to_go_on_while_an_answer_is_in_progress(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "idle_timeout_ms": 5000})
    talk.ask("hello")
    talk.respond()
    item_id = answer(talk)
    talk.hear(silence(9))
    talk.send("conversation.item.retrieve", item_id=item_id)
    events = talk.until("conversation.item.retrieved")
    assert "input_audio_buffer.timeout_triggered" not in [event["type"] for event in events]
    talk.send("response.cancel")
    talk.until("response.done")
    talk.hear(silence(9))
    talk.until("input_audio_buffer.timeout_triggered")
    talk.until("response.created")
    talk.send("response.cancel")
    talk.until("response.done")


def test_speech_in_progress_keeps_its_begin_when_the_detection_changes(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "create_response": False})
    speech = pcm(say(SENTENCES[0]))
    half = len(speech) // 4 * 2
    talk.hear(silence(1) + speech[:half])
    started = talk.until("input_audio_buffer.speech_started")[-1]
    detect(talk, {"type": "server_vad", "create_response": False, "silence_duration_ms": 300})
    talk.hear(speech[half:] + silence(1))
    stopped, committed, *_ = talk.until("conversation.item.done")
    assert stopped["type"] == "input_audio_buffer.speech_stopped"
    assert started["item_id"] == stopped["item_id"] == committed["item_id"]
    end_ms = 1000 + len(speech) * 1000 / PCM_S
    assert end_ms + 200 <= stopped["audio_end_ms"] <= end_ms + 400
    assert recorded_ms(talk, committed["item_id"]) == pytest.approx(
        stopped["audio_end_ms"] - started["audio_start_ms"], abs=2
    )


def test_speech_that_a_client_has_sent_before_the_detection_is_judged(talk: Session) -> None:
    detect(talk, None)
    talk.hear(silence(1) + pcm(say(SENTENCES[0])) + silence(1))
    detect(talk, {"type": "server_vad", "create_response": False})
    assert [event["type"] for event in talk.until("conversation.item.done")] == TURN


def test_a_response_out_of_the_conversation_is_no_part_of_turn_taking(talk: Session) -> None:
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]}
    talk.send("response.create", response={"conversation": "none", "input": [question]})
    apart = talk.until("response.output_audio.delta")[-1]["response_id"]
    talk.hear(silence(1) + pcm(say(SENTENCES[0])) + silence(1))
    events = talk.until("response.created")
    assert events[-1]["response"]["id"] != apart
    done = talk.until("response.done")[-1]["response"]
    assert (done["id"] != apart, done["status"]) == (True, "completed")
    talk.send("response.cancel", response_id=apart)
    done = talk.until("response.done")[-1]["response"]
    assert (done["id"], done["status_details"]["reason"]) == (apart, "client_cancelled")


def test_a_client_may_take_or_drop_a_turn_in_progress(talk: Session) -> None:
    speech = pcm(say(SENTENCES[0]))
    talk.hear(speech)
    started = talk.until("input_audio_buffer.speech_started")[-1]
    talk.send("input_audio_buffer.commit")
    assert talk.until("input_audio_buffer.committed")[-1]["item_id"] == started["item_id"]
    talk.hear(silence(1) + speech)
    assert talk.until("input_audio_buffer.speech_started")[-1]["item_id"] != started["item_id"]
    talk.send("input_audio_buffer.clear")
    assert talk.until("input_audio_buffer.cleared")
    talk.hear(silence(1))
    assert talk.error("response.cancel")["code"] == "response_cancel_not_active"  # there was no turn


def test_a_turn_that_fills_the_buffer_ends(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "silence_duration_ms": 60_000, "create_response": False})
    talk.hear(pcm(np.tile(say(SENTENCES[5]), 50))[: 125 * PCM_S], size=2 * PCM_S)
    events = talk.until("conversation.item.done")
    assert [event["type"] for event in events] == TURN
    assert abs(events[1]["audio_end_ms"] - 120_000) <= 2100


def test_a_turn_that_the_conversation_refuses_is_dropped(start: Start) -> None:
    with start("--session-items", "2") as server, session(server) as talk:
        talk.send("session.update", session={"truncation": "disabled"})
        talk.until("session.updated")
        one = talk.ask("one")
        talk.ask("two")
        speech = pcm(say(SENTENCES[0]))
        talk.hear(2 * (silence(1) + speech + silence(1)), size=20 * PCM_S)
        for _ in range(2):
            events = talk.until("error")
            assert [event["type"] for event in events] == [*TURN[:2], "error"]
            assert events[-1]["error"]["code"] == "conversation_full"
        talk.hear(speech[: len(speech) // 4 * 2])
        started = talk.until("input_audio_buffer.speech_started")[-1]
        assert talk.error("input_audio_buffer.commit")["code"] == "conversation_full"
        talk.send("conversation.item.delete", item_id=one["id"])
        talk.hear(speech[len(speech) // 4 * 2 :] + silence(1))
        assert talk.until("input_audio_buffer.committed")[-1]["item_id"] == started["item_id"], "it was not forgotten"


def test_telephone_speech_is_found(talk: Session) -> None:
    detect(talk, {"type": "server_vad", "create_response": False}, format={"type": "audio/pcmu"})
    file = io.BytesIO()
    sound = np.concatenate([np.zeros(16_000, np.float32), say(SENTENCES[0]), np.zeros(16_000, np.float32)])
    soundfile.write(file, soxr.resample(sound, 16_000, 8000), 8000, format="RAW", subtype="ULAW")
    talk.hear(file.getvalue(), size=1000)
    assert [event["type"] for event in talk.until("conversation.item.done")] == TURN


def test_semantic_detection_finds_a_turn(talk: Session) -> None:
    shown = detect(talk, {"type": "semantic_vad", "eagerness": "high", "create_response": False})
    assert shown["eagerness"] == "high"
    speech = say(SENTENCES[0])
    talk.hear(silence(1) + pcm(speech) + silence(1))
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
    talk.hear(pcm(say(SENTENCES[0])) + silence(1))
    assert talk.until("input_audio_buffer.committed")
