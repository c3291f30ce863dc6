"""A session: asks the server, prints the answers while they arrive, and keeps their times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
import trio

from omni_actors.cli.answer_events import AnswerPart, answer_part
from omni_actors.cli.chat.conversation import Conversation
from omni_actors.cli.chat.sound import SoundSink, sound_sink
from omni_actors.cli.measurement import Measurement
from omni_actors.cli.running import notes
from omni_actors.cli.server_client import Server, ServerError, events
from omni_actors.command_line import CannotWrite
from omni_actors.plain_text import clean


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """How answers are spoken.

    Attributes:
        wanted: Whether they are.
        voice: The voice.
        folder: Where each is written, as "answer-1.wav", …, beside those that are there; None: nowhere.
        player: The command that plays them; None: they are not played.
    """

    wanted: bool = False
    voice: str = "alloy"
    folder: Path | None = None
    player: tuple[str, ...] | None = None


class Session:
    """A conversation with a model of a server.

    Args:
        server: The server.
        model: The model.
        speech: How answers are spoken.
        parameters: Fields of each request, such as ``max_tokens``.
        system: The instructions to the model.
    """

    def __init__(
        self, server: Server, model: str, speech: Speech, *, parameters: Mapping[str, Any], system: str = ""
    ) -> None:
        self.server, self.model, self.conversation = server, model, Conversation(system)
        self._speech, self._parameters = speech, parameters
        self._answers = 0
        self._tokens = 0
        self._last: Measurement | None = None
        self._scope: trio.CancelScope | None = None
        """The cancel scope of the answer in progress."""

    def stop_answer(self) -> bool:
        """Stop the answer in progress. Return whether there is one."""
        if self._scope is None:
            return False
        self._scope.cancel()
        return True

    async def ask(self, text: str) -> None:
        """Send a message, and print the answer while it arrives. ``stop_answer`` ends it early.

        Raises ServerError: the conversation is then as before, with what was attached. Raises CannotWrite after
        the answer, which stays in the conversation.
        """
        self.conversation.ask(text)
        now = time.monotonic()
        failure: CannotWrite | None = None
        measurement, texts = Measurement(due=now, sent=now), list[str]()
        try:
            with trio.CancelScope() as self._scope:
                failure = await self._receive(measurement, texts)
            was_stopped = self._scope.cancelled_caught
        except ServerError:
            self.conversation.take_back()
            raise
        finally:
            self._scope = None
            click.echo()
        self.conversation.answer("".join(texts), has_media=bool(measurement.sound_s or measurement.pictures))
        measurement.ended = time.monotonic()
        self._answers, self._last = self._answers + 1, measurement
        self._tokens += measurement.tokens or 0
        if was_stopped:
            notes.print("stopped", style="yellow")
        if failure is not None:
            raise failure

    async def _receive(self, measurement: Measurement, texts: list[str]) -> CannotWrite | None:
        speech = self._speech
        path = None if speech.folder is None else _free_path(speech.folder, self._answers + 1)
        body = {"model": self.model, "messages": self.conversation.messages, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self._parameters}
        if speech.wanted:
            body |= {"modalities": ["text", "audio"], "audio": {"voice": speech.voice, "format": "pcm16"}}
        async with sound_sink(path, speech.player) as sink:
            async with self.server.stream("POST", "chat/completions", json=body) as response:
                async for part in events(response, answer_part):
                    measurement.add(part, time.monotonic())
                    await self._show(part, texts, sink)
            if not measurement.is_complete:
                raise ServerError("incomplete answer", "the connection ended before the answer did")
        if path is not None and measurement.sound_s and sink.failure is None:
            notes.print(f"\n{path}: {measurement.sound_s:.1f} s of speech", style="dim")
        return sink.failure

    async def _show(self, part: AnswerPart, texts: list[str], sink: SoundSink) -> None:
        if part.text:
            texts.append(part.text)
            click.echo(clean(part.text, keep_lines=True), nl=False)
        if part.sound:
            await sink.write(part.sound)
        if part.pictures:
            notes.print("the answer has a picture; `omni-actors draw` writes pictures to files", style="dim")

    def statistics(self) -> list[str]:
        """Return the times of the last answer and the sums of the session, one line each."""
        if self._last is None:
            return ["there is no answer yet"]
        last, figures = self._last, self._last.figures()
        names = {"ttft": "TTFT", "ttfa": "TTFA", "e2e": "total"}
        line = "   ".join(f"{title} {figures[name]:.3f} s" for name, title in names.items() if name in figures)
        if "tpot" in figures and figures["tpot"] > 0:
            line += f"   {1 / figures['tpot']:.1f} tokens/s"
        if last.sound_s:
            line += (
                f"   {last.sound_s:.1f} s of speech   RTF {figures['rtf']:.2f}   underruns {figures['underruns']:.0f}"
            )
        return [line, f"{self._answers} answer{'s' if self._answers > 1 else ''}, {self._tokens} tokens"]


def _free_path(folder: Path, number: int) -> Path:
    """Return the path of an answer. number: the least that its name may have."""
    paths = (folder / f"answer-{each}.wav" for each in itertools.count(number))
    return next(path for path in paths if not path.exists())
