"""The answer to a conversation as the objects of the chat API.

Rules
1. The text of a spoken answer is its transcript. Then ``content`` is null, as in OpenAI's API.
2. The server does not keep the audio of an answer: it expires when it is made.
3. Pictures make ``content`` a list of parts, in a stream too: PNG files as data: URLs, and the text before them.
   Previews are not sent.
4. A call of a tool is sent when it is complete. The arguments of the one tool that the model must call are sent as the
   model writes them.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from omni_actors.outputs import AudioChunk, Output, Picture
from omni_actors.serve.api import responses, schemas
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.api.logprobs import chat_logprobs
from omni_actors.serve.api.tools import NamedTool, ToolCall, ToolCallFilter, written_call
from omni_actors.serve.media.audio import AudioEncoder
from omni_actors.serve.media.base64_data import to_base64, to_base64_json
from omni_actors.serve.media.picture_json import PictureText
from omni_actors.serve.media.pictures import encoded
from omni_actors.serve.routes.common import Completion
from omni_actors.turns import SpokenAnswer


class Calls:
    """The calls of tools in the text of one choice."""

    def __init__(self, body: schemas.ChatRequest) -> None:
        self.count = 0
        most = 1 if body.parallel_tool_calls is False else sys.maxsize
        self._filter = ToolCallFilter(most) if body.tools and body.tool_choice in (None, "auto") else None
        self._named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        self._required: list[str] | None = [] if body.tool_choice == "required" else None

    @property
    def are_whole(self) -> bool:
        """Whether each object is a whole call. Otherwise further ones may have more of its arguments."""
        return self._named is None

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Take text of the model; return what of it is text of the answer, and the objects of calls."""
        if self._named is not None:
            return "", self._arguments(text) if text else []
        if self._required is not None:
            self._required.append(text)
            return "", []
        if self._filter is None:
            return text, []
        text, calls = self._filter.push(text)
        return text, [self._object(call) for call in calls]

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return as ``push`` what the end of the text shows."""
        if self._required is not None:
            text = "".join(self._required)
            call = written_call(text)
            return (text, []) if call is None else ("", [self._object(call)])
        if self._filter is None:
            return "", []
        text, calls = self._filter.finish()
        return text, [self._object(call) for call in calls]

    def finish_reason(self, reason: str) -> str:
        """Return the reason that the client receives. A call that the client itself named ends with "stop"."""
        return "tool_calls" if self.count and self._named is None and reason == "stop" else reason

    def _object(self, call: ToolCall) -> dict[str, Any]:
        self.count += 1
        return {"index": self.count - 1, **msgspec.to_builtins(call)}

    def _arguments(self, text: str) -> list[dict[str, Any]]:
        assert self._named is not None
        if not self.count:
            return [self._object(ToolCall.of(self._named, text))]
        return [{"index": 0, "function": {"arguments": text}}]


class Addition:
    """What an output, or the end of a choice, adds to the choice."""

    def __init__(self, text: str = "", calls: list[dict[str, Any]] | None = None) -> None:
        self.text, self.calls, self.audio = text, calls or [], b""
        self.timing: dict[str, int] = {}
        """What is known of the words that have been heard when all audio before ``audio`` has been played."""
        self.picture: PictureText | None = None
        """A data: URL with a PNG file."""
        self.logprobs: dict[str, Any] | None = None


class ChatCompletion(Completion):
    """Turns the outputs of generations into the objects of the response.

    names: the client's name of each parameter, by the engines' name. modalities: of the answer. prefix: of its id.
    """

    def __init__(
        self, body: schemas.ChatRequest, names: Mapping[str, str], modalities: tuple[str, ...], prefix: str
    ) -> None:
        super().__init__(prefix, "chat.completion.chunk" if body.stream else "chat.completion", body)
        self.audio_id = f"audio_{uuid.uuid4().hex}"
        self.has_audio = "audio" in modalities
        self.has_text_content = modalities == ("text",)
        self.is_streamed, self.include_usage = body.stream, body.stream_options.include_usage
        self.names = names
        format = "pcm" if body.audio.format == "pcm16" else body.audio.format
        self.encoder = AudioEncoder(format, streamed=body.stream)
        self._top_logprobs = body.top_logprobs or 0
        self._calls = [Calls(body) for _ in range(self.count)]
        self._spoken = SpokenAnswer() if body.stream and self.has_audio and body.audio.word_timing else None
        """The one choice of a spoken answer, if the client wants to know when its words are heard."""
        self._sound_s = 0.0

    async def convert(self, index: int, output: Output) -> Addition:
        """Return what an output adds to a choice."""
        addition = Addition(*self._calls[index].push(self.add(index, output)))
        if self._spoken is not None:
            self._spoken.add_text(addition.text)
        if isinstance(output.delta, AudioChunk):
            addition.timing = self._timing(output.delta, output.data.get("sentence_text"))
            addition.audio = await self.encoder.push(output.delta)
        if isinstance(output.delta, Picture) and output.delta.final:
            addition.picture = await encoded(output.delta, begin="data:image/png;base64,")
        if "logprobs" in output.data:
            addition.logprobs = chat_logprobs(output.data["logprobs"], self._top_logprobs)
        return addition

    def _timing(self, chunk: AudioChunk, sentence: str | None) -> dict[str, int]:
        """Return the field that says which words have been heard before this chunk, if a sentence begins with it."""
        if self._spoken is None:
            return {}
        before_s, is_known = self._sound_s, self._sound_s > 0 and sentence is not None
        self._spoken.add_sound(chunk.samples, chunk.sample_rate, sentence)
        self._sound_s += len(chunk.samples) / chunk.sample_rate
        return {"transcript_end": len(self._spoken.heard(1000 * before_s))} if is_known else {}

    def finish(self, index: int) -> Addition:
        """Return what the end of a choice adds to it."""
        addition = Addition(*self._calls[index].finish())
        if self._spoken is not None:
            self._spoken.add_text(addition.text)
        return addition

    def last_timing(self) -> dict[str, int]:
        """Return the field that says which words have been heard when all audio has been played."""
        return {} if self._spoken is None else {"transcript_end": len(self._spoken.text)}

    def finish_reason(self, index: int) -> str:
        """Return why a choice ended."""
        return self._calls[index].finish_reason(self.finish_reasons[index])


class _WholeChoice:
    """A choice whose parts are collected."""

    def __init__(self) -> None:
        self.text = ""
        self.pictures: list[PictureText] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: dict[str, Any] | None = None

    def add(self, addition: Addition) -> None:
        self.text += addition.text
        if addition.picture is not None:
            self.pictures.append(addition.picture)
        for call in addition.calls:
            index = call.pop("index")
            if index < len(self.calls):
                self.calls[index]["function"]["arguments"] += call["function"]["arguments"]
            else:
                self.calls.append(call)
        if self.logprobs is None:
            self.logprobs = addition.logprobs
        elif addition.logprobs is not None:
            self.logprobs["content"] += addition.logprobs["content"]

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.pictures:
            text = [{"type": "text", "text": self.text}] if self.text else []
            message["content"] = [*text, *map(_picture_part, self.pictures)]
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.calls}
        return message


async def whole_response(completion: ChatCompletion, generations: Generations) -> Response:
    """Read the generations to their end, and return one JSON object."""
    choices = [_WholeChoice() for _ in range(completion.count)]
    async for index, output in generations.outputs():
        choices[index].add(await completion.convert(index, output))
    objects = []
    for index, choice in enumerate(choices):
        choice.add(completion.finish(index))
        message = choice.message
        if completion.has_audio:
            message["content"] = None
            message["audio"] = {
                "id": completion.audio_id,
                "data": await to_base64_json(await completion.encoder.finish()),
                "transcript": choice.text,
                "expires_at": completion.created,
            }
        reason = completion.finish_reason(index)
        objects.append(completion.choice(index, reason, message=message, logprobs=choice.logprobs))
    if any(choice.pictures for choice in choices):
        return await responses.picture_response(completion.whole(objects))
    return responses.JSONResponse(completion.whole(objects))


async def events(completion: ChatCompletion, generations: Generations) -> responses.Pieces:
    """Yield the events of a streamed response."""
    begun: set[int] = set()
    async for index, output in generations.outputs():
        if index not in begun:
            begun.add(index)
            delta = {"role": "assistant", "content": "" if completion.has_text_content else None}
            yield responses.event(completion.chunk(index, delta=delta))
        addition = await completion.convert(index, output)
        for event in _deltas(completion, index, addition):
            yield event
        if addition.picture is not None:
            part = _picture_part(addition.picture)
            yield await responses.picture_event(completion.chunk(index, delta={"content": [part]}))
    for index in range(completion.count):
        for event in _deltas(completion, index, completion.finish(index)):
            yield event
        if completion.has_audio:
            if audio := await completion.encoder.finish():
                yield _audio_event(completion, index, data=to_base64(audio))
            yield _audio_event(completion, index, expires_at=completion.created, **completion.last_timing())
        yield responses.event(completion.chunk(index, completion.finish_reason(index), delta={}))
    if completion.include_usage:
        yield responses.event(completion.usage_object())
    yield responses.DONE


def _deltas(completion: ChatCompletion, index: int, addition: Addition) -> list[bytes]:
    """Return the events of what was added to a choice, apart from its picture."""
    found = []
    if addition.text or addition.logprobs:
        delta: dict[str, Any] = {"content": addition.text}
        if completion.has_audio:
            delta = _audio_delta(completion, transcript=addition.text)
        found.append(responses.event(completion.chunk(index, delta=delta, logprobs=addition.logprobs)))
    if addition.calls:
        found.append(responses.event(completion.chunk(index, delta={"tool_calls": addition.calls})))
    if addition.timing:
        found.append(_audio_event(completion, index, **addition.timing))
    if addition.audio:
        found.append(_audio_event(completion, index, data=to_base64(addition.audio)))
    return found


def _picture_part(url: PictureText) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _audio_event(completion: ChatCompletion, index: int, **fields: Any) -> bytes:
    return responses.event(completion.chunk(index, delta=_audio_delta(completion, **fields)))


def _audio_delta(completion: ChatCompletion, **fields: Any) -> dict[str, Any]:
    return {"audio": {"id": completion.audio_id, **fields}}
