"""The schemas of request bodies, and the functions that check a body.

Rules
1. A null counts as an absent field.
2. A field of OpenAI's API that this server or its engines do not implement is refused by name, unless its value has no
   effect (``other_fields``).
3. Any other field is a parameter of the pipeline's engines ("top_k"), which accept or refuse it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from omni_actors.config import Pipeline
from omni_actors.serve.api.errors import from_validation
from omni_actors.serve.api.other_fields import ELSEWHERE, IGNORED_FIELDS, UNSUPPORTED_FIELDS, WITHOUT_EFFECT
from omni_actors.serve.api.tools import Tool, ToolCall, ToolChoice
from omni_actors.serve.http.errors import HTTPError, bad_request, quote_value
from omni_actors.system import OmniSystem

MAX_SHORT = 1 << 16
"""The most characters of a field's name, and of a string that is not content: an error may quote all of it."""
CONTENT = frozenset(
    {
        "content",
        "text",
        "data",
        "prompt",
        "negative_prompt",
        "url",
        "image_url",
        "arguments",
        "input",
        "instructions",
        "output",
    }
)
"""The fields that carry content."""

Text = Annotated[str, Meta(min_length=1)]

MAX_CHOICES = 128
MAX_LISTED = 20
"""Names of models that an error lists."""
MAX_EMBEDDINGS = 2048
"""OpenAI's own limit."""


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class InputAudio(msgspec.Struct, frozen=True):
    data: Text
    """An audio file in base64, or its data: URL."""
    format: Literal["wav", "mp3", "flac", "ogg"]


class AudioPart(msgspec.Struct, frozen=True, tag="input_audio"):
    input_audio: InputAudio


class AudioURL(msgspec.Struct, frozen=True):
    url: Text


class AudioURLPart(msgspec.Struct, frozen=True, tag="audio_url"):
    """An extension of OpenAI's API that other open servers have too."""

    audio_url: AudioURL


class ImageURL(msgspec.Struct, frozen=True):
    url: Text
    detail: Literal["auto", "high"] = "auto"
    """A pipeline always uses the best resolution that it supports."""


class ImagePart(msgspec.Struct, frozen=True, tag="image_url"):
    """Some servers take the fields of the processor here, where this one refuses them: see ``ProcessorKwargs``."""

    image_url: ImageURL
    min_pixels: None = None
    max_pixels: None = None


class VideoURL(msgspec.Struct, frozen=True):
    url: Text


class VideoPart(msgspec.Struct, frozen=True, tag="video_url"):
    """An extension of OpenAI's API that other open servers have too. As for ``ImagePart``."""

    video_url: VideoURL
    min_pixels: None = None
    max_pixels: None = None
    fps: None = None


MediaPart = AudioPart | AudioURLPart | ImagePart | VideoPart
ContentPart = TextPart | MediaPart


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    """The participant. Only some chat templates know names."""
    tool_calls: list[ToolCall] | None = None
    """Calls that the assistant made."""
    tool_call_id: str | None = None
    """The call whose result a message with the role "tool" is."""
    function_call: None = None
    """OpenAI's older form of ``tool_calls``, which is refused: without its call, the conversation would differ."""


class JSONSchema(msgspec.Struct, frozen=True):
    schema: dict[str, Any]
    name: str = ""
    description: str = ""
    strict: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class JSONFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JSONSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: JSONSchema


class AudioParams(msgspec.Struct, frozen=True):
    """voice: see ``has_speakers``. word_timing: an extension, as in ``realtime.config.AudioOutput``; for streams."""

    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"] = "wav"
    voice: Any = None
    word_timing: bool = False


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class ProcessorKwargs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of the media processor, under vLLM's name."""

    use_audio_in_video: bool | None = None
    min_pixels: Any = None
    """This field and those below are checked by the engines."""
    max_pixels: Any = None
    fps: Any = None


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the bodies of all model routes have. A client of a server with one pipeline may leave the model out."""

    model: str


class ChoicesBody(ModelBody, frozen=True, kw_only=True):
    """What the bodies of routes have that give several answers to a prompt."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Answers to each prompt. With a seed, each has its own: seed, seed + 1, …"""
    seed: Any = None
    """An integer, which the engines check."""


class TextBody(ChoicesBody, frozen=True, kw_only=True):
    """The fields that the bodies of the chat and the completion API share."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    response_format: TextFormat | JSONFormat | JSONSchemaFormat = TextFormat()


class ChatRequest(TextBody, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    modalities: Annotated[list[Literal["text", "audio", "image"]], Meta(min_length=1)] | None = None
    """Without it, the answer is text or, where the pipeline writes none, a picture."""
    audio: AudioParams = AudioParams()
    max_completion_tokens: int | None = None
    mm_processor_kwargs: ProcessorKwargs = ProcessorKwargs()
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """Whether an answer may call several tools. If not, only its first call is passed on."""


class CompletionRequest(TextBody, frozen=True, kw_only=True):
    """The body of /v1/completions.

    prompt: one or several texts, or lists of token ids. add_special_tokens: whether the tokenizer adds its own special
    tokens to a text.
    """

    prompt: Text | Annotated[list[Text | int | list[int]], Meta(min_length=1)]
    add_special_tokens: bool = True
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class EmbeddingRequest(ModelBody, frozen=True, kw_only=True):
    """The body of /v1/embeddings. input: one or several texts, or lists of token ids."""

    input: Text | Annotated[list[Text | int | list[int]], Meta(min_length=1, max_length=MAX_EMBEDDINGS)]
    add_special_tokens: bool = True
    """As in ``CompletionRequest``."""
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize: a prompt, or a conversation of texts."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, Any] | None = None
    """The engines check them."""
    add_special_tokens: bool = True
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]]


class ErrorDetails(msgspec.Struct, frozen=True):
    """OpenAI's description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(msgspec.Struct, frozen=True):
    """The body of each error response."""

    error: ErrorDetails


Body = TypeVar("Body", bound=msgspec.Struct)
OfModel = TypeVar("OfModel", bound=ModelBody)

RESERVED_NAMES = {
    name
    for call in (OmniSystem.generate, OmniSystem.submit, OmniSystem.encode)
    for name in inspect.signature(call).parameters
}
"""The arguments of ``generate`` that are not engines' parameters, and those of ``encode`` ("pooling"), which requests
for an answer do not have. A client's field must not have such a name."""


def parse(fields: Mapping[str, Any], schema: type[Body], *, strict: bool = True) -> tuple[Body, dict[str, Any]]:
    """Return the validated body, and the engines' parameters in it.

    strict: False also accepts numbers as strings. Raises HTTPError.
    """
    _require_short(fields)
    try:
        body = msgspec.convert(fields, schema, strict=strict)
    except msgspec.ValidationError as error:
        raise from_validation(error, schema, fields) from error
    params: dict[str, Any] = {}
    for name, value in fields.items():
        if name in schema.__struct_encode_fields__ or name in IGNORED_FIELDS:
            continue
        if name not in UNSUPPORTED_FIELDS:
            if name in RESERVED_NAMES:
                raise _unknown(name)
            params[name] = value
        elif value not in UNSUPPORTED_FIELDS[name]:
            accepted = " or ".join(map(repr, UNSUPPORTED_FIELDS[name])) or "its absence"
            message = f"{name}: {quote_value(value)} is not supported; accepted: {accepted}"
            raise bad_request(message, name, "unsupported_parameter")
    return body, params


def effective(params: Mapping[str, Any], pipeline: Pipeline) -> dict[str, Any]:
    """Return the engines' parameters without those whose value changes nothing.

    A value that differs from a default of the pipeline's does change something. Raises HTTPError for a field of another
    server that no engine of the pipeline takes, and that has another name here.
    """
    defaults = {name for stage in pipeline.stages.values() for name in stage.defaults}
    takes_all = any(pipeline.spec(stage).params is None for stage in pipeline.stages)
    found: dict[str, Any] = {}
    if not isinstance(params.get("lora", ""), str):
        message = "lora: the name of an adapter was expected; the server's operator loads adapters"
        raise bad_request(message, "lora")
    for name, value in params.items():
        if name in WITHOUT_EFFECT and value == WITHOUT_EFFECT[name] and name not in defaults:
            continue
        if name in ELSEWHERE and not takes_all and not takes_parameter(pipeline, name):
            instead = ELSEWHERE[name]
            if not instead.isidentifier() or takes_parameter(pipeline, instead):
                raise _unknown(name)
        found[name] = value
    return found


def _unknown(name: str) -> HTTPError:
    """Return the error about a field that the server does not have."""
    advice = f"; send {ELSEWHERE[name]}" if name in ELSEWHERE else ""
    return bad_request(f"unknown parameter {name!r}{advice}", name, "unknown_parameter")


def _require_short(fields: Mapping[str, Any]) -> None:
    """Raises HTTPError if a string is long that an error may quote."""
    pending: list[tuple[str, Any]] = [(name, value) for name, value in fields.items() if name not in IGNORED_FIELDS]
    while pending:
        name, value = pending.pop()
        if len(name) > MAX_SHORT:
            raise bad_request(f"unknown parameter {quote_value(name)}", name, "unknown_parameter")
        if isinstance(value, dict):
            pending.extend(value.items())
        elif isinstance(value, list):
            pending.extend((name, item) for item in value)
        elif isinstance(value, str) and len(value) > MAX_SHORT and name not in CONTENT:
            message = f"{quote_value(name)}: {len(value)} characters; accepted: {MAX_SHORT}"
            raise bad_request(message, name, "string_too_long")


def has_speakers(pipeline: Pipeline) -> bool:
    """Return whether an engine of the pipeline has a choice of speakers, so that a client's ``voice`` names one.

    Otherwise every voice is accepted and has no effect: the pipeline has one voice, and OpenAI's clients must send one.
    """
    return takes_parameter(pipeline, "speaker")


def speaker_of(voice: Any, pipeline: Pipeline) -> Any:
    """Return the speaker that a client's ``voice`` names. None: the default one, which OpenAI's own names mean."""
    is_openais = isinstance(voice, str) and voice.lower() in OPENAI_VOICES
    return voice if has_speakers(pipeline) and not is_openais else None


OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)
"""The names of OpenAI's voices. Its clients and their samples send them, and no model that runs here has them."""


def takes_parameter(pipeline: Pipeline, name: str) -> bool:
    """Return whether an engine of the pipeline declares a request parameter of this name."""
    schemas = [pipeline.spec(stage).params for stage in pipeline.stages]
    return any(name in schema.__struct_fields__ for schema in schemas if schema is not None)


def require_model(asked: str, served: Sequence[str]) -> None:
    """Raises HTTPError 404 if the client asks for another model than the pipeline and its LoRA adapters."""
    if asked not in served:
        known = ", ".join(map(repr, served[:MAX_LISTED]))
        message = f"the model {quote_value(asked)} does not exist; this server serves {known}"
        raise HTTPError(404, message, param="model", code="model_not_found")
