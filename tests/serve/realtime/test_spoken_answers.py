"""The sound of answers: when it leaves, and what is kept of an answer that is cut, cleared or deleted."""

from __future__ import annotations

import base64
import json
import time

import numpy as np
import pytest
import trio
from starlette.websockets import WebSocket

from omni_actors.outputs import AudioChunk
from omni_actors.serve.realtime.conversation import Conversation, Entry, has_open_question
from omni_actors.serve.realtime.items import Message, Part
from omni_actors.serve.realtime.outbox import Outbox
from omni_actors.serve.realtime.response_events import ResponseEvents
from tests.support.realtime import PCM_S, Session
from tests.support.served_engines import WORD_S


def test_a_spoken_answer_is_paced_cancelled_and_truncated(talk: Session) -> None:
    talk.ask("word " * 100)  # 30 s of sound
    talk.send("response.create")
    began = time.monotonic()
    for _ in range(5):
        talk.until("response.output_audio.delta")
    talk.send("response.cancel")
    events = talk.until("response.done")
    most = 5 + 1 + (2 + time.monotonic() - began) / 0.2  # 0.2 s each, 2 s ahead
    response = events[-1]["response"]
    assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "client_cancelled")
    [item] = response["output"]
    assert item["status"] == "incomplete"
    assert sum(event["type"] == "response.output_audio.delta" for event in events) < most < 150
    before = item["content"][0]["transcript"].split()
    assert 3 <= len(before) < most * 0.2 / WORD_S + 2, (
        "words that were written, and of which no sound was sent, are dropped"
    )
    place = {"item_id": item["id"], "content_index": 0}
    assert talk.error("conversation.item.truncate", **place, audio_end_ms=60_000)["param"] == "audio_end_ms"
    talk.send("conversation.item.truncate", **place, audio_end_ms=150)
    truncated = talk.receive()
    truncated.pop("event_id")
    assert truncated == {"type": "conversation.item.truncated", **place, "audio_end_ms": 150}
    talk.send("conversation.item.retrieve", item_id=item["id"])
    kept = talk.receive()["item"]["content"][0]["transcript"].split()
    assert len(kept) < len(before)
    assert before[: len(kept)] == kept


def test_sound_leaves_little_ahead_of_the_player_when_answers_follow_each_other(talk: Session) -> None:
    """Two answers of 1.8 s. The last sound leaves when the player has 2 s or less, and lasts 0.2 s."""
    talk.ask("word " * 6)
    began = time.monotonic()
    for _ in range(2):
        assert talk.respond()[-1]["response"]["status"] == "completed"
        talk.ask("word " * 6)
    assert time.monotonic() - began >= 2 * 1.8 - 2.0 - 0.2


def test_each_sound_says_which_words_have_been_heard_by_its_end_if_the_client_asks_for_it(talk: Session) -> None:
    talk.send("session.update", session={"audio": {"output": {"word_timing": True}}})
    talk.websocket.recv(60)  # the client's types do not know this extension
    talk.ask("word " * 10)
    talk.send("response.create")
    sounds, transcript = list[tuple[float, int]](), ""
    while (event := json.loads(talk.websocket.recv(60)))["type"] != "response.done":
        if event["type"] == "response.output_audio_transcript.delta":
            transcript += event["delta"]
        elif event["type"] == "response.output_audio.delta":
            end_s = (sounds[-1][0] if sounds else 0) + len(base64.b64decode(event["delta"])) / PCM_S
            sounds.append((end_s, event["transcript_end"]))
    ends = [end for _, end in sounds]
    assert ends == sorted(ends)
    assert ends[-1] == len(transcript)
    # The words have the same length and duration. They are faster than the usual pace, by which the server judges until
    # it has all sound.
    sound_s = sounds[-1][0]
    assert all(end / len(transcript) < at_s / sound_s + 0.1 for at_s, end in sounds), sounds
    assert "word_timing" not in event["response"]["audio"]["output"]


@pytest.mark.parametrize(("law", "rate"), [("audio/pcm", PCM_S), ("audio/pcmu", 8000)])
def test_an_answer_may_be_truncated_at_its_exact_end(talk: Session, law: str, rate: int) -> None:
    format = {"type": law, **({"rate": 24000} if law == "audio/pcm" else {})}
    talk.send("session.update", session={"audio": {"output": {"format": format}}})
    talk.until("session.updated")
    for words in range(1, 7):
        talk.ask("word " * words)
        pieces = [event for event in talk.respond() if event["type"] == "response.output_audio.delta"]
        end_ms = sum(len(base64.b64decode(piece["delta"])) for piece in pieces) * 1000 // rate
        place = {"item_id": pieces[0]["item_id"], "content_index": 0}
        assert talk.error("conversation.item.truncate", **place, audio_end_ms=end_ms + 1)["param"] == "audio_end_ms"
        talk.send("conversation.item.truncate", **place, audio_end_ms=end_ms)
        assert talk.receive()["type"] == "conversation.item.truncated"


def test_an_item_that_is_deleted_while_it_is_spoken_is_not_done(talk: Session) -> None:
    talk.ask("word " * 50)
    talk.send("response.create")
    item_id = talk.until("response.output_audio.delta")[-1]["item_id"]
    talk.send("conversation.item.delete", item_id=item_id)
    talk.send("response.cancel")
    order = [event["type"] for event in talk.until("response.done")]
    assert "conversation.item.deleted" in order
    assert "conversation.item.done" not in order
    assert order[-2:] == ["response.output_item.done", "response.done"]


def test_a_truncation_that_is_refused_leaves_the_answer_running(talk: Session) -> None:
    talk.ask("word " * 20)  # 6 s of sound, of which the last 4 s wait for their time
    talk.send("response.create")
    item = talk.until("response.output_audio.delta")[-1]["item_id"]
    talk.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=60_000)
    events = talk.until("error")
    if "response.done" not in [event["type"] for event in events]:  # else this test came late
        events += talk.until("response.done")
    [done] = [event for event in events if event["type"] == "response.done"]
    assert [event["error"]["param"] for event in events if event["type"] == "error"] == ["audio_end_ms"]
    assert done["response"]["status"] == "completed"


def test_sound_is_cleared_after_a_cancellation_and_after_the_end_too(talk: Session) -> None:
    assert talk.error("output_audio_buffer.clear")["code"] == "output_audio_buffer_empty"
    talk.ask("word " * 50)
    talk.send("response.create")
    talk.until("response.output_audio.delta")
    talk.send("response.cancel")
    cut = talk.until("response.done")[-1]["response"]["id"]
    for _ in range(2):
        talk.send("output_audio_buffer.clear")
        cleared = talk.receive()
        assert (cleared["type"], cleared["response_id"]) == ("output_audio_buffer.cleared", cut)
    talk.ask("word")
    whole = talk.respond()[-1]["response"]
    talk.send("output_audio_buffer.clear")
    cleared = talk.receive()
    assert (whole["status"], cleared["response_id"]) == ("completed", whole["id"])


@pytest.mark.parametrize("status", ["cancelled", "failed"])
@pytest.mark.parametrize("heard_s", [0, 1, 2])
def test_an_answer_that_ends_early_keeps_the_words_whose_sound_was_sent(status: str, heard_s: int) -> None:
    conversation = Conversation(max_items=10, max_bytes=10_000)
    question = Entry(Message(role="user", content=[Part("input_text", text="What?")]))
    conversation.insert(question)
    websocket = WebSocket({"type": "websocket"}, trio.sleep_forever, trio.sleep_forever)
    events = ResponseEvents(Outbox(websocket), conversation, {}, is_spoken=True)
    events.begin()
    for sentence in ("One two three.", " Four five six."):
        events.text(sentence)
        events.computed(AudioChunk(np.ones(24_000, np.float32), 24_000), sentence)
    for _ in range(heard_s):
        events.sound(bytes(2 * 24_000), 2 * 24_000)
    events.end(status, None, None)
    [_, answer] = conversation.entries
    assert isinstance(answer.item, Message)
    assert answer.item.content[0].transcript == ("", "One two three.", "One two three. Four five six.")[heard_s]
    assert has_open_question(conversation.entries) == (heard_s == 0)
    assert conversation.nbytes == sum(entry._measured() for entry in conversation.entries)
