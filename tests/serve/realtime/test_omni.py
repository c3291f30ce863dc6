"""Hands-free sessions on both omni families: tiny checkpoints with random weights, each opened by its directory."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.turns import RATE, converse, say
from tests.support.http_server import Server, Start
from tests.support.realtime import Session, pcm, session

pytestmark = [pytest.mark.voice, pytest.mark.slow]

TOKENS, CODES = 12, 21
"""Tokens of text and codes, or frames of codes, of speech in every answer."""
QUESTIONS = ("Who wrote that book?", "When I was young, we lived in a small house by the sea.")
LAST_STAGE = {"qwen3": "code2wav", "qwen2_5": "token2wav"}


@pytest.fixture(scope="module", params=[*LAST_STAGE])
def omni(request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one family. Its answers end at their limits."""
    from tiny_models import qwen2_5, qwen3

    family = request.param
    directory = {"qwen3": qwen3, "qwen2_5": qwen2_5}[family].save(
        tmp_path_factory.mktemp(family), text_eos=0.0, codec_eos=0.0
    )
    settings = [f"stages.thinker.defaults.max_tokens={TOKENS}", f"stages.talker.defaults.talker_max_tokens={CODES}"]
    for stage in ("thinker", "talker", LAST_STAGE[family]):
        settings += [f"stages.{stage}.threads=1"]
    for stage in ("thinker", "talker"):
        settings += [f"stages.{stage}.options.context=2048"]
    with start(*(part for each in settings for part in ("-s", each)), config=str(directory)) as server:
        yield server


def speak(talk: Session, text: str) -> list[dict[str, Any]]:
    """Say a sentence with pauses around it; return the events of the turn and of its answer."""
    talk.hear(pcm(converse([say(text)], 20).sound))
    return talk.until("response.done")


def test_a_session_hears_and_speaks(omni: Server) -> None:
    with session(omni) as talk:
        tokens = []
        for question in QUESTIONS:
            events = speak(talk, question)
            names = [event["type"] for event in events]
            assert names.count("input_audio_buffer.committed") == 1
            done = events[-1]["response"]
            assert done["status"] == "incomplete", done["status_details"]
            assert done["status_details"]["reason"] == "max_output_tokens"
            assert done["usage"]["output_tokens"] == TOKENS
            tokens.append(done["usage"]["input_tokens"])
            [part] = done["output"][0]["content"]
            deltas = [event["delta"] for event in events if event["type"] == "response.output_audio_transcript.delta"]
            assert part["transcript"] == "".join(deltas) != ""
            sound = [event["delta"] for event in events if event["type"] == "response.output_audio.delta"]
            samples = np.frombuffer(b"".join(map(base64.b64decode, sound)), "<i2")
            assert len(samples) > 2400
            assert np.abs(samples).max() > 0
        spoken_s = len(say(QUESTIONS[1])) / RATE
        assert tokens[1] - tokens[0] > 10 * spoken_s, "the thinkers hear 13 and 25 tokens a second"


def test_the_assistant_speaks_first_in_a_voice_of_openais(omni: Server) -> None:
    """With instructions of the session, of the response, and with none."""
    with session(omni) as talk:
        talk.send("session.update", session={"type": "realtime", "audio": {"output": {"voice": "marin"}}})
        assert talk.until("session.updated")[-1]["session"]["audio"]["output"]["voice"] == "marin"
        for response in ({}, {"instructions": "Greet the user.", "conversation": "none", "input": []}):
            done = talk.respond(**response)[-1]["response"]
            assert done["status"] == "incomplete", done["status_details"]
            assert done["status_details"]["reason"] == "max_output_tokens"
        error = talk.error("session.update", session={"audio": {"output": {"speed": 1.25}}})
        assert (error["code"], error["param"]) == ("unsupported_parameter", "session.audio.output.speed")
        error = talk.respond(audio={"output": {"voice": "nobody"}})[-1]["response"]["status_details"]["error"]
        assert "nobody" in error["message"]


def test_the_user_may_talk_over_an_answer_and_have_the_words_written(omni: Server) -> None:
    with session(omni) as talk:
        asked = {"input": {"transcription": {"model": "any"}}}
        talk.send("session.update", session={"type": "realtime", "audio": asked})
        talk.until("session.updated")
        events = speak(talk, QUESTIONS[0])
        name = "conversation.item.input_audio_transcription.completed"
        written = [event for event in events if event["type"] == name] or talk.until(name)
        assert written[-1]["transcript"] != ""
        talk.send("response.create", response={"max_output_tokens": 400})
        talk.until("response.output_audio.delta")
        events = speak(talk, QUESTIONS[1])
        assert events[-1]["response"]["status_details"]["reason"] == "turn_detected"
        talk.until("conversation.item.truncated")
        assert talk.until("response.done")[-1]["response"]["status"] == "incomplete"
