"""The words of the user's recordings: languages, transcripts that fail, and what answers then know."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
from typing import Any

import pytest

from omni_actors.serve.media.base64_data import to_base64
from tests.support.frozen import freeze
from tests.support.http_server import Server, Start
from tests.support.realtime import PCM_S, Session, session, silence
from tests.support.served_engines import REFUSED_S, WORD_S

FAILED = "conversation.item.input_audio_transcription.failed"
COMPLETED = "conversation.item.input_audio_transcription.completed"
REPORTER = """\
name: reporter
stages:
  ear: {engine: "tests.support.served_engines:Ear", accepts: [audio], emits: transcript}
  mind: {engine: "tests.support.served_engines:Eye", accepts: [messages], inputs: [ear], emits: text}
"""
"""A pipeline that answers with the conversation that it was given."""
TEXT: Any = {"output_modalities": ["text"]}


def transcribe(talk: Session, **settings: Any) -> dict[str, Any]:
    """Ask for transcripts; return what the session says of them."""
    audio = {"input": {"turn_detection": None, "transcription": settings}}
    talk.send("session.update", session={"type": "realtime", "audio": audio})
    shown: dict[str, Any] = talk.receive()["session"]["audio"]["input"]["transcription"]
    return shown


def say(talk: Session, *parts: dict[str, Any]) -> str:
    """Add a message of the user; return the text of the error of its transcript, or the transcript."""
    talk.send("conversation.item.create", item={"type": "message", "role": "user", "content": list(parts)})
    while (event := talk.receive())["type"] not in (FAILED, COMPLETED):
        pass
    return str(event["transcript"] if event["type"] == COMPLETED else event["error"]["code"])


def recording(seconds: float) -> dict[str, Any]:
    return {"type": "input_audio", "audio": to_base64(silence(seconds))}


def written(events: list[dict[str, Any]]) -> str:
    """The text of an answer, which repeats its question three times."""
    response = events[-1]["response"]
    assert response["status"] == "completed", response["status_details"]
    text: str = response["output"][0]["content"][0]["text"]
    assert len(text) % 3 == 0
    assert text == text[: len(text) // 3] * 3
    return text[: len(text) // 3]


def test_a_stage_that_is_killed_while_the_user_speaks_costs_nothing(start: Start) -> None:
    with start() as server:
        for stage in ("ear", "mind", "mouth"):
            with session(server) as talk:
                transcribe(talk)
                talk.hear(silence(0.5))
                assert talk.error("response.cancel")["code"] == "response_cancel_not_active"  # the sound has arrived
                os.kill(server.pid_of(stage), signal.SIGKILL)
                talk.hear(silence(0.5))
                talk.send("input_audio_buffer.commit")
                while (event := talk.receive())["type"] not in (FAILED, COMPLETED):
                    pass
                assert event.get("transcript") == "1.0 s at 24000 Hz", (stage, event)
                events = talk.respond()
                response = events[-1]["response"]
                assert response["status"] == "completed", (stage, response["status_details"])
                [item] = response["output"]
                assert item["content"] == [{"type": "output_audio", "transcript": "1.0 s at 24000 Hz" * 3}], stage
                sound = [event["delta"] for event in events if event["type"] == "response.output_audio.delta"]
                seconds = sum(len(base64.b64decode(each)) for each in sound) / PCM_S
                assert seconds == pytest.approx(15 * WORD_S, abs=0.01), stage  # three times five words
            server.wait(lambda: server.status() == "ready", "the restart")
            assert server.replica(stage)["restarts"] == 1


def test_a_language_that_the_model_does_not_know_is_refused(talk_ahead: Session) -> None:
    """By a server that waits for its transcriber: others accept a language that cannot be checked in time."""
    talk = talk_ahead
    name = "session.audio.input.transcription.language"
    for language in ("xx", "?", "", "x" * 40):
        audio = {"input": {"transcription": {"language": language}}}
        assert talk.error("session.update", session={"audio": audio})["param"] == name
    assert transcribe(talk, language="de")["language"] == "de"
    assert talk.error("session.update", session={"audio": {"input": {"transcription": {"language": "xx"}}}})
    assert say(talk, recording(0.5)) == "0.5 s at 24000 Hz"


def test_a_prompt_is_passed_to_the_transcriber(talk: Session) -> None:
    assert transcribe(talk, prompt="Dear Zoë")["prompt"] == "Dear Zoë"
    assert say(talk, recording(0.5)) == "0.5 s at 24000 Hz, Dear Zoë"
    assert transcribe(talk, prompt="")["prompt"] == ""
    assert say(talk, recording(0.5)) == "0.5 s at 24000 Hz"
    long = {"audio": {"input": {"transcription": {"prompt": "x" * 4097}}}}
    assert "<= 4096" in talk.error("session.update", session=long)["message"]


def test_a_prompt_is_refused_where_no_stage_takes_it(start: Start) -> None:
    with start(config="echo") as server, session(server) as talk:
        error = talk.error("session.update", session={"audio": {"input": {"transcription": {"prompt": "Dear Zoë"}}}})
        name = "session.audio.input.transcription.prompt"
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert error["message"] == f"{name}: no stage of 'echo' takes one; accepted: '', null"


@pytest.mark.slow
def test_events_behind_a_language_that_cannot_be_checked_are_taken_in_order(start: Start) -> None:
    """The transcriber is stopped. Its death would end the wait too, so it is alive at the end."""
    with start() as server, session(server) as talk:
        ear = server.pid_of("ear")
        freeze(ear)
        sound = random.Random(1).randbytes(20 * PCM_S)
        audio = {"input": {"turn_detection": None, "transcription": {"language": "de"}}}
        talk.send("session.update", session={"audio": audio})
        talk.hear(sound)
        talk.send("input_audio_buffer.commit")
        assert talk.receive()["session"]["audio"]["input"]["transcription"]["language"] == "de"
        item = talk.until("conversation.item.done")[-1]["item"]
        talk.send("conversation.item.retrieve", item_id=item["id"])
        kept = talk.receive()["item"]["content"][0]["audio"]
        assert base64.b64decode(kept) == sound
        assert server.pid_of("ear") == ear
        os.kill(ear, signal.SIGCONT)
        assert talk.until(COMPLETED)[-1]["transcript"] == "20.0 s at 24000 Hz"


def test_a_session_is_gone_after_a_refused_language(start: Start) -> None:
    """Resamplers that are left at the end of the process are reported on stderr."""
    with start(module="tests.support.far_ahead_server") as server:
        with session(server) as talk:
            assert talk.error("session.update", session={"audio": {"input": {"transcription": {"language": "xx"}}}})
        assert server.ends_by(signal.SIGINT)[1] == ""


def test_an_answer_about_a_recording_without_words_fails_and_later_ones_do_not(talk: Session) -> None:
    transcribe(talk)
    assert say(talk, recording(REFUSED_S)) == "invalid_value"
    failed = talk.respond(**TEXT)[-1]["response"]
    assert (failed["status"], failed["status_details"]["error"]["code"]) == ("failed", "invalid_value")
    say(talk, recording(0.5))
    assert written(talk.respond(**TEXT)) == "0.5 s at 24000 Hz"


def test_an_answer_about_text_does_not_need_the_words_of_an_older_recording(talk: Session) -> None:
    transcribe(talk)
    assert say(talk, recording(REFUSED_S)) == "invalid_value"
    for text in ("one", "two"):
        talk.ask(text)
        assert written(talk.respond(**TEXT)) == text
    system = {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]}
    assert say(talk, recording(REFUSED_S)) == "invalid_value"
    talk.send("conversation.item.create", item=system)
    talk.until("conversation.item.done")
    assert talk.respond(**TEXT)[-1]["response"]["status"] == "failed", "the user said nothing after the recording"


def test_the_text_beside_a_recording_without_words_is_kept(start: Start) -> None:
    with start(config=REPORTER) as server, session(server) as talk:
        transcribe(talk)
        assert say(talk, recording(REFUSED_S), {"type": "input_text", "text": "and this"}) == "invalid_value"
        assert say(talk, recording(0.5)) == "0.5 s at 24000 Hz"
        [item] = talk.respond(**TEXT)[-1]["response"]["output"]
        asked = json.loads(item["content"][0]["text"].splitlines()[-1])
        assert [message["content"] for message in asked["messages"]] == ["and this", "0.5 s at 24000 Hz"]


def test_a_conversation_that_a_strict_template_refuses_is_tried_again_with_messages_joined(start: Start) -> None:
    with start(config=REPORTER.replace(":Eye", ":Strict")) as server, session(server) as talk:
        transcribe(talk)
        talk.ask("one")
        assert say(talk, recording(0.5)) == "0.5 s at 24000 Hz"
        talk.ask("two")
        [item] = talk.respond(**TEXT)[-1]["response"]["output"]
        asked = json.loads(item["content"][0]["text"].splitlines()[-1])
        assert asked["messages"] == [{"role": "user", "content": "one\n0.5 s at 24000 Hz\ntwo"}]


def test_a_transcript_that_failed_is_made_again_for_the_next_answer(slow: Server) -> None:
    """The server admits two requests, and its answers do not end."""
    slow.wait_metric("omni_requests_in_flight", 0)  # those of the tests before
    key = {"additional_headers": {"authorization": "Bearer sesame"}}
    with session(slow, **key) as other, session(slow, **key) as talk:
        transcribe(talk)
        other.ask("hello")
        for conversation in ("auto", "none"):
            other.send("response.create", response={**TEXT, "conversation": conversation})
            other.until("response.output_text.delta")
        assert say(talk, recording(0.5)) == "overloaded"
        events = talk.respond(**TEXT)
        assert FAILED in [event["type"] for event in events]
        assert events[-1]["response"]["status_details"]["error"]["code"] == "overloaded"
        other.send("response.cancel")
        other.until("response.done")
        talk.send("response.create", response=TEXT)
        assert talk.until(COMPLETED)[-1]["transcript"] == "0.5 s at 24000 Hz"
        talk.until("response.output_text.delta")
        talk.send("response.cancel")
        assert talk.until("response.done")[-1]["response"]["status"] == "cancelled"
