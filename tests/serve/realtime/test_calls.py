"""Calls of functions in a session: what a response makes of a model's text, and what the next request has of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from omni_actors.outputs import Output
from omni_actors.serve.realtime.chat_messages import chat_messages
from omni_actors.serve.realtime.config import FunctionTool, ResponseParams, SessionConfig
from omni_actors.serve.realtime.conversation import Conversation, Entry
from omni_actors.serve.realtime.items import FunctionCall, FunctionCallOutput, Message, Part
from omni_actors.serve.realtime.response import Response
from omni_actors.serve.realtime.response_settings import ResponseSettings

CALL, OTHER = (f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("weather", "clock"))
QUESTION = Entry(Message(role="user", content=[Part("input_text", text="Is it warm?")]))
TOOLS = [FunctionTool(name="weather"), FunctionTool(name="clock")]


class Written:
    """A response whose model writes some pieces of text, and then ends or waits until the response is cut."""

    def __init__(self, *pieces: str, finish_reason: str | None = "stop") -> None:
        self._pieces, self._finish_reason = list(pieces), finish_reason
        self.all_read = trio.Event()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.conversation = Conversation(max_items=100, max_bytes=10_000)
        self.conversation.insert(QUESTION)
        system = SimpleNamespace(metrics=SimpleNamespace(speech=None))
        pipeline: Any = SimpleNamespace(stages={}, name="any", transcribes=False, rate_limits=list, system=system)
        pipeline.generate = lambda *_: SimpleNamespace(abort=lambda: None)
        pipeline.next_output = self._next_output
        config = SessionConfig(type="realtime", model="any", output_modalities=["text"], tools=TOOLS)
        settings = ResponseSettings(config, ResponseParams(), pipeline, {})
        outbox: Any = SimpleNamespace(post=self._post, wait_room=trio.lowlevel.checkpoint)
        entries = self.conversation.entries
        self.response = Response(pipeline, outbox, self.conversation, settings=settings, entries=entries)

    def _post(self, name: str, /, **fields: Any) -> None:
        self.events.append((name, fields))

    async def _next_output(self, _: Any) -> Output | None:
        if self._pieces:
            text = self._pieces.pop(0)
            ends = not self._pieces and self._finish_reason is not None
            data = {"finish_reason": self._finish_reason} if ends else {}
            return Output("req-1", "mind", "text", text, finished=ends, data=data, tensors={})
        self.all_read.set()
        if self._finish_reason is None:
            await trio.sleep_forever()
        return None

    @property
    def output(self) -> list[tuple[str, str]]:
        """Each item of the response: its status, with the name of a call, or the text of a message."""
        items = (entry.item for entry in self.conversation.entries[1:])
        return [(each.status, each.name if isinstance(each, FunctionCall) else _text(each)) for each in items]


def _text(item: Any) -> str:
    assert isinstance(item, Message)
    return item.content[0].words


@pytest.mark.parametrize("end", ["", '<tool_call>{"name": "clock", "argu', "<tool_c"])
async def test_a_call_that_is_cut_is_no_text_and_those_before_it_are_complete(end: str) -> None:
    written = Written("Let me look.", CALL, *([end] if end else []), finish_reason="length")
    await written.response.run()
    assert written.output == [("incomplete", "Let me look."), ("completed", "weather")]


async def test_a_whole_call_is_done_before_the_text_behind_it_and_stays_when_that_is_cut() -> None:
    written = Written(CALL, "It may", " take", finish_reason=None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(written.response.run)
        await written.all_read.wait()
        names = [name for name, _ in written.events]
        assert names.index("response.function_call_arguments.done") < names.index("response.output_text.delta")
        written.response.cancel("turn_detected")
    assert written.events[-1][1]["response"]["status"] == "cancelled"
    assert written.output == [("completed", "weather"), ("incomplete", "It may take")]
    messages, _ = await chat_messages(written.conversation.entries, "", transcribed=True)
    assert [each["role"] for each in messages] == ["user", "assistant", "assistant"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "weather"


async def test_the_calls_of_an_answer_are_one_message_with_its_text() -> None:
    """As a model writes them, and as the responses API has them."""
    written = Written("Let me look.", CALL, OTHER)
    await written.response.run()
    assert written.output == [("completed", "Let me look."), ("completed", "weather"), ("completed", "clock")]
    ids = [entry.item.call_id for entry in written.conversation.entries if isinstance(entry.item, FunctionCall)]
    for call_id in reversed(ids):
        written.conversation.insert(Entry(FunctionCallOutput(call_id=call_id, output="warm")))
    for _ in range(2):  # making messages changes no item
        messages, _ = await chat_messages(written.conversation.entries, "", transcribed=True)
        assert [each["role"] for each in messages] == ["user", "assistant", "tool", "tool"]
        assert messages[1]["content"] == "Let me look."
        assert [each["id"] for each in messages[1]["tool_calls"]] == ids
