"""A conversation as the pipeline takes it: chat messages, and the recordings to which they refer.

Rules
1. Where the pipeline has a transcriber, the words of a recording stand for it. A recording whose transcript failed is
   left out, and the rest of its item is not.
2. A call whose arguments are no JSON object within the bounds of ``checked_arguments`` is left out, with its outputs; a
   model may write such calls. So is an unfinished call (``Response``).
3. A call is a part of the assistant's message before it, if no other message is between them. That is how a model
   writes its text and its calls, and how ``/v1/responses`` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import trio

from omni_actors.outputs import AudioChunk
from omni_actors.serve.api.tools import FunctionCall as ChatFunctionCall
from omni_actors.serve.api.tools import ToolCall, checked_arguments
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.realtime.conversation import Entry
from omni_actors.serve.realtime.items import FunctionCall, FunctionCallOutput, Message

GREETING = "The conversation begins. Greet the user in one short sentence."


async def chat_messages(
    entries: Sequence[Entry], instructions: str, *, transcribed: bool
) -> tuple[list[dict[str, Any]], list[AudioChunk]]:
    """Return the messages of a conversation, and its recordings, to which the messages refer by index.

    entries: without unfinished calls. transcribed: whether the pipeline has a transcriber (rule 1). The words are known
    then, or their error is.

    If there is nothing to answer, as before the first turn of a session without instructions, the model is asked for a
    greeting. There is a checkpoint after each recording and each call, because there may be many.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    clips: list[AudioChunk] = []
    calls = await _calls(entries)
    call_ids = {entry.call_id for entry in calls}
    for entry in entries:
        match entry.item:
            case Message() as item:
                if content := await _content(entry, item, clips, transcribed=transcribed):
                    messages.append({"role": item.role, "content": content})
            case FunctionCall() if entry in calls:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(calls[entry])
            case FunctionCallOutput() as item if item.call_id in call_ids:
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
    return messages or [{"role": "system", "content": GREETING}], clips


async def join_neighbours(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join messages of one role in a row, but the outputs of calls, and a call and a text of the assistant behind it.

    Some chat templates refuse any other. An answer that was cut before its first word leaves two messages of the user,
    for example. There is a checkpoint after each joined message, because there may be many.
    """
    runs: list[list[dict[str, Any]]] = []
    for message in messages:
        last: dict[str, Any] = runs[-1][-1] if runs else {}
        has_called = "tool_calls" in last and "tool_calls" not in message
        if last.get("role") != message["role"] or message["role"] == "tool" or has_called:
            runs.append([])
        runs[-1].append(message)
    joined: list[dict[str, Any]] = []
    for run in runs:
        joined.append(dict(run[0]))
        if len(run) > 1:
            joined[-1]["content"] = _joined([message["content"] for message in run])
            if calls := [call for message in run for call in message.get("tool_calls", ())]:
                joined[-1]["tool_calls"] = calls
            await trio.lowlevel.checkpoint()
    return joined


def _joined(contents: Sequence[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """Join the contents of messages. Each text is copied once: together they may be as long as a conversation."""
    texts: list[str] = []
    for content in contents:
        if not isinstance(content, str):
            break
        texts.append(content)
    text = "\n".join(each for each in texts if each)
    if len(texts) == len(contents):
        return text
    others = contents[len(texts) :]
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (text, *others)]
    return [part for each in parts for part in each if part.get("text") != ""]


async def _calls(entries: Sequence[Entry]) -> dict[Entry, dict[str, Any]]:
    """Return the calls that a request can have (rule 2), as the pipeline takes them."""
    found: dict[Entry, dict[str, Any]] = {}
    for entry in entries:
        if isinstance(item := entry.item, FunctionCall):
            with suppress(HTTPError):
                function = {"name": item.name, "arguments": await checked_arguments(call_of(item), "arguments")}
                found[entry] = {"id": item.call_id, "type": "function", "function": function}
    return found


def call_of(item: FunctionCall) -> ToolCall:
    """Return a call as the chat API has it."""
    return ToolCall(item.call_id, ChatFunctionCall(item.name, item.arguments))


async def _content(
    entry: Entry, item: Message, clips: list[AudioChunk], *, transcribed: bool
) -> str | list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(item.content):
        recording = entry.recordings.get(index)
        if recording is not None and not transcribed:
            parts.append({"type": "audio", "index": len(clips)})
            clips.append(recording.clip())
            await trio.lowlevel.checkpoint()  # a long recording takes milliseconds to decode
        elif part.words:
            parts.append({"type": "text", "text": part.words})
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts
