"""POST /v1/chat/completions.

Rules
1. The text of a spoken answer is its transcript. Then ``content`` is null, as in OpenAI's API.
2. The server does not keep the audio of an answer: it expires when it is made.
3. The server does not keep a request's files either: when the answer begins, nothing here refers to the body or to its
   files.
4. A file that no stage accepts is refused before it is fetched or decoded.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.config import Pipeline
from omni_actors.generation import AudioChunk, Generation, Output
from omni_actors.serve.access.admission import SCOPE_KEY, AdmissionTicket
from omni_actors.serve.api import responses, schemas
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.media.audio import AudioEncoder, decode
from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.media.loader import MediaLoader, MediaReference
from omni_actors.serve.routes.common import Completion, open_body, stop_list


class _ChatCompletion(Completion):
    """Turns a generation's outputs into the objects of the response.

    names: the client's name of each parameter, by the engines' name.
    """

    def __init__(self, body: schemas.ChatRequest, names: Mapping[str, str]) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", body.model)
        self.audio_id = f"audio_{uuid.uuid4().hex}"
        self.has_audio = "audio" in body.modalities
        self.is_streamed, self.include_usage = body.stream, body.stream_options.include_usage
        self.names = names
        format = "pcm" if body.audio.format == "pcm16" else body.audio.format
        self.encoder = AudioEncoder(format, streamed=body.stream)

    async def convert(self, output: Output) -> tuple[str, bytes]:
        """Return the text and the encoded audio that an output adds."""
        audio = await self.encoder.push(output.delta) if isinstance(output.delta, AudioChunk) else b""
        return self.add(output), audio


async def chat(request: Request) -> Response:
    """Answer a conversation, as one JSON object or as server-sent events."""
    completion, generation = await _start(request)
    with renaming(completion.names):
        if completion.is_streamed:
            return await responses.StreamedResponse(generation, _events(completion, generation)).start()
        with responses.collecting(generation):
            return responses.WholeResponse(generation, await _whole(completion, generation))


async def _start(request: Request) -> tuple[_ChatCompletion, Generation]:
    media: MediaLoader = request.app.state.media
    ticket: AdmissionTicket = request.scope[SCOPE_KEY]
    system, body, params = open_body(request, await read_json(request), schemas.ChatRequest)
    if body.stream and "audio" in body.modalities and body.audio.format == "flac":
        message = "audio.format: 'flac' cannot be streamed; accepted: 'wav', 'mp3', 'opus', 'pcm16'"
        raise bad_request(message, "audio.format", "unsupported_parameter")
    params, names = parameters_of(body, params, system.pipeline)
    completion = _ChatCompletion(body, names)
    messages, references = _split_media(body.messages)
    _require_accepted(references, system.pipeline)
    data: dict[str, list[Any]] = {"audio": []}
    for reference, file in zip(references, await media.load(references, ticket), strict=True):
        data.setdefault(reference.kind, []).append(file)
    audio_params = [reference.param for reference in references if reference.kind == "audio"]
    data["audio"] = await decode(list(zip(data["audio"], audio_params, strict=True)))
    ticket.release()
    with renaming(completion.names):
        modalities = ("text", "audio") if completion.has_audio else ("text",)
        generation = system.generate(messages, multi_modal_data=data, modalities=modalities, **params)
    return completion, generation


def parameters_of(
    body: schemas.ChatRequest, others: Mapping[str, Any], pipeline: Pipeline
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the engines' parameters, and the client's name of each parameter that an engine's error may name.

    others: the parameters that the client gave under the engines' own names.
    """
    voice = body.audio.voice if "audio" in body.modalities and schemas.has_speakers(pipeline) else None
    given = [  # the engines' name, the client's name, the value; the last value counts
        ("max_tokens", "max_tokens", body.max_tokens),
        ("max_tokens", "max_completion_tokens", body.max_completion_tokens),
        ("stop", "stop", stop_list(body)),
        ("speaker", "audio.voice", voice),
        ("use_audio_in_video", "mm_processor_kwargs.use_audio_in_video", body.mm_processor_kwargs.use_audio_in_video),
        *((name, name, value) for name, value in others.items()),
    ]
    params, names = {}, dict.fromkeys(("audio", "image", "video", "input"), "messages")
    for name, client_name, value in given:
        if value is not None:
            params[name], names[name] = value, client_name
    return params, names


def _split_media(messages: Sequence[schemas.ChatMessage]) -> tuple[list[dict[str, Any]], list[MediaReference]]:
    """Return the conversation as the pipeline takes it, with files by index, and the files. Raises HTTPError."""
    conversation: list[dict[str, Any]] = []
    files: list[MediaReference] = []
    count: Counter[str] = Counter()
    for i, message in enumerate(messages):
        content: Any = message.content
        if content is None:
            text = f"messages[{i}].content is missing; for a spoken answer, send its transcript"
            raise bad_request(text, f"messages[{i}].content", "missing_required_parameter")
        if not isinstance(content, str):
            parts: list[Mapping[str, Any]] = []
            for j, part in enumerate(content):
                if isinstance(part, schemas.TextPart):
                    parts.append({"type": "text", "text": part.text})
                else:
                    file = _reference(part, f"messages[{i}].content[{j}]")
                    parts.append({"type": file.kind, "index": count[file.kind]})
                    count[file.kind] += 1
                    files.append(file)
            content = parts
        conversation.append({"role": "system" if message.role == "developer" else message.role, "content": content})
    return conversation, files


def _reference(part: schemas.AudioPart | schemas.ImagePart | schemas.VideoPart, param: str) -> MediaReference:
    match part:
        case schemas.AudioPart(input_audio=audio):
            return MediaReference("audio", audio.data, f"{param}.input_audio.data")
        case schemas.ImagePart(image_url=image):
            return MediaReference("image", image.url, f"{param}.image_url.url")
        case schemas.VideoPart(video_url=video):
            return MediaReference("video", video.url, f"{param}.video_url.url")


def _require_accepted(files: Sequence[MediaReference], pipeline: Pipeline) -> None:
    """Check rule 4. Raises HTTPError."""
    accepted = {kind for stage in pipeline.stages.values() for kind in stage.accepts}
    for file in files:
        if file.kind not in accepted:
            known = ", ".join(map(repr, sorted(accepted)))
            message = f"{file.param}: {pipeline.name!r} does not accept {file.kind}; accepted: {known}"
            raise bad_request(message, file.param, "unsupported_input")


async def _whole(completion: _ChatCompletion, generation: Generation) -> Response:
    texts: list[str] = []
    async for output in generation:
        text, _ = await completion.convert(output)
        texts.append(text)
    text = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if completion.has_audio:
        message["content"] = None
        message["audio"] = {
            "id": completion.audio_id,
            "data": to_base64(await completion.encoder.finish()),
            "transcript": text,
            "expires_at": completion.created,
        }
    whole = completion.choice(completion.finish_reason, message=message) | {"usage": completion.usage}
    return responses.JSONResponse(whole)


async def _events(completion: _ChatCompletion, generation: Generation) -> responses.Pieces:
    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        return responses.event(completion.choice(finish_reason, delta=delta))

    def audio_chunk(**fields: Any) -> bytes:
        return chunk({"audio": {"id": completion.audio_id, **fields}})

    is_first = True
    async for output in generation:
        if is_first:
            is_first = False
            yield chunk({"role": "assistant", "content": None if completion.has_audio else ""})
        text, audio = await completion.convert(output)
        if text:
            yield audio_chunk(transcript=text) if completion.has_audio else chunk({"content": text})
        if audio:
            yield audio_chunk(data=to_base64(audio))
    if completion.has_audio:
        if audio := await completion.encoder.finish():
            yield audio_chunk(data=to_base64(audio))
        yield audio_chunk(expires_at=completion.created)
    yield chunk({}, completion.finish_reason)
    if completion.include_usage:
        yield responses.event(completion.usage_object())
    yield responses.DONE
