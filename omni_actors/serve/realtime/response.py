"""Run one response: read the pipeline's answer, and send it at the pace of speech.

Rules
1. A response waits for the words of the user's recordings where the pipeline has a transcriber. Otherwise the pipeline
   hears the recordings themselves. A response to a turn in which there are no words, such as a cough, is empty, unless
   something before it still waits for an answer: words of the user, or the output of a function. An answer of which
   nothing was heard is none, and a call of a function is one.
2. If the model may call functions, and the pipeline speaks scripts, the text is spoken by a request of its own: calls
   are not read aloud. The beginning of a call that was cut is dropped too, and a whole call is completed, whatever
   ends the response. A text in which there is nothing to speak ends without sound, as it does where the same request
   speaks it.
3. A conversation that is too long for the model loses its older half and is tried again, unless the session's
   ``truncation`` is "disabled". Messages of the system stay. Nothing has been sent by then.
4. A conversation that the pipeline refuses, and in which one side speaks twice in a row, is tried again with such
   messages joined: some chat templates need that.
5. ``cancel`` ends the requests in every stage at once. Sound that has not left is dropped.
6. Text is read and sent at once, unless ``QUEUED_CHUNKS`` chunks of sound that may not leave yet are before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import trio

from omni_actors.errors import InvalidRequest, OmniError
from omni_actors.generation import Generation
from omni_actors.outputs import AudioChunk, Output
from omni_actors.serve.api.errors import renamed, to_http_error
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.realtime.chat_messages import chat_messages, join_neighbours
from omni_actors.serve.realtime.conversation import Conversation, Entry, has_open_question
from omni_actors.serve.realtime.outbox import Outbox, error_object
from omni_actors.serve.realtime.pacer import Pacer
from omni_actors.serve.realtime.pipeline import SessionPipeline
from omni_actors.serve.realtime.response_events import ResponseEvents
from omni_actors.serve.realtime.response_settings import NAMES, ResponseSettings
from omni_actors.serve.realtime.sound import SoundEncoder, bytes_per_s
from omni_actors.serve.routes.chat import must_call
from omni_actors.serve.routes.chat_answer import Calls

DELTA_S = 0.2
"""The longest sound of one event."""
QUEUED_CHUNKS = 256
"""How many chunks of sound may be read before they may leave (rule 6)."""
SLOW_CLIENT_S = 2.0
"""The time that a client may take no event and still keep the place of a spoken answer in a full system."""

_SOUNDLESS = ("empty", "nothing_to_speak")
"""The codes with which a text to speak is refused in which there is nothing to pronounce."""

CancelReason = Literal["client_cancelled", "turn_detected"]


class Response:
    """One response.

    Args:
        pipeline: what the session asks of the pipeline.
        outbox: receives the events.
        conversation: receives the items; None if the response is out of the conversation.
        settings: what the response is asked to be.
        entries: its input.
        player_ends: when the client will have played the answers before; None: it has none of them.
        needs_words: whether it answers a turn that the user has spoken.
    """

    def __init__(
        self,
        pipeline: SessionPipeline,
        outbox: Outbox,
        conversation: Conversation | None,
        *,
        settings: ResponseSettings,
        entries: Sequence[Entry],
        player_ends: float | None = None,
        needs_words: bool = False,
    ) -> None:
        self._pipeline, self._outbox, self._settings = pipeline, outbox, settings
        self._needs_words = needs_words
        self.is_apart = conversation is None
        """Whether it is out of the conversation."""
        self.entries = [entry for entry in entries if not entry.is_unfinished_call]
        """The input. A call whose arguments are being written stays out, also if it is finished meanwhile."""
        output = settings.config.audio.output
        self._events = ResponseEvents(
            outbox, conversation, settings.head, is_spoken=settings.is_spoken, has_word_timing=output.word_timing
        )
        self._calls = Calls(settings.body)
        self._encoder = SoundEncoder(output.format)
        self.pacer = Pacer(ends=player_ends)
        self._speaker: Generation | None = None
        """The generation whose sound is sent."""
        self._generations: list[Generation] = []
        """The generations that are read."""
        self._scope = trio.CancelScope()
        self._reason: CancelReason | None = None
        self._failure: OmniError | HTTPError | None = None
        self._finish_reason = "stop"
        self._usage: dict[str, int] | None = None
        self.done = trio.Event()
        """Set by the session when the last event is posted."""

    @property
    def id(self) -> str:
        return self._events.id

    @property
    def message(self) -> Entry | None:
        """The message of the answer, once it has begun."""
        return self._events.message

    def cancel(self, reason: CancelReason) -> None:
        """End the response. Its last events follow."""
        self._reason = self._reason or reason
        self._scope.cancel()

    def fail(self, error: OmniError) -> None:
        """End the response with an error. Its last events follow."""
        self._failure = self._failure or error
        self._scope.cancel()

    async def run(self) -> None:
        """Send all events of the response. Cancellation ends its requests, and sends nothing more."""
        self._events.begin()
        limits = self._pipeline.rate_limits()
        self._outbox.post("rate_limits.updated", rate_limits=limits)
        with self._scope:
            await self._answer()
        await trio.lowlevel.checkpoint_if_cancelled()
        self._events.end(*self._outcome())

    def _outcome(self) -> tuple[str, dict[str, Any] | None, dict[str, Any] | None]:
        """Return the status, its details and the usage."""
        usage = None if self._usage is None else _usage(**self._usage)
        if self._failure is not None:
            error = self._failure if isinstance(self._failure, HTTPError) else to_http_error(self._failure)
            described = error_object(error)
            described.pop("param")
            return "failed", {"type": "failed", "error": described}, usage
        if self._reason is not None:
            return "cancelled", {"type": "cancelled", "reason": self._reason}, usage
        if self._finish_reason == "length":
            return "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}, usage
        return "completed", {"type": "completed"}, usage

    async def _answer(self) -> None:
        """Send the answer. ``_failure`` is why there is none, or no more."""
        try:
            if self._pipeline.transcribes:
                await self._wait_words()
                if self._needs_words and not has_open_question(self.entries):
                    return
            async with trio.open_nursery() as nursery:
                queue, queued = trio.open_memory_channel[bytes](QUEUED_CHUNKS)
                nursery.start_soon(self._send_sound, queued)
                async with queue:
                    await self._compute(queue)
        except* (OmniError, HTTPError) as group:
            failure = group.exceptions[0]
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            assert isinstance(failure, OmniError | HTTPError)
            if isinstance(failure, InvalidRequest):
                failure = renamed(failure, NAMES) or failure
            self._failure = failure.with_traceback(None)  # the ended request keeps the error, and not this response

    async def _compute(self, queue: trio.MemorySendChannel[bytes]) -> None:
        """Read the pipeline's answer. Raises OmniError."""
        if not self._settings.speaks_apart:
            await self._read(queue, None)
        else:
            async with trio.open_nursery() as nursery:
                script, parts = trio.open_memory_channel[str](QUEUED_CHUNKS)
                nursery.start_soon(self._speak, parts, queue)
                async with script:
                    await self._read(queue, script)
        self._events.all_computed()
        if rest := self._encoder.finish():
            await queue.send(rest)

    async def _wait_words(self) -> None:
        """Wait for the words of the recordings.

        Raises OmniError: there are none of the recording that the answer would be about, because the user has said
        nothing after it.
        """
        for entry in self.entries:
            await entry.words_known.wait()
        said = next((entry for entry in reversed(self.entries) if entry.recordings or entry.has_words_of_user), None)
        if said is not None and said.error is not None:
            raise said.error

    async def _read(self, queue: trio.MemorySendChannel[bytes], script: trio.MemorySendChannel[str] | None) -> None:
        """Read the answer of the model. script: receives the text to speak, if a request of its own speaks it."""
        entries = self.entries
        messages, clips = await self._messages(entries)
        while True:
            generation = self._pipeline.generate(messages, clips, self._settings)
            self._generations.append(generation)
            try:
                while (output := await self._pipeline.next_output(generation)) is not None:
                    await self._wait_room()
                    self._finish_reason = output.data.get("finish_reason", self._finish_reason)
                    if "completion_tokens" in output.data:
                        names = ("prompt_tokens", "completion_tokens")
                        self._usage = {name: output.data[name] for name in names}
                    if isinstance(output.delta, AudioChunk):
                        await self._add_sound(generation, output, queue)
                    elif isinstance(output.delta, str) and output.modality == "text":
                        await self._add_text(*self._calls.push(output.delta), script)
                break
            except InvalidRequest as error:
                if error.code == "context_length_exceeded":
                    left = _without_older_half(entries) if self._settings.may_truncate else None
                    if left is None:
                        raise
                    entries = left
                    messages, clips = await self._messages(entries)
                else:
                    joined = await join_neighbours(messages) if error.param == "messages" else messages
                    if joined == messages:
                        raise
                    messages = joined
            finally:
                self._generations.remove(generation)
                generation.abort()
        text, calls = self._calls.finish()
        is_cut = self._finish_reason == "length"
        await self._add_text("" if is_cut or must_call(self._settings.body) else text, calls, script)
        if not is_cut:  # else the end of the response ends the call that was cut
            self._events.end_call()

    async def _messages(self, entries: Sequence[Entry]) -> tuple[list[dict[str, Any]], list[AudioChunk]]:
        """Return the messages and the recordings of a conversation."""
        instructions = self._settings.config.instructions
        return await chat_messages(entries, instructions, transcribed=self._pipeline.transcribes)

    async def _add_text(
        self, text: str, calls: Sequence[dict[str, Any]], script: trio.MemorySendChannel[str] | None
    ) -> None:
        if text:
            self._events.text(text)
            if script is not None:
                await script.send(text)
        for call in calls:
            self._events.call(call)
            if self._calls.are_whole:
                self._events.end_call()

    async def _speak(self, parts: trio.MemoryReceiveChannel[str], queue: trio.MemorySendChannel[bytes]) -> None:
        """Speak the parts of a text. Raises OmniError."""
        first = await anext(aiter(parts), None)
        if first is None:  # nothing but calls
            return
        generation = self._pipeline.speak(_chained(first, parts), self._settings)
        self._generations.append(generation)
        try:
            while (output := await self._pipeline.next_output(generation)) is not None:
                if isinstance(output.delta, AudioChunk):
                    await self._add_sound(generation, output, queue)
        except InvalidRequest as error:
            if error.code not in _SOUNDLESS:
                raise
        finally:
            self._generations.remove(generation)
            generation.abort()

    async def _wait_room(self) -> None:
        """Wait until the client has taken most events. A spoken answer may lose its place if that takes long."""
        if not self._settings.is_spoken:
            await self._outbox.wait_room()
            return
        with trio.move_on_after(SLOW_CLIENT_S) as grace:
            await self._outbox.wait_room()
        if grace.cancelled_caught:
            self._relay(paced=False)
            await self._outbox.wait_room()
            self._relay(paced=True)

    def _relay(self, *, paced: bool) -> None:
        for generation in self._generations:
            generation.stream.relay(whole=False, paced=paced)

    async def _add_sound(self, generation: Generation, output: Output, queue: trio.MemorySendChannel[bytes]) -> None:
        assert isinstance(output.delta, AudioChunk)
        self._speaker = generation
        self._events.computed(output.delta, output.data.get("sentence_text"))
        if data := self._encoder.push(output.delta):
            await queue.send(data)

    async def _send_sound(self, queued: trio.MemoryReceiveChannel[bytes]) -> None:
        """Send sound at the pace of speech. Its listener's underruns are counted as it leaves."""
        rate = bytes_per_s(self._encoder.format)
        size = round(rate * DELTA_S)
        speech, playback = self._pipeline.system.metrics.speech, None
        try:
            async for data in queued:
                for at in range(0, len(data), size):
                    piece = data[at : at + size]
                    await trio.sleep(self.pacer.wait_s(trio.current_time()))
                    await self._wait_room()
                    duration_s = len(piece) / rate
                    now = trio.current_time()
                    playback = playback or speech.open(self.pacer.unplayed_s(now))
                    self._events.sound(piece, rate)
                    self.pacer.sent(now, duration_s)
                    speech.feed(playback, duration_s)
                    if self._speaker is not None:
                        self._speaker.stream.request.underruns = playback.underruns
        finally:
            if playback is not None:
                speech.close(playback)


def _without_older_half(entries: Sequence[Entry]) -> list[Entry] | None:
    """Return entries without the older half of those that are not the system's; None: there are fewer than two."""
    others = [entry for entry in entries if not entry.is_from_system]
    dropped = set(others[: (len(others) + 1) // 2] if len(others) > 1 else ())
    return [entry for entry in entries if entry not in dropped] if dropped else None


async def _chained(first: str, parts: trio.MemoryReceiveChannel[str]) -> AsyncIterator[str]:
    yield first
    async for part in parts:
        yield part


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage. Tokens of recordings count as text tokens: an omni model's engine counts them together."""
    return {
        "total_tokens": prompt_tokens + completion_tokens,
        "input_tokens": prompt_tokens,
        "output_tokens": completion_tokens,
        "input_token_details": {"text_tokens": prompt_tokens, "audio_tokens": 0, "cached_tokens": 0},
        "output_token_details": {"text_tokens": completion_tokens, "audio_tokens": 0},
    }
