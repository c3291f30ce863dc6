"""What a conversation keeps of answers that were cut and of old items, and gives to the next request."""

from __future__ import annotations

import pytest

from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.realtime.config import PCMU
from omni_actors.serve.realtime.conversation import Conversation, Entry, chat_messages
from omni_actors.serve.realtime.input_audio import Recording
from omni_actors.serve.realtime.items import FunctionCall, FunctionCallOutput, Message, Part


def recorded(id: str, seconds: float, transcript: str | None = None) -> Entry:
    """A recording of the user, which takes 16 kB a second. transcript: its words, if they are known."""
    recording = Recording(bytes(round(8000 * seconds)), PCMU())
    entry = Entry(Message(id=id, role="user", content=[Part("input_audio", transcript=transcript)]), {0: recording})
    if transcript is not None:
        entry.words_known.set()
    return entry


def ids(conversation: Conversation) -> list[str]:
    return [entry.item.id for entry in conversation.entries]


def test_old_recordings_make_room_before_old_items_do() -> None:
    conversation = Conversation(max_items=100, max_bytes=4 * 8000)
    assert conversation.add(recorded("known", 1, "words"), may_leave=True) == []
    assert [conversation.add(recorded(str(n), 1), may_leave=True) for n in range(3)] == [[]] * 3
    assert conversation.entries[0].recordings == {}, "its words and the others' sound are more than the limit"
    assert conversation.add(recorded("3", 1), may_leave=True) == ["known"], "its words alone are too much"
    assert conversation.add(recorded("4", 1), may_leave=True) == ["0"]
    assert ids(conversation) == ["1", "2", "3", "4"]


def test_instructions_and_items_in_progress_stay() -> None:
    conversation = Conversation(max_items=3, max_bytes=1000)
    system = Entry(Message(id="system", role="system", content=[Part("input_text", text="Be brief.")]))
    speaking = Entry(Message(id="speaking", role="assistant", content=[], status="in_progress"))
    for entry in (system, speaking, recorded("old", 0.01)):
        conversation.insert(entry)
    assert conversation.add(recorded("new", 0.01), may_leave=True) == ["old"]
    assert ids(conversation) == ["system", "speaking", "new"]


@pytest.mark.parametrize("is_too_large", [True, False])
def test_an_item_that_is_refused_makes_no_room(is_too_large: bool) -> None:
    """It is larger than the whole conversation may be, or its identifier is taken."""
    conversation = Conversation(max_items=3, max_bytes=2 * 8000)
    for entry in (recorded("a", 1, "words"), recorded("b", 0.9)):
        conversation.insert(entry)
    refused = recorded("c", 3) if is_too_large else recorded("b", 1)
    with pytest.raises(HTTPError):
        conversation.add(refused, may_leave=True)
    assert ids(conversation) == ["a", "b"]
    assert all(entry.recordings for entry in conversation.entries)


def answer(transcript: str) -> Entry:
    return Entry(Message(role="assistant", content=[Part("output_audio", transcript=transcript)]))


def test_a_call_whose_arguments_were_cut_is_in_no_later_request() -> None:
    cut = FunctionCall(name="weather", call_id="call_1", arguments='{"city": "Ro', status="incomplete")
    whole = FunctionCall(name="weather", call_id="call_2", arguments='{"city": "Rome"}', status="completed")
    returned = FunctionCallOutput(call_id="call_1", output="sunny")
    messages, _ = chat_messages([Entry(cut), Entry(returned), Entry(whole)], "", transcribed=True)
    assert [call["id"] for message in messages for call in message["tool_calls"]] == ["call_2"]


def test_an_answer_that_is_cut_before_its_first_sound_keeps_no_word() -> None:
    conversation, entry = Conversation(max_items=4, max_bytes=1000), answer("nobody has heard this")
    conversation.insert(entry)
    assert entry.is_spoken
    conversation.truncate(entry.item.id, 0)
    assert entry.item.content[0].transcript == ""
