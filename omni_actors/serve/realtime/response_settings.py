"""The settings of one response: the session's configuration with the response's own changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_actors.config import Pipeline
from omni_actors.serve.api import schemas
from omni_actors.serve.api.schemas import takes_parameter
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.realtime.config import MaxTokens, ResponseParams, SessionConfig, VoiceId, to_wire
from omni_actors.serve.realtime.pipeline import default_tokens
from omni_actors.serve.realtime.tools import chat_tool_choice, chat_tools
from omni_actors.serve.routes.chat import parameters_of, require_possible
from omni_actors.stages.bounds import MAX_TOKENS

NAMES = {
    "max_tokens": "max_output_tokens",
    "structured_outputs": "tool_choice",
    "speaker": "audio.output.voice",
    "speed": "audio.output.speed",
    "lora": "model",
}
"""The client's name of each parameter, by the engines' name."""


class ResponseSettings:
    """The settings of one response. Raises HTTPError: they exclude each other.

    Attributes:
        config: the configuration of this response.
        body: its tools, in the form of the chat API.
        params: the engines' parameters of the answer.
        speech: the engines' parameters of a request that speaks the text.
        head: the fields of the response object that do not change.
        is_spoken: whether the answer is spoken.
        speaks_apart: whether the text is spoken by a second request, which ``speech`` is for.
    """

    def __init__(
        self, session: SessionConfig, asked: ResponseParams, pipeline: Pipeline, params: Mapping[str, Any]
    ) -> None:
        self.config = config = asked.applied_to(session)
        self.is_spoken = "audio" in config.output_modalities
        accepted = {kind for stage in pipeline.stages.values() for kind in stage.accepts}
        has_tools = bool(config.tools) and config.tool_choice != "none"
        self.speaks_apart = self.is_spoken and has_tools and "script" in accepted
        voice = config.audio.output.voice
        most = config.max_output_tokens
        self.body = schemas.ChatRequest(
            model=config.model,
            messages=[schemas.ChatMessage("user", "")],
            modalities=["text", "audio"] if self.is_spoken else ["text"],
            audio=schemas.AudioParams(voice=voice.id if isinstance(voice, VoiceId) else voice),
            max_completion_tokens=_tokens_to_ask(most, default_tokens(pipeline)),
            tools=chat_tools(config),
            tool_choice=chat_tool_choice(config) if config.tools else None,
            parallel_tool_calls=config.parallel_tool_calls,
        )
        require_possible(self.body)
        speed = config.audio.output.speed
        if self.is_spoken and speed != 1.0 and not takes_parameter(pipeline, "speed"):
            param = "session.audio.output.speed"
            message = f"{param}: no stage of {pipeline.name!r} changes the speed of speech; accepted: 1.0"
            raise bad_request(message, param, "unsupported_parameter")
        others = {**params, **({"speed": speed} if self.is_spoken and speed != 1.0 else {})}
        self.params, _ = parameters_of(self.body, others, pipeline)
        self.speech = {name: self.params[name] for name in ("speed", "speaker") if name in self.params}
        if self.speaks_apart:
            self.params = {name: value for name, value in self.params.items() if name not in self.speech}
        self.may_truncate = config.truncation == "auto"
        output = to_wire(config)["audio"]["output"]
        output.pop("speed")
        output.pop("word_timing", None)
        output["voice"] = self.body.audio.voice  # a string, also where the session has an object
        self.head: dict[str, Any] = {
            "conversation_id": None,
            "output_modalities": config.output_modalities,
            "max_output_tokens": most,
            "audio": {"output": output},
            "metadata": asked.metadata,
        }


def _tokens_to_ask(most: MaxTokens, default: int | None) -> int | None:
    """Return what a request says: nothing for the default of the stage that writes, as other stages may have others."""
    if most == "inf":
        return None if default is None else MAX_TOKENS
    return None if most == default else most
