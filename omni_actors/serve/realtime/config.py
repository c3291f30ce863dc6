"""How a session is configured: the object of ``session.update``, and what a response changes in it.

Rules
1. An update is merged into the configuration as it was sent, and the result is validated as a whole. So a refused
   update changes nothing.
2. A field that has no effect here is accepted with the value that means "none", and refused otherwise. The exceptions
   are fields that change nothing a client can notice: the transcription's ``model``, and ``tracing``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omni_actors.serve.api.audio_schemas import MAX_PROMPT_CHARACTERS
from omni_actors.serve.api.errors import from_validation
from omni_actors.serve.api.tools import Name
from omni_actors.serve.realtime.items import FunctionCall, FunctionCallOutput, ItemReference, Message
from omni_actors.stages.bounds import Tokens
from omni_actors.turns import TurnDetection

MAX_INSTRUCTIONS = 1 << 16
MAX_TOOLS = 128
MAX_TRACING = 1 << 14

Modalities = Annotated[
    list[Literal["text", "audio"]], Meta(min_length=1, max_length=1, description="['text'] or ['audio']")
]
MaxTokens = Tokens | Literal["inf"]
Instructions = Annotated[str, Meta(max_length=MAX_INSTRUCTIONS)]
Language = Annotated[
    str, Meta(pattern="^[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8}){0,3}$", description="a code such as 'en' or 'pt-BR'")
]
_Short = Annotated[str, Meta(max_length=512)]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PCM(_Struct, frozen=True, tag_field="type", tag="audio/pcm"):
    """16 bits, little-endian, mono."""

    rate: Literal[24000] = 24000


class PCMU(_Struct, frozen=True, tag_field="type", tag="audio/pcmu"):
    """G.711 µ-law, mono, 8 kHz."""


class PCMA(_Struct, frozen=True, tag_field="type", tag="audio/pcma"):
    """G.711 A-law, mono, 8 kHz."""


AudioFormat: TypeAlias = PCM | PCMU | PCMA


class Transcription(_Struct, frozen=True):
    """Tell the client what the user says. The pipeline has one transcriber, so ``model`` has no effect.

    language: a code such as "en" or "pt-BR". prompt: see ``audio_schemas.TranslationRequest``.
    """

    model: _Short | None = None
    language: Language | None = None
    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)] | None = None


class AudioInput(_Struct, frozen=True):
    format: AudioFormat = PCM()
    noise_reduction: None = None
    transcription: Transcription | None = None
    turn_detection: TurnDetection | None = None


class Tracing(_Struct, frozen=True):
    """What OpenAI's traces of a session are called. OpenAI's agents send it. It has no effect here.

    metadata: of at most ``MAX_TRACING`` bytes of JSON.
    """

    group_id: _Short | None = None
    metadata: dict[str, Any] | None = None
    workflow_name: _Short | None = None

    def __post_init__(self) -> None:
        if len(msgspec.json.encode(self.metadata)) > MAX_TRACING:
            raise ValueError(f"metadata: expected at most {MAX_TRACING} bytes of JSON")


class VoiceId(_Struct, frozen=True):
    id: _Short


class AudioOutput(_Struct, frozen=True):
    """word_timing: an extension. Each event of sound says how much of the transcript has been heard by its end."""

    format: AudioFormat = PCM()
    voice: _Short | VoiceId | None = None
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] = 1.0
    word_timing: bool = False


class Audio(_Struct, frozen=True):
    input: AudioInput = AudioInput()
    output: AudioOutput = AudioOutput()


class FunctionTool(_Struct, frozen=True, tag_field="type", tag="function"):
    name: Name
    description: str = ""
    parameters: dict[str, Any] = {}


class FunctionChoice(_Struct, frozen=True, tag_field="type", tag="function"):
    name: Name


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | FunctionChoice


class SessionConfig(_Struct, frozen=True):
    """The configuration of a session.

    output_modalities: "audio" has its transcript. max_output_tokens: "inf" means as many as the context holds.
    """

    type: Literal["realtime"]
    model: str
    output_modalities: Modalities
    instructions: Instructions = ""
    audio: Audio = Audio()
    tools: Tools = []
    tool_choice: ToolChoice = "auto"
    max_output_tokens: MaxTokens = "inf"
    truncation: Literal["auto", "disabled"] = "auto"
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Meta(max_length=0)] | None = None
    prompt: None = None
    reasoning: None = None
    tracing: Literal["auto"] | Tracing | None = None


class ResponseAudioOutput(_Struct, frozen=True):
    format: AudioFormat | UnsetType = UNSET
    voice: _Short | VoiceId | UnsetType = UNSET


class ResponseAudio(_Struct, frozen=True):
    output: ResponseAudioOutput = ResponseAudioOutput()


class ResponseParams(_Struct, frozen=True):
    """What a response changes in the session's configuration, for itself.

    conversation: "none" keeps the response out of the conversation. input: replaces the conversation as its input.
    """

    conversation: Literal["auto", "none"] = "auto"
    input: Annotated[list[Message | FunctionCall | FunctionCallOutput | ItemReference], Meta(max_length=256)] | None = (
        None
    )
    metadata: Annotated[dict[_Short, _Short], Meta(max_length=16)] | None = None
    output_modalities: Modalities | UnsetType = UNSET
    instructions: Instructions | UnsetType = UNSET
    audio: ResponseAudio = ResponseAudio()
    tools: Tools | UnsetType = UNSET
    tool_choice: ToolChoice | UnsetType = UNSET
    max_output_tokens: MaxTokens | UnsetType = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    prompt: None = None
    reasoning: None = None

    def applied_to(self, config: SessionConfig) -> SessionConfig:
        """Return the configuration of this response. Without tools, the session's choice of one does not count."""
        names = (
            *("output_modalities", "instructions", "tools", "tool_choice", "max_output_tokens"),
            "parallel_tool_calls",
        )
        changes = {name: value for name in names if (value := getattr(self, name)) is not UNSET}
        if self.tools == []:
            changes.setdefault("tool_choice", "auto")
        asked = self.audio.output
        output = {name: value for name in ("format", "voice") if (value := getattr(asked, name)) is not UNSET}
        replaced = msgspec.structs.replace(config.audio.output, **output)
        audio = msgspec.structs.replace(config.audio, output=replaced)
        return msgspec.structs.replace(config, audio=audio, **changes)


def updated(config: SessionConfig, update: Mapping[str, Any]) -> SessionConfig:
    """Return the configuration after an update. Raises HTTPError."""
    return convert(_merged(to_wire(config), update), SessionConfig, "session")


_T = TypeVar("_T")


def convert(given: Any, type: type[_T], place: str) -> _T:
    """Return a client's value as ``type``. place: its name in an error. Raises HTTPError."""
    try:
        return msgspec.convert(given, type)
    except msgspec.ValidationError as error:
        raise from_validation(error, type, given, place=place) from error


def to_wire(config: SessionConfig) -> dict[str, Any]:
    """Return the configuration as it is sent. Extensions of OpenAI's protocol are left out unless they are used."""
    found: dict[str, Any] = msgspec.to_builtins(config)
    detection, output = found["audio"]["input"]["turn_detection"], found["audio"]["output"]
    if detection is not None and not detection["ignore_backchannels"]:
        del detection["ignore_backchannels"]
    if not output["word_timing"]:
        del output["word_timing"]
    optional = ("parallel_tool_calls", "include", "prompt", "reasoning", "tracing")
    return {name: value for name, value in found.items() if name not in optional or value is not None}


def _merged(config: dict[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the fields of ``update``. "audio", and its "input" and "output", are merged themselves."""
    merged = {**config, **update}
    for name in ("audio", "input", "output"):
        before, after = config.get(name), update.get(name)
        if isinstance(before, dict) and isinstance(after, Mapping):
            merged[name] = _merged(before, after)
    return merged
