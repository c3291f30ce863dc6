"""What a conversation keeps of answers that were cut and of old items, and gives to the next request."""

from __future__ import annotations

import copy
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import config as configuration
from omni_actors.errors import InvalidRequest
from omni_actors.outputs import AudioChunk
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.realtime import response
from omni_actors.serve.realtime.chat_messages import chat_messages, join_neighbours
from omni_actors.serve.realtime.config import PCMU, ResponseParams, SessionConfig
from omni_actors.serve.realtime.conversation import Conversation, Entry, has_open_question
from omni_actors.serve.realtime.input_audio import Recording
from omni_actors.serve.realtime.items import FunctionCall, FunctionCallOutput, Message, Part, check_item
from omni_actors.serve.realtime.pipeline import default_tokens
from omni_actors.serve.realtime.response import Response
from omni_actors.serve.realtime.response_events import ResponseEvents
from omni_actors.serve.realtime.response_settings import ResponseSettings


def recorded(id: str, seconds: float, transcript: str | None = None) -> Entry:
    """A recording of the user, which takes 16 kB a second. transcript: its words, if they are known."""
    recording = Recording(bytes(round(8000 * seconds)), PCMU())
    entry = Entry(Message(id=id, role="user", content=[Part("input_audio", transcript=transcript)]), {0: recording})
    if transcript is not None:
        entry.words_known.set()
    return entry


def ids(conversation: Conversation) -> list[str]:
    return [entry.item.id for entry in conversation.entries]


@asynccontextmanager
async def other_task() -> AsyncIterator[list[None]]:
    """Run another task during the block. Yields a list that gets one entry at each of its steps."""
    steps = list[None]()

    async def step() -> None:
        while True:
            steps.append(None)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(step)
        yield steps
        nursery.cancel_scope.cancel()


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


QUESTION = Message(role="user", content=[Part("input_text", text="Is it warm?")])
COUGH = Message(role="user", content=[Part("input_audio", transcript="")])
UNHEARD, ANSWER = (Message(role="assistant", content=[Part("output_audio", transcript=each)]) for each in ("", "Yes."))
CALL, RESULT = FunctionCall(name="f", arguments="{}", call_id="1"), FunctionCallOutput(call_id="1", output="warm")


@pytest.mark.parametrize(
    ("items", "is_open"),
    [
        ([], False),
        ([COUGH], False),
        ([QUESTION, COUGH], True),
        ([QUESTION, COUGH, UNHEARD, COUGH], True),
        ([QUESTION, ANSWER, COUGH], False),
        ([QUESTION, ANSWER, QUESTION, UNHEARD, COUGH], True),
        ([QUESTION, CALL, COUGH], False),
        ([QUESTION, CALL, RESULT, UNHEARD, COUGH], True),
        ([QUESTION, CALL, RESULT, ANSWER, COUGH], False),
    ],
)
def test_a_question_is_open_until_a_word_of_an_answer_is_heard(items: list[Any], is_open: bool) -> None:
    assert has_open_question([Entry(item) for item in items]) is is_open


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


def called(id: str) -> Entry:
    return Entry(FunctionCall(id=id, name="weather", call_id=f"of_{id}", arguments="{}"))


def returned(id: str, call: str) -> Entry:
    return Entry(FunctionCallOutput(id=id, call_id=f"of_{call}", output="sunny"))


def test_a_call_leaves_with_its_outputs() -> None:
    conversation = Conversation(max_items=4, max_bytes=1000)
    for entry in (called("call"), recorded("a", 0.01), returned("output", "call"), recorded("b", 0.01)):
        conversation.insert(entry)
    assert conversation.add(recorded("c", 0.01), may_leave=True) == ["call", "output"]
    assert ids(conversation) == ["a", "b", "c"]


def test_a_call_that_waits_for_its_output_stays_until_only_such_calls_are_left() -> None:
    conversation = Conversation(max_items=3, max_bytes=1000)
    for entry in (called("first"), recorded("a", 0.01), called("second")):
        conversation.insert(entry)
    assert conversation.add(called("third"), may_leave=True) == ["a"]
    assert conversation.add(returned("output", "first"), may_leave=True) == ["second"], "not the call of the output"
    assert conversation.add(called("fourth"), may_leave=True) == ["first", "output"], "it waits no longer"


async def test_an_output_without_its_call_is_refused_and_in_no_request() -> None:
    conversation = Conversation(max_items=3, max_bytes=1000)
    conversation.insert(recorded("a", 0.01, "hello"))
    with pytest.raises(HTTPError) as refused:
        conversation.add(returned("output", "call"), may_leave=True)
    assert (refused.value.code, refused.value.param) == ("invalid_tool_call_id", "item.call_id")
    assert ids(conversation) == ["a"]
    messages, _ = await chat_messages([returned("output", "call"), *conversation.entries], "", transcribed=True)
    assert messages == [{"role": "user", "content": "hello"}], "the older half of a conversation may be left out"


def answer(transcript: str) -> Entry:
    return Entry(Message(role="assistant", content=[Part("output_audio", transcript=transcript)]))


@pytest.mark.parametrize(
    "arguments", ['{"city": "Ro', '["Rome"]', '{"city": "\ud800"}', '{"a": ' + "[" * 100 + "]" * 100 + "}"]
)
async def test_a_call_whose_arguments_are_no_object_is_in_no_request(arguments: str) -> None:
    cut = FunctionCall(name="weather", call_id="call_1", arguments=arguments)
    whole = FunctionCall(name="weather", call_id="call_2", arguments='{"city": "Rome"}')
    returned = FunctionCallOutput(call_id="call_1", output="sunny")
    messages, _ = await chat_messages([Entry(cut), Entry(returned), Entry(whole)], "", transcribed=True)
    assert [call["id"] for message in messages for call in message["tool_calls"]] == ["call_2"]


async def test_neighbours_of_one_role_are_joined() -> None:
    text, sound = {"type": "text", "text": "and"}, {"type": "audio", "index": 0}
    calls = [{"id": "one"}, {"id": "two"}]
    outputs = [{"role": "tool", "tool_call_id": each["id"], "content": "sunny"} for each in calls]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "hm"},
        *({"role": "assistant", "content": "", "tool_calls": [each]} for each in calls),
        *outputs,
        {"role": "assistant", "content": "it is"},
        {"role": "user", "content": "and"},
        {"role": "user", "content": [sound]},
    ]
    before = copy.deepcopy(messages)
    assert await join_neighbours(messages) == [
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "hm", "tool_calls": calls},
        *outputs,
        {"role": "assistant", "content": "it is"},
        {"role": "user", "content": [text, sound]},
    ]
    assert messages == before
    last = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "assistant", "content": "it is"}]
    assert await join_neighbours(last) == last, "a text after a call stays after it"


@pytest.mark.parametrize("content", ["word " * 20, [{"type": "audio", "index": 0}] * 100], ids=["texts", "parts"])
async def test_joining_messages_copies_each_of_them_a_few_times(content: Any) -> None:
    """However many there are: what functions return, characters of texts and parts of lists, is counted."""
    messages, copied = [{"role": "user", "content": content}] * 300, 0

    def count(frame: Any, event: str, value: Any) -> None:
        nonlocal copied
        copied += len(value) if event == "return" and isinstance(value, str | list) else 0

    sys.setprofile(count)
    try:
        [joined] = await join_neighbours(messages)
    finally:
        sys.setprofile(None)
    size = 300 * len(content)
    assert len(joined["content"]) >= size
    assert copied < 5 * size, copied / size


async def test_other_tasks_run_between_the_messages_that_are_joined() -> None:
    messages = [{"role": role, "content": "text"} for _ in range(10) for role in ("user", "user", "assistant")]
    async with other_task() as steps:
        assert len(await join_neighbours(messages)) == 20
    assert len(steps) >= 9  # the other task may run before or after this one at the last checkpoint


async def test_a_conversation_that_is_too_long_is_halved_and_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, joins = list[int](), list[Any]()

    def generate(messages: list[dict[str, Any]], *_: Any) -> Any:
        tried.append(len(messages))
        return SimpleNamespace(abort=lambda: None)

    async def next_output(_: Any) -> None:
        if tried[-1] > 2:
            raise InvalidRequest("too long", param="messages", code="context_length_exceeded")

    monkeypatch.setattr(response, "join_neighbours", joins.append)
    system = SimpleNamespace(metrics=SimpleNamespace(speech=None))
    pipeline: Any = SimpleNamespace(stages={}, name="any", transcribes=False, rate_limits=list, system=system)
    pipeline.generate, pipeline.next_output = generate, next_output
    config = SessionConfig(type="realtime", model="any", output_modalities=["text"])
    settings = ResponseSettings(config, ResponseParams(), pipeline, {})
    posted = list[str]()
    outbox: Any = SimpleNamespace(post=lambda name, **fields: posted.append(name))
    await Response(pipeline, outbox, None, settings=settings, entries=[Entry(QUESTION) for _ in range(8)]).run()
    assert posted[-1] == "response.done"
    assert (tried, joins) == ([8, 4, 2], [])


async def test_a_response_leaves_out_the_calls_that_are_not_finished_when_it_begins() -> None:
    """One of them is finished before the response asks for its input."""
    pipeline: Any = SimpleNamespace(stages={}, name="any")
    config = SessionConfig(type="realtime", model="any", output_modalities=["text"])
    settings = ResponseSettings(config, ResponseParams(), pipeline, {})
    entries = [called("whole"), called("cut"), called("streaming"), returned("output", "streaming")]
    entries[1].item.status, entries[2].item.status = "incomplete", "in_progress"
    outbox: Any = SimpleNamespace(post=lambda *_, **fields: None)
    begun = Response(pipeline, outbox, None, settings=settings, entries=entries)
    entries[2].item.status = "completed"
    messages, _ = await chat_messages(begun.entries, "", transcribed=True)
    assert [message["tool_calls"][0]["id"] for message in messages] == ["of_whole"]


@pytest.mark.parametrize(("is_whole", "kept"), [(True, "in the"), (False, "nine")])
def test_the_words_of_an_answer_fill_its_sound_unless_it_was_broken_off(is_whole: bool, kept: str) -> None:
    """Nearly all of 1 s is heard. At a usual pace, the words would take 2 s."""
    conversation = Conversation(max_items=4, max_bytes=1000)
    outbox: Any = SimpleNamespace(post=lambda *_, **fields: None)
    events = ResponseEvents(outbox, conversation, {}, is_spoken=True)
    events.text("The ferry leaves at nine and arrives at noon in the")
    events.computed(AudioChunk(np.full(24_000, 0.1, np.float32), 24_000), None)
    if is_whole:
        events.all_computed()
    events.sound(bytes(48_000), 48_000)
    events.end("cancelled", None, None)
    assert events.message is not None
    conversation.truncate(events.message.item.id, 999)
    assert isinstance(events.message.item, Message)
    assert (events.message.item.content[0].transcript or "").endswith(kept)


def test_an_answer_that_is_cut_before_its_first_sound_keeps_no_word() -> None:
    conversation, entry = Conversation(max_items=4, max_bytes=1000), answer("nobody has heard this")
    conversation.insert(entry)
    assert entry.is_spoken
    conversation.truncate(entry.item.id, 0)
    assert entry.item.content[0].transcript == ""


@pytest.mark.parametrize(
    ("part", "surplus"),
    [
        (Part("input_text", text="x", transcript="more"), "transcript"),
        (Part("input_text", text="x", audio="AAAA"), "audio"),
        (Part("input_audio", audio="AAAA", text="more"), "text"),
        (Part("output_text", text="x", transcript=""), "transcript"),
        (Part("output_audio", transcript="x", text="more"), "text"),
    ],
)
def test_a_part_with_a_field_of_another_type_is_refused(part: Part, surplus: str) -> None:
    message = Message(role="assistant" if part.type.startswith("output") else "user", content=[part])
    with pytest.raises(HTTPError) as refused:
        check_item(message)
    assert (refused.value.code, refused.value.param) == ("unknown_parameter", f"item.content[0].{surplus}")
    setattr(part, surplus, None)
    check_item(message)


@pytest.mark.parametrize(
    ("item", "size"),
    [
        (Message(id="a", role="user", content=[Part("input_text", text="é" * 10)]), 20),
        (Message(id="a", role="user", content=[Part("input_audio", transcript="€" * 10)]), 30),
        (FunctionCall(id="a", name="weather", call_id="of_a", arguments='{"a": "é"}'), 7 + 4 + 11),
        (FunctionCallOutput(id="a", call_id="of_a", output="😀"), 4 + 4),
    ],
)
def test_the_text_of_an_item_counts_in_utf_8(item: Message | FunctionCall | FunctionCallOutput, size: int) -> None:
    assert Entry(item).nbytes == size


async def test_other_tasks_run_between_the_recordings_of_a_request() -> None:
    entries = [recorded(str(n), 1) for n in range(10)]
    async with other_task() as steps:
        _, clips = await chat_messages(entries, "", transcribed=False)
    assert len(clips) == 10
    assert len(steps) >= 9  # as where messages are joined


def test_the_sum_of_the_bytes_follows_every_change_of_an_item() -> None:
    conversation = Conversation(max_items=6, max_bytes=4 * 8000)
    outbox: Any = SimpleNamespace(post=lambda *_, **fields: None)
    events = ResponseEvents(outbox, conversation, {}, is_spoken=True)

    def check() -> None:
        assert all(entry.nbytes == Entry(entry.item, entry.recordings).nbytes for entry in conversation.entries)
        assert conversation.nbytes == sum(entry.nbytes for entry in conversation.entries)

    for entry in (recorded("a", 1, "words"), called("call"), returned("output", "call")):
        conversation.add(entry, may_leave=True)
        check()
    for delta in ("Häl", "lo"):
        events.text(delta)
        check()
    for function in ({"name": "weather", "arguments": ""}, {"arguments": '{"a": "é"}'}):
        events.call({"function": function, **({"id": "call_1"} if "name" in function else {})})
        check()
    events.end("completed", None, None)
    assert events.message is not None
    conversation.truncate(events.message.item.id, 0)
    check()
    conversation.add(recorded("b", 3.5), may_leave=True)  # drops the recording of the first item
    check()
    conversation.add(recorded("c", 0.1), may_leave=True)  # the oldest item leaves
    check()
    for id in ids(conversation):
        conversation.delete(id)
        check()
    assert conversation.nbytes == 0


@pytest.mark.voice
@pytest.mark.parametrize(("asked", "sent"), [(None, None), (256, None), (40, 40), ("inf", 1_000_000)])
def test_the_default_length_is_not_sent(asked: Any, sent: int | None) -> None:
    """It is that of the stage that writes the text. Other stages may have defaults of their own."""
    pipeline = configuration.load("voice")
    default = default_tokens(pipeline)
    config = SessionConfig(type="realtime", model="any", output_modalities=["text"], max_output_tokens=default or "inf")
    params = ResponseParams() if asked is None else ResponseParams(max_output_tokens=asked)
    settings = ResponseSettings(config, params, pipeline, {})
    assert settings.head["max_output_tokens"] == (asked or 256)
    assert settings.params.get("max_tokens") == sent


@pytest.mark.voice
def test_the_default_length_is_that_of_the_stage_that_writes() -> None:
    for name, tokens in (("voice", 256), ("qwen3_omni", 1024), ("text_prefill", 256), ("echo", None)):
        assert default_tokens(configuration.load(name)) == tokens
