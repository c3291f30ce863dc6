"""What a session asks of the pipeline: what it can do, and its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import trio

from omni_actors.config import Pipeline
from omni_actors.errors import DeadlineExceeded, InvalidRequest, OmniError
from omni_actors.generation import Generation
from omni_actors.outputs import AudioChunk, Output
from omni_actors.serve.api.schemas import takes_parameter
from omni_actors.serve.http.errors import bad_request
from omni_actors.system import OmniSystem

if TYPE_CHECKING:
    from omni_actors.serve.realtime.config import Transcription
    from omni_actors.serve.realtime.response_settings import ResponseSettings

TRANSCRIBE = "Transcribe the recording. Answer with its words alone."
TRANSCRIPTION_CHECK_S = 2.0
"""The longest wait for the transcriber's judgement of settings. Events that follow wait too, to stay in order."""
_NO_SOUND = AudioChunk(np.zeros(0, np.float32), 16_000)


class SessionPipeline:
    """A pipeline, as one session uses it.

    Args:
        system: the running pipeline.
        session: the name by which the session's requests prefer one replica of each stage.
        longest_s: how long the session lasts at most, in seconds.

    Attributes:
        hears: whether it takes recordings.
        speaks: whether it makes sound.
        answers: whether it answers messages with text. Others only transcribe.
        takes_tools: whether an engine can be given tools.
        default_tokens: the most tokens of an answer to a request that does not say how many; None: it is not known.
        transcribes: whether a stage writes the words of recordings. Other pipelines that hear are asked for the words.
    """

    def __init__(self, system: OmniSystem, session: str, longest_s: float) -> None:
        self.system, self._session, self._longest_s = system, session, longest_s
        stages = system.pipeline.stages.values()
        self.hears = any("audio" in stage.accepts for stage in stages)
        self.speaks = any(stage.emits == "audio" for stage in stages)
        is_asked = any("messages" in stage.accepts for stage in stages)
        self.answers = is_asked and any(stage.emits == "text" for stage in stages)
        self.default_tokens = default_tokens(system.pipeline)
        self.takes_tools = takes_parameter(system.pipeline, "tools")
        self.transcribes = self.hears and any(stage.emits == "transcript" for stage in stages)

    def require_hearing(self) -> None:
        """Refuse sound of the user where no stage takes it. Raises HTTPError."""
        if not self.hears:
            raise bad_request(f"{self.system.pipeline.name!r} does not accept audio", "audio", "unsupported_input")

    def generate(self, messages: Sequence[Any], clips: Sequence[AudioChunk], settings: ResponseSettings) -> Generation:
        """Submit a conversation. Read it with ``next_output``. Raises OmniError."""
        spoken = settings.is_spoken and not settings.speaks_apart
        generation: Generation = self.system.generate(
            messages,
            multi_modal_data={"audio": list(clips)} if clips else None,
            modalities=("text", "audio") if spoken else ("text",),
            session=self._session,
            deadline_s=self._longest_s if settings.is_spoken else None,
            **settings.params,
        )
        return self._paced(generation) if settings.is_spoken else generation

    def speak(self, script: AsyncIterator[str], settings: ResponseSettings) -> Generation:
        """Submit a text to speak. Read it with ``next_output``. Raises OmniError."""
        terms: dict[str, Any] = {"modalities": ("audio",), "session": self._session, "deadline_s": self._longest_s}
        generation: Generation = self.system.generate(script=script, **terms, **settings.speech)
        return self._paced(generation)

    def _paced(self, generation: Generation) -> Generation:
        """Prepare a request whose sound leaves at the pace of speech: its stages wait for the reader.

        That is no slowness of the client, so the request is not ended to make room for another one.
        """
        generation.played_at = None
        generation.stream.relay(whole=False, paced=True)
        return generation

    async def next_output(self, generation: Generation) -> Output | None:
        """Return the next output of a response's request; None: there is no more.

        A spoken answer is read at the pace of speech. So its deadline is the end of the session, and
        ``limits.deadline_s`` bounds each wait for the pipeline here. Raises OmniError: DeadlineExceeded is one.
        """
        longest_s = self.system.pipeline.limits.deadline_s
        with trio.move_on_after(longest_s) as wait:
            output = await anext(generation, None)
        if wait.cancelled_caught:
            raise DeadlineExceeded(longest_s)
        return output

    async def check_transcription(self, asked: Transcription) -> None:
        """Refuse a language that the transcriber does not know, and a prompt where none is used. Raises InvalidRequest.

        Only the worker that has loaded the model knows its languages, so this submits a recording without sound. It is
        refused for its language, or because it has no sound. A language is not refused if the system is overloaded, or
        if the transcriber takes longer than ``TRANSCRIPTION_CHECK_S``: it may be loading.
        """
        if not self.transcribes:
            if asked.prompt:
                message = f"initial_prompt: no stage of {self.system.pipeline.name!r} takes one; accepted: '', null"
                raise InvalidRequest(message, param="initial_prompt", code="unsupported_parameter")
            return
        try:
            generation = self.transcribe(_NO_SOUND, asked)
            try:
                with trio.move_on_after(TRANSCRIPTION_CHECK_S):
                    async for _ in generation:
                        pass
            finally:
                generation.abort()
        except InvalidRequest as error:
            # The ended request keeps this error, and with it everything on the path on which it is raised.
            if error.param in ("language", "initial_prompt"):
                raise InvalidRequest(error.message, param=error.param, code=error.code) from None
        except OmniError:
            pass  # the transcript of a recording will say so

    def transcribe(self, clip: AudioChunk, asked: Transcription | None) -> Generation:
        """Submit a recording. asked: the client's settings, if it wants the words. Raises OmniError."""
        language, prompt = (None, None) if asked is None else (asked.language, asked.prompt)
        terms: dict[str, Any] = {"multi_modal_data": {"audio": clip}, "session": self._session}
        generation: Generation
        if self.transcribes:
            params: dict[str, Any] = {"language": language, "initial_prompt": prompt or None}  # None: not given
            generation = self.system.generate(modalities=("transcript",), **terms, **params)
        else:
            text = TRANSCRIBE if language is None else f"{TRANSCRIBE} The code of their language is {language}."
            content = [{"type": "audio", "index": 0}, {"type": "text", "text": text}]
            generation = self.system.generate([{"role": "user", "content": content}], modalities=("text",), **terms)
        return generation

    def rate_limits(self) -> list[dict[str, Any]]:
        """Return how many requests the system takes now, as OpenAI's rate limits."""
        limit = self.system.pipeline.limits.max_requests
        left = max(0, limit - self.system.in_flight)
        reset_s = 0.0 if left else self.system.retry_after_s
        return [{"name": "requests", "limit": limit, "remaining": left, "reset_seconds": reset_s}]


def default_tokens(pipeline: Pipeline) -> int | None:
    """Return the ``max_tokens`` of the stage that writes the text, without a client's; None if none is known."""
    writer = next((name for name, stage in pipeline.stages.items() if stage.emits == "text"), None)
    if writer is None:
        return None
    declared = pipeline.spec(writer).params
    of_engine = {} if declared is None else {each.name: each.default for each in msgspec.structs.fields(declared)}
    found = pipeline.stages[writer].defaults.get("max_tokens", of_engine.get("max_tokens"))
    return found if isinstance(found, int) else None
