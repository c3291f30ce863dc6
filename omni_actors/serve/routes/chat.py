"""POST /v1/chat/completions.

Rules
1. The text of a spoken answer is its transcript: then ``content`` is null, as in OpenAI's API.
2. An answer's sound is not kept: it expires when it is made.
3. What a request brought is not kept either: when its answer begins, nothing here refers to its body or its files.
4. Files that no stage takes are refused before they are fetched or decoded.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.config import Pipeline
from omni_actors.generation import AudioChunk, Generation, Output
from omni_actors.serve.access.admission import SCOPE_KEY, AdmissionTicket
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.replies import (
    DONE,
    SSE,
    JSONReply,
    Pieces,
    StreamedReply,
    WholeReply,
    collecting,
    error_event,
    event,
)
from omni_actors.serve.api.schemas import (
    AudioPart,
    ChatMessage,
    ChatRequest,
    ImagePart,
    TextPart,
    VideoPart,
    has_speakers,
    parse,
    require_model,
)
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.media.audio import AudioEncoder, complete_file, decode
from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.media.loader import MediaLoader, MediaReference
from omni_actors.system import OmniSystem


class _Answer:
    """What of a request and of its answer's outputs the reply's shape needs.

    names: what engines call a field, and what this client does.
    """

    def __init__(self, body: ChatRequest, names: Mapping[str, str]) -> None:
        now = int(time.time())
        self.id, self.created, self.model = f"chatcmpl-{uuid.uuid4().hex}", now, body.model
        self.audio_id = f"audio_{uuid.uuid4().hex}"
        self.speaks, self.format = "audio" in body.modalities, body.audio.format
        self.streams, self.include_usage = body.stream, body.stream_options.include_usage
        self.names = names
        self.encoder = AudioEncoder("wav" if self.format == "wav" else "pcm")
        self.finish_reason = "stop"
        self.usage: dict[str, int] | None = None

    def take(self, output: Output) -> tuple[str, bytes]:
        """The text and the sound, encoded, that this output adds."""
        self.finish_reason = output.data.get("finish_reason", self.finish_reason)
        if "completion_tokens" in output.data:
            prompt, completion = output.data["prompt_tokens"], output.data["completion_tokens"]
            self.usage = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
        match output.modality, output.delta:
            case "text", str(text):
                return text, b""
            case "audio", AudioChunk() as chunk:
                return "", self.encoder.push(chunk)
        return "", b""

    def envelope(self, kind: str, choices: list[Any], usage: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }


async def chat(request: Request) -> Response:
    """Answer a conversation, whole or as server-sent events."""
    answer, generation = await _begin(request)
    with renaming(answer.names):
        if answer.streams:
            return await StreamedReply(generation, _events(answer, generation), SSE, error_event).start()
        with collecting(generation):
            return WholeReply(generation, await _whole(answer, generation))


async def _begin(request: Request) -> tuple[_Answer, Generation]:
    system: OmniSystem = request.app.state.system
    media: MediaLoader = request.app.state.media
    ticket: AdmissionTicket = request.scope[SCOPE_KEY]
    body, params = parse(await read_json(request), ChatRequest)
    require_model(body.model, system.pipeline.name)
    params, names = _parameters(body, params, system.pipeline)
    answer = _Answer(body, names)
    messages, files = _conversation(body.messages)
    _require_taken(files, system.pipeline)
    brought: dict[str, list[Any]] = {"audio": []}
    for file, data in zip(files, await media.bring(files, ticket), strict=True):
        brought.setdefault(file.kind, []).append(data)
    places = [file.param for file in files if file.kind == "audio"]
    brought["audio"] = await decode(list(zip(brought["audio"], places, strict=True)))
    ticket.leave()
    with renaming(answer.names):
        generation = system.generate(
            messages,
            multi_modal_data=brought,
            modalities=("text", "audio") if answer.speaks else ("text",),
            **params,
        )
    return answer, generation


def _parameters(
    body: ChatRequest, others: Mapping[str, Any], pipeline: Pipeline
) -> tuple[dict[str, Any], dict[str, str]]:
    """The engines' parameters, and what this client calls what an engine may complain of.

    others: what it gave under the engines' own names.
    """
    given = [  # the engines' name, the client's, the value; the last one counts
        ("max_tokens", "max_tokens", body.max_tokens),
        ("max_tokens", "max_completion_tokens", body.max_completion_tokens),
        ("stop", "stop", [body.stop] if isinstance(body.stop, str) else body.stop),
        ("speaker", "audio.voice", body.audio.voice if "audio" in body.modalities and has_speakers(pipeline) else None),
        ("use_audio_in_video", "mm_processor_kwargs.use_audio_in_video", body.mm_processor_kwargs.use_audio_in_video),
        *((name, name, value) for name, value in others.items()),
    ]
    params, names = {}, dict.fromkeys(("audio", "image", "video", "input"), "messages")
    for name, theirs, value in given:
        if value is not None:
            params[name], names[name] = value, theirs
    return params, names


def _conversation(messages: Sequence[ChatMessage]) -> tuple[list[dict[str, Any]], list[MediaReference]]:
    """As the pipeline takes it, and the files that it brings. Raises HTTPError."""
    conversation: list[dict[str, Any]] = []
    files: list[MediaReference] = []
    count: Counter[str] = Counter()
    for i, message in enumerate(messages):
        content: Any = message.content
        if content is None:
            text = f"messages[{i}].content is missing; where it was an answer in sound, send its transcript"
            raise bad_request(text, f"messages[{i}].content", "missing_required_parameter")
        if not isinstance(content, str):
            parts: list[Mapping[str, Any]] = []
            for j, part in enumerate(content):
                if isinstance(part, TextPart):
                    parts.append({"type": "text", "text": part.text})
                else:
                    file = _reference(part, f"messages[{i}].content[{j}]")
                    parts.append({"type": file.kind, "index": count[file.kind]})
                    count[file.kind] += 1
                    files.append(file)
            content = parts
        conversation.append({"role": "system" if message.role == "developer" else message.role, "content": content})
    return conversation, files


def _reference(part: AudioPart | ImagePart | VideoPart, place: str) -> MediaReference:
    match part:
        case AudioPart(input_audio=audio):
            return MediaReference("audio", audio.data, f"{place}.input_audio.data")
        case ImagePart(image_url=image):
            return MediaReference("image", image.url, f"{place}.image_url.url")
        case VideoPart(video_url=video):
            return MediaReference("video", video.url, f"{place}.video_url.url")


def _require_taken(files: Sequence[MediaReference], pipeline: Pipeline) -> None:
    """Rule 4. Raises HTTPError."""
    taken = {kind for stage in pipeline.stages.values() for kind in stage.accepts}
    for file in files:
        if file.kind not in taken:
            known = ", ".join(map(repr, sorted(taken)))
            message = f"{file.param}: {pipeline.name!r} takes no {file.kind}; its inputs: {known}"
            raise bad_request(message, file.param, "unsupported_input")


async def _whole(answer: _Answer, generation: Generation) -> Response:
    texts: list[str] = []
    sounds: list[bytes] = []
    async for output in generation:
        text, sound = answer.take(output)
        texts.append(text)
        sounds.append(sound)
    text = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if answer.speaks:
        message["content"] = None
        message["audio"] = {
            "id": answer.audio_id,
            "data": to_base64(complete_file([*sounds, answer.encoder.finish()], answer.format)),
            "transcript": text,
            "expires_at": answer.created,
        }
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    return JSONReply(answer.envelope("chat.completion", [choice], answer.usage))


async def _events(answer: _Answer, generation: Generation) -> Pieces:
    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return event(answer.envelope("chat.completion.chunk", [choice], None))

    def sound_chunk(**fields: Any) -> bytes:
        return chunk({"audio": {"id": answer.audio_id, **fields}})

    begun = False
    async for output in generation:
        if not begun:
            begun = True
            yield chunk({"role": "assistant", "content": None if answer.speaks else ""})
        text, sound = answer.take(output)
        if text:
            yield sound_chunk(transcript=text) if answer.speaks else chunk({"content": text})
        if sound:
            yield sound_chunk(data=to_base64(sound))
    if answer.speaks:
        if sound := answer.encoder.finish():
            yield sound_chunk(data=to_base64(sound))
        yield sound_chunk(expires_at=answer.created)
    yield chunk({}, answer.finish_reason)
    if answer.include_usage:
        yield event(answer.envelope("chat.completion.chunk", [], answer.usage))
    yield DONE
