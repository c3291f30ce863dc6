"""What a conversation keeps of answers that were cut, and gives to the next request."""

from __future__ import annotations

from omni_actors.serve.realtime.conversation import Conversation, Entry, chat_messages
from omni_actors.serve.realtime.items import FunctionCall, FunctionCallOutput, Message, Part


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
