"""Sessions whose conversation reaches its bounds, on a pipeline that hears and has no transcriber, as an omni model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http_server import Server, Start
from tests.support.realtime import PCM_S, Session, session, silence

LISTENER = """\
name: listener
stages:
  mind: {engine: "tests.support.served_engines:Eye", accepts: [audio, messages], emits: text}
"""


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[Server]:
    bounds = ("--session-bytes", str(4 * PCM_S), "--session-items", "6")
    with start(*bounds, config=LISTENER) as server:
        yield server
        assert server.stderr == ""


@pytest.fixture
def talk(server: Server) -> Iterator[Session]:
    with session(server) as talk:
        update(talk, audio={"input": {"turn_detection": None}})
        yield talk


def update(talk: Session, **changes: Any) -> None:
    talk.send("session.update", session=changes)
    assert talk.receive()["type"] == "session.updated"


def say(talk: Session, seconds: float) -> tuple[str, list[str]]:
    """Record a turn; return the identifiers of its item, and of the items that have left for it."""
    talk.hear(silence(seconds))
    talk.send("input_audio_buffer.commit")
    events = talk.until("conversation.item.done")
    left = [event["item_id"] for event in events if event["type"] == "conversation.item.deleted"]
    committed, added, done = events[len(left) :]
    assert committed["previous_item_id"] == added["previous_item_id"] == done["previous_item_id"]
    assert committed["previous_item_id"] not in left
    return done["item"]["id"], left


def test_old_turns_leave_a_session_that_speaks_for_long(talk: Session) -> None:
    turns = [say(talk, 1.0) for _ in range(10)]
    said = [id for id, _ in turns]
    assert [left for _, left in turns] == [[]] * 4 + [[id] for id in said[:6]]
    done = talk.respond(output_modalities=["text"])[-1]["response"]
    assert done["status"] == "completed"
    assert done["output"][0]["content"][0]["text"].count("index") == 4
    talk.send("conversation.item.retrieve", item_id=said[6])
    assert talk.receive()["item"]["content"][0]["audio"]
    assert talk.error("conversation.item.retrieve", item_id=said[5])["code"] == "item_not_found"


def test_old_items_leave_for_an_answer_too(talk: Session) -> None:
    asked = [talk.ask(text)["id"] for text in "abcdef"]
    events = talk.respond(output_modalities=["text"])
    assert [event["item_id"] for event in events if event["type"] == "conversation.item.deleted"] == asked[:1]
    assert events[-1]["response"]["status"] == "completed"


def test_a_refused_turn_changes_nothing(talk: Session) -> None:
    update(talk, truncation="disabled")
    first, *others = [say(talk, 1.0)[0] for _ in range(4)]
    talk.hear(silence(1.0))
    for _ in range(2):
        assert talk.error("input_audio_buffer.commit")["code"] == "conversation_full"
    for id in (first, *others):
        talk.send("conversation.item.retrieve", item_id=id)
        assert talk.receive()["item"]["content"][0]["audio"]
    talk.send("conversation.item.delete", item_id=first)
    assert talk.receive()["type"] == "conversation.item.deleted"
    talk.send("input_audio_buffer.commit")
    assert talk.until("conversation.item.done")[0]["previous_item_id"] == others[-1]


def test_a_client_that_forbids_truncation_is_told_that_the_conversation_is_full(talk: Session) -> None:
    update(talk, truncation="disabled")
    for text in "abcdef":
        talk.ask(text)
    assert talk.error("response.create")["code"] == "conversation_full"
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "g"}]}
    assert talk.error("conversation.item.create", item=item)["code"] == "conversation_full"
