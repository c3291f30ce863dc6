"""Realtime sessions on the pipeline "voice": spoken questions with noise, over OpenAI's own client."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from bench.turns import SENTENCES, converse, say
from omni_actors.serve.media.audio import pcm16
from omni_actors.serve.realtime.config import PCM
from omni_actors.serve.realtime.sound import decode
from tests.support.http_server import Api, Start, until
from tests.support.realtime import check_event, parts, pcm, session

pytestmark = [
    pytest.mark.voice,
    pytest.mark.slow,
    # The client calls websockets in a way that its newest version deprecates.
    pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning"),
]

QUESTION = "What is the capital of France?"
TRANSCRIPTION = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def question(voice: Api) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The question, spoken by the pipeline's own voice: float32 at 24 kHz."""
    with voice.openai() as client:
        data = client.audio.speech.create(model="voice", voice="any", input=QUESTION, response_format="pcm").content
    return decode(data, PCM())


def with_noise(samples: np.ndarray[Any, Any], db: float | None) -> bytes:
    """PCM16 of samples with white noise, so many dB below the speech."""
    if db is not None:
        noise = np.random.default_rng(7).standard_normal(len(samples))
        samples = samples + noise * np.sqrt(np.mean(samples**2)) * 10 ** (-db / 20)
    return pcm16(samples).tobytes()


def ask(connection: Any, sound: bytes) -> tuple[str, bytes, dict[str, Any]]:
    """Ask a spoken question; return the words and the sound of the answer, and the last event."""
    for audio in parts(sound, 4800):
        connection.input_audio_buffer.append(audio=audio)
    connection.input_audio_buffer.commit()
    connection.response.create()
    answer, words = b"", ""
    for event in connection:
        check_event(event.to_dict(mode="json"))
        if event.type == "response.output_audio.delta":
            answer += base64.b64decode(event.delta)
        elif event.type == "response.output_audio_transcript.delta":
            words += event.delta
        elif event.type == "response.done":
            return words, answer, event.to_dict()
    raise AssertionError("the connection ended")


@pytest.mark.parametrize("db", [None, 20.0, 10.0])
def test_a_spoken_question_is_answered_in_speech(voice: Api, question: np.ndarray[Any, Any], db: float | None) -> None:
    with voice.openai() as client, client.realtime.connect(model="voice") as connection:
        words, answer, done = ask(connection, with_noise(question, db))
        assert done["response"]["status"] == "completed"
        assert "Paris" in words
        assert 1 < len(answer) / 48000 < 10
        assert done["response"]["usage"]["output_tokens"] > 5
        with voice.openai() as other:
            wav = ("answer.wav", _wav(answer))
            heard = other.audio.transcriptions.create(model="voice", file=wav).text
        assert "paris" in heard.lower()


def test_telephone_sound(voice: Api, question: np.ndarray[Any, Any]) -> None:
    """G.711 at 8 kHz is heard and spoken."""
    file = io.BytesIO()
    soundfile.write(file, soxr.resample(question, 24000, 8000), 8000, format="RAW", subtype="ULAW")
    law: Any = {"format": {"type": "audio/pcmu"}}
    with voice.openai() as client, client.realtime.connect(model="voice") as connection:
        transcription = {"transcription": {"model": "whisper-1"}}
        config: Any = {"type": "realtime", "audio": {"input": {**law, **transcription}, "output": law}}
        connection.session.update(session=config)
        words, answer, _ = ask(connection, file.getvalue())
        assert "Paris" in words
        assert 1 < len(answer) / 8000 < 10


def test_a_function_is_called_and_the_answer_with_its_result_is_spoken(voice: Api) -> None:
    """The template of the model does not know tools. The second response may call the function again."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = {"type": "function", "name": "weather", "description": "The weather of a city.", "parameters": parameters}
    asked: Any = {"type": "realtime", "tools": [tool], "tool_choice": "auto"}
    question = "Is it warm in Rome? Look at its weather."
    with voice.openai() as client, client.realtime.connect(model="voice") as connection:
        connection.session.update(session=asked)
        connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": question}]}
        )
        connection.response.create(response={"tool_choice": {"type": "function", "name": "weather"}})
        found = until_done(connection)
        deltas = "".join(event.delta for event in found if event.type == "response.function_call_arguments.delta")
        [done] = [event for event in found if event.type == "response.function_call_arguments.done"]
        assert (done.name, done.arguments) == ("weather", deltas)
        assert json.loads(deltas)["city"] in ("Rome", "Oslo")
        [call] = found[-1].response.output
        assert (call.type, call.status, call.arguments) == ("function_call", "completed", deltas)
        assert not [event for event in found if event.type == "response.output_audio.delta"], "a call is not read out"
        connection.conversation.item.create(
            item={"type": "function_call_output", "call_id": call.call_id, "output": "It is 31 degrees in Rome."}
        )
        connection.response.create()
        found = until_done(connection)
        [message] = found[-1].response.output
        assert message.type == "message"
        assert "31" in message.content[0].transcript
        sound = [base64.b64decode(event.delta) for event in found if event.type == "response.output_audio.delta"]
    with voice.openai() as other:
        wav = ("answer.wav", _wav(b"".join(sound)))
        assert "rome" in other.audio.transcriptions.create(model="voice", file=wav).text.lower()


def until_done(connection: Any) -> list[Any]:
    """Return the events up to the end of the response."""
    found = []
    for event in connection:
        check_event(event.to_dict(mode="json"))
        assert event.type != "error", event
        found.append(event)
        if event.type == "response.done":
            assert event.response.status == "completed", event.response.status_details
            break
    return found


def test_an_answer_that_is_cut_keeps_the_words_that_were_heard(voice: Api) -> None:
    with voice.openai() as client, client.realtime.connect(model="voice") as connection:
        text = "Count from one to twenty in words."
        connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        )
        connection.response.create()
        sent, item_id = 0, ""
        for event in connection:
            if event.type == "response.output_audio.delta":
                sent, item_id = sent + len(base64.b64decode(event.delta)), event.item_id
                if sent > 48000:
                    connection.conversation.item.truncate(item_id=item_id, content_index=0, audio_end_ms=900)
                    break
        for event in connection:
            if event.type == "conversation.item.truncated":
                break
        connection.conversation.item.retrieve(item_id=item_id)
        event = connection.recv()
        assert event.type == "conversation.item.retrieved"
        item: Any = event.item
        assert item.status == "incomplete"
        assert 0 < len(re.findall(r"\w+", item.content[0].transcript)) <= 6  # 0.9 s of speech


def _wav(pcm: bytes) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(pcm, "<i2"), 24000, format="WAV")
    return file.getvalue()


SOUND = "response.output_audio.delta"


@pytest.mark.timeout(400)  # the pipeline and the stage load in it
@pytest.mark.parametrize(
    "stage", ["llm", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("acoustic", "vocoder"))]
)
def test_a_stage_that_is_killed_while_it_speaks_does_not_end_the_answer(start: Start, stage: str) -> None:
    text = "Tell me a short story about the sea."
    with start("-s", "stages.llm.threads=1", config="voice") as server, session(server) as talk:
        answers, pid = [], server.pid_of(stage)
        for is_killed in (False, True):
            item = talk.ask(text)
            talk.send("response.create", response={"conversation": "none", "max_output_tokens": 40})
            events = talk.until(
                "response.output_audio_transcript.delta" if stage == "llm" else "response.output_audio.delta"
            )
            if is_killed:
                os.kill(pid, signal.SIGKILL)
            events += talk.until("response.done")
            assert events[-1]["response"]["status"] in ("completed", "incomplete")
            deltas = [event["delta"] for event in events if event["type"] == SOUND]
            answers.append((events[-1]["response"]["output"][0]["content"], sum(map(len, deltas))))
            talk.send("conversation.item.delete", item_id=item["id"])
            talk.receive()
        assert answers[0] == answers[1]
        until(lambda: server.replica(stage)["restarts"] == 1, f"a new worker of {stage}")


@pytest.mark.timeout(400)  # the pipeline and the stage load in it
def test_a_turn_is_answered_if_whisper_is_killed_while_it_transcribes(start: Start) -> None:
    """Whisper hears windows of 30 s. The words of the first one arrive while it hears the others."""
    question = pcm(converse([say(sentence) for sentence in (*SENTENCES, QUESTION)], None).sound)
    with start("-s", "stages.llm.threads=1", config="voice") as server, session(server) as talk:
        audio = {"input": {"turn_detection": None, "transcription": {"model": "whisper-1"}}}
        talk.send("session.update", session={"type": "realtime", "audio": audio})
        answers, pid = [], server.pid_of("whisper")
        for is_killed in (False, True):
            talk.hear(question)
            talk.send("input_audio_buffer.commit")
            events = talk.until(f"{TRANSCRIPTION}.delta")
            if is_killed:
                os.kill(pid, signal.SIGKILL)
            events += talk.until(f"{TRANSCRIPTION}.completed")
            words = "".join(event["delta"] for event in events if event["type"] == f"{TRANSCRIPTION}.delta").strip()
            assert words == events[-1]["transcript"]
            done = talk.respond(max_output_tokens=40, output_modalities=["text"])[-1]["response"]
            answers.append((words, done["status"], done["output"][0]["content"]))
            talk.send("conversation.item.delete", item_id=events[-1]["item_id"])
            talk.until("conversation.item.deleted")
            talk.send("conversation.item.delete", item_id=done["output"][0]["id"])
            talk.until("conversation.item.deleted")
        assert answers[0] == answers[1]
        assert "capital of france" in answers[0][0].lower()
        until(lambda: server.replica("whisper")["restarts"] == 1, "a new worker of whisper")
