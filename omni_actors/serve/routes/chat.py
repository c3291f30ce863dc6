"""POST /v1/chat/completions.

Rules
1. The server does not keep a request's files: when the answer begins, nothing here refers to the body or to its files.
2. A file that no stage accepts is refused before it is fetched or decoded.
3. A tool that the model must call is a matter of structure: the model can write nothing but a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.config import Pipeline
from omni_actors.serve.access.admission import SCOPE_KEY, AdmissionTicket
from omni_actors.serve.api import responses, schemas
from omni_actors.serve.api.errors import renaming
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.tools import FunctionDefinition, NamedTool, Tool, ToolChoice, call_schema, checked_arguments
from omni_actors.serve.http.errors import bad_request, quote_value
from omni_actors.serve.media.audio import decode
from omni_actors.serve.media.loader import MediaLoader, MediaReference
from omni_actors.serve.media.pictures import require_encoder
from omni_actors.serve.routes.chat_answer import ChatCompletion, events, whole_response
from omni_actors.serve.routes.common import (
    SESSION_HEADER,
    begin_choices,
    open_body,
    require_accepted,
    session_of,
    text_parameters,
)
from omni_actors.system import OmniSystem


async def chat(request: Request) -> Response:
    """Answer a conversation, as one JSON object or as server-sent events."""
    completion, generations = await _read(request)
    with renaming(completion.names):
        if completion.is_streamed:
            return await responses.StreamedResponse(generations, events(completion, generations)).start()
        with responses.collecting(generations):
            return responses.WholeResponse(generations, await whole_response(completion, generations))


async def _read(request: Request) -> tuple[ChatCompletion, Generations]:
    """Read a request, and begin the generations of its answer (rule 1). Raises HTTPError."""
    system, body, params = open_body(request, await read_json(request), schemas.ChatRequest)
    places = [f"messages[{at}]" for at in range(len(body.messages))]
    return await begin(request, system, body, params, places, "chatcmpl-")


async def begin(
    request: Request,
    system: OmniSystem,
    body: schemas.ChatRequest,
    params: Mapping[str, Any],
    places: Sequence[str],
    prefix: str,
    renamed: Mapping[str, str] | None = None,
) -> tuple[ChatCompletion, Generations]:
    """Load the files of a conversation and begin the generations of its answer. Raises HTTPError.

    Args:
        request: the HTTP request, whose ticket is released.
        system: the pipeline that answers.
        body: the validated body.
        params: the parameters that the client gave under the engines' own names.
        places: the field of the body that each message is from.
        prefix: of the response's id.
        renamed: the client's names of fields, where they differ from those of the chat API.
    """
    media: MediaLoader = request.app.state.media
    ticket: AdmissionTicket = request.scope[SCOPE_KEY]
    require_possible(body)
    params, names = parameters_of(body, params, system.pipeline)
    names = {name: (renamed or {}).get(client_name, client_name) for name, client_name in names.items()}
    names["session"] = SESSION_HEADER
    modalities = _modalities(body, system.pipeline)
    completion = ChatCompletion(body, names, modalities, prefix)
    messages, references = await _split_media(list(zip(places, body.messages, strict=True)), system.pipeline)
    require_accepted([(each.kind, each.param) for each in references], system.pipeline)
    data: dict[str, list[Any]] = {"audio": []}
    for reference, file in zip(references, await media.load(references, ticket), strict=True):
        data.setdefault(reference.kind, []).append(file)
    audio_params = [reference.param for reference in references if reference.kind == "audio"]
    data["audio"] = await decode(list(zip(data["audio"], audio_params, strict=True)), ticket)
    with renaming(completion.names):
        terms = {"modalities": modalities, "session": session_of(request)}
        submit = partial(system.generate, messages, multi_modal_data=data, **terms, **params)
        return completion, await begin_choices(ticket, system, body, [submit], completion.id)


def _modalities(body: schemas.ChatRequest, pipeline: Pipeline) -> tuple[str, ...]:
    """Return the modalities of the answer. Raises HTTPError.

    A spoken answer has its transcript. Text beside a picture is optional: clients ask a pipeline for both that makes
    pictures only. A call that the model must make is text. Where a stage speaks the text of another one, it would read
    out the calls that the model may make.
    """
    emitted = {stage.emits for stage in pipeline.stages.values()}
    if must_call(body):
        for modality in body.modalities or ():
            if modality not in emitted:
                message = f"modalities: no stage of {pipeline.name!r} emits {modality!r}; accepted: ['text']"
                raise bad_request(message, "modalities", "unsupported_parameter")
        return ("text",)
    speaks_texts = any("script" in stage.accepts for stage in pipeline.stages.values())
    if "audio" in (body.modalities or ()) and body.tools and body.tool_choice != "none" and speaks_texts:
        message = "modalities: calls of tools would be read out; accepted: ['text'], or tool_choice 'none'"
        raise bad_request(f"{message}; /v1/realtime speaks answers with tools", "modalities", "unsupported_parameter")
    makes_pictures_only = "image" in emitted and "text" not in emitted
    asked = body.modalities or (("image",) if makes_pictures_only else ("text",))
    if "image" not in asked:
        return ("text", "audio") if "audio" in asked else ("text",)
    require_encoder()
    if body.n > 1:
        message = "n: an answer with pictures has one choice; accepted: 1; /v1/images/generations makes several"
        raise bad_request(message, "n", "unsupported_parameter")
    return ("image",) if makes_pictures_only or "text" not in asked else ("text", "image")


def must_call(body: schemas.ChatRequest) -> bool:
    """Return whether the answer is a call of a tool and nothing else."""
    return body.tool_choice not in (None, "none", "auto")


def require_possible(body: schemas.ChatRequest) -> None:
    """Refuse fields that exclude each other. Raises HTTPError."""
    has_audio = "audio" in (body.modalities or ())
    if has_audio and "image" in (body.modalities or ()):
        message = "modalities: an answer is spoken or has pictures; accepted: 'audio' or 'image', each with 'text'"
        raise bad_request(message, "modalities", "unsupported_parameter")
    if body.stream and has_audio and body.audio.format == "flac":
        message = "audio.format: 'flac' cannot be streamed; accepted: 'wav', 'mp3', 'opus', 'aac', 'pcm16'"
        raise bad_request(message, "audio.format", "unsupported_parameter")
    if has_audio and body.n > 1:
        raise bad_request("n: a spoken answer has one choice; accepted: 1", "n", "unsupported_parameter")
    if body.top_logprobs is not None and body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs: true", "top_logprobs", "invalid_value")
    if not must_call(body):
        return
    functions = [tool.function for tool in body.tools]
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        functions = [function for function in functions if function.name == name]
        if not functions:
            message = f"tool_choice.function.name: {name!r} is not one of the tools"
            raise bad_request(message, "tool_choice.function.name", "invalid_value")
    if not functions:
        raise bad_request("tool_choice: there are no tools to choose from", "tool_choice", "invalid_value")
    if not isinstance(body.response_format, schemas.TextFormat):
        message = "response_format: the answer is a call of a tool; accepted: {'type': 'text'}"
        raise bad_request(message, "response_format", "unsupported_parameter")
    require_objects(functions, "tools")


def require_objects(functions: Sequence[FunctionDefinition], param: str) -> None:
    """Refuse functions that must be called and whose arguments are no object. param: their name. Raises HTTPError."""
    for function in functions:
        if (kind := function.parameters.get("type", "object")) not in ("object", ["object"]):
            message = f"{param}: the parameters of {function.name!r} have the type {quote_value(kind)}"
            raise bad_request(f"{message}; accepted: 'object'", param, "invalid_value")


def parameters_of(
    body: schemas.ChatRequest, others: Mapping[str, Any], pipeline: Pipeline
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the engines' parameters, and the client's name of each parameter that an engine's error may name.

    others: the parameters that the client gave under the engines' own names.
    """
    speaker = schemas.speaker_of(body.audio.voice, pipeline) if "audio" in (body.modalities or ()) else None
    kwargs = {
        name: value for name, value in msgspec.structs.asdict(body.mm_processor_kwargs).items() if value is not None
    }
    given = [  # the engines' name, the client's name, the value; the last value counts
        *text_parameters(body),
        ("max_tokens", "max_completion_tokens", body.max_completion_tokens),
        ("logprobs", "logprobs", body.top_logprobs or 0 if body.logprobs else None),
        *tool_parameters(body.tools, body.tool_choice),
        ("speaker", "audio.voice", speaker),
        ("use_audio_in_video", "mm_processor_kwargs.use_audio_in_video", kwargs.pop("use_audio_in_video", None)),
        ("mm_processor_kwargs", "mm_processor_kwargs", kwargs or None),
        *((name, name, value) for name, value in others.items()),
    ]
    params, names = {}, dict.fromkeys(("audio", "image", "video", "input", "messages"), "messages")
    for name, client_name, value in given:
        if value is not None:
            params[name], names[name] = value, client_name
    return params, names


def tool_parameters(tools: Sequence[Tool], choice: ToolChoice | None) -> list[tuple[str, str, Any]]:
    """Return the engines' parameters for tools: the engines' name, the client's name, the value.

    choice: if it names a tool, one of ``tools``.
    """
    if not tools or choice == "none":
        return []
    found: list[tuple[str, str, Any]] = [("tools", "tools", msgspec.to_builtins(tools))]
    schema: dict[str, Any] | None = None
    if isinstance(choice, NamedTool):
        schema = next(tool.function.parameters for tool in tools if tool.function.name == choice.function.name)
        schema = schema or {"type": "object"}
    elif choice == "required":
        schema = call_schema(tools)
    if schema is not None:
        found.append(("structured_outputs", "tool_choice", {"json": schema}))
    return found


async def _split_media(
    messages: Sequence[tuple[str, schemas.ChatMessage]], pipeline: Pipeline
) -> tuple[list[dict[str, Any]], list[MediaReference]]:
    """Return the conversation as the pipeline takes it, with files by index, and the files. Raises HTTPError.

    messages: each with the field of the body that it is from.
    """
    conversation: list[dict[str, Any]] = []
    files: list[MediaReference] = []
    count: Counter[str] = Counter()
    for place, message in messages:
        content: Any = message.content
        calls = await _tool_fields(message, place, pipeline)
        if content is None and message.tool_calls:
            content = ""
        if content is None:
            text = f"{place}.content is missing; for a spoken answer, send its transcript"
            raise bad_request(text, f"{place}.content", "missing_required_parameter")
        if not isinstance(content, str):
            parts: list[Mapping[str, Any]] = []
            for j, part in enumerate(content):
                if isinstance(part, schemas.TextPart):
                    parts.append({"type": "text", "text": part.text})
                else:
                    file = _reference(part, f"{place}.content[{j}]")
                    parts.append({"type": file.kind, "index": count[file.kind]})
                    count[file.kind] += 1
                    files.append(file)
            content = parts
        role = "system" if message.role == "developer" else message.role
        name = {} if message.name is None else {"name": message.name}
        conversation.append({"role": role, **name, "content": content, **calls})
    return conversation, files


async def _tool_fields(message: schemas.ChatMessage, param: str, pipeline: Pipeline) -> dict[str, Any]:
    """Return what a message says about calls of tools, as the pipeline takes it. Raises HTTPError."""
    is_result = message.role == "tool"
    if not is_result and not message.tool_calls:
        return {}
    if not schemas.takes_parameter(pipeline, "tools"):
        field = f"{param}.role" if is_result else f"{param}.tool_calls"
        accepted = "; accepted: 'system', 'developer', 'user', 'assistant'" if is_result else ""
        text = f"{field}: no stage of {pipeline.name!r} takes tools{accepted}"
        raise bad_request(text, field, "unsupported_parameter")
    if is_result:
        return {"tool_call_id": message.tool_call_id or ""}
    calls = []
    for at, call in enumerate(message.tool_calls or ()):
        arguments = await checked_arguments(call, f"{param}.tool_calls[{at}].function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return {"tool_calls": calls}


def _reference(part: schemas.MediaPart, param: str) -> MediaReference:
    match part:
        case schemas.AudioPart(input_audio=audio):
            is_url = audio.data.startswith("data:")
            return MediaReference("audio", audio.data, f"{param}.input_audio.data", is_base64=not is_url)
        case schemas.AudioURLPart(audio_url=sound):
            return MediaReference("audio", sound.url, f"{param}.audio_url.url")
        case schemas.ImagePart(image_url=image):
            return MediaReference("image", image.url, f"{param}.image_url.url")
        case schemas.VideoPart(video_url=video):
            return MediaReference("video", video.url, f"{param}.video_url.url")
