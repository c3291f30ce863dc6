"""The answer to a request: its pieces, its measurements, and ways to collect it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import trio

from omni_actors.config import Pipeline
from omni_actors.errors import RequestError
from omni_actors.metrics import SpokenStreams
from omni_actors.orchestrator.pieces import Piece
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.stream import OutputStream
from omni_actors.output_files import SOUND_SUFFIXES, SoundWriter
from omni_actors.outputs import (
    PICTURE_SUFFIXES,
    Answer,
    AudioChunk,
    Delta,
    Output,
    Picture,
    RequestMetrics,
    StageTimes,
    Total,
)
from omni_actors.playback import Playback


class Generation:
    """The answer to one request, as an asynchronous iterator of ``Output``.

    Iteration raises the ``RequestError`` that ended the request. Cancelling a read loses nothing: the output stays
    queued. Dropping the object, for instance by leaving the loop early, aborts the request; ``abort`` does so at once.

    ``collect``, ``text``, ``audio``, ``picture``, ``pictures`` and ``save`` read the rest of the answer. They may
    follow each other, and several tasks may call them at once:

    >>> async def main():
    ...     async with OmniSystem.open("echo") as omni:
    ...         generation = omni.generate("hello")
    ...         return await generation.text(), await generation.audio()
    >>> trio.run(main)
    ('hello', None)
    """

    def __init__(
        self,
        stream: OutputStream,
        pipeline: Pipeline,
        on_final: Callable[[RequestMetrics], None],
        *,
        on_interval: Callable[[str, float], None],
        speech: SpokenStreams,
        cumulative: bool = False,
    ) -> None:
        self.stream, self._pipeline, self._on_final, self._on_interval = stream, pipeline, on_final, on_interval
        """stream: for a reader that relays output to a connection (see ``OutputStream.relay``)."""
        self._totals: dict[tuple[str, Any], Total] | None = {} if cumulative else None
        self._audio_s = 0.0
        self._speech = speech
        self.played_at: float | None = 1.0
        """How fast a listener hears the sound, as a factor: 2.0 if its speed is doubled afterwards. None: it does not
        hear the sound as it is read, because the reader collects it or sends it later. Then no underrun is counted."""
        self._playback: Playback | None = None
        """The simulated player of the sound that this object has returned."""
        self._first: dict[str, float] = {}
        self._latest: dict[tuple[str, Any], float] = {}
        """When the latest output with content arrived, by stage and index."""
        self._answer: Answer | None = None
        self._collecting = trio.Lock()
        """Held while a task reads the rest of the answer. Others that ask for it wait, and get the same one."""
        self._collected = _Collected()
        """What was read of it, also by a task that was cancelled or could not write its file."""

    @property
    def request_id(self) -> str:
        """The request's identifier, as ``OmniSystem.abort`` takes it."""
        return self.stream.request.name

    def abort(self) -> None:
        """End the request now, in every stage, and drop unread output; iteration then raises ``Aborted``.

        It has no effect on an answer that was read to its end.
        """
        self.stream.abort()
        self._end_speech()

    async def collect(self) -> Answer:
        """Read the rest of the answer and return it. Later calls, and those of other tasks meanwhile, return the same.

        Cancellation loses nothing: the next call reads on. Raises the ``RequestError`` that ended the request.
        """
        return await self._collect(None)

    async def text(self) -> str:
        """Read the rest of the answer and return its text; "" if there is none. Raises as ``collect`` does."""
        return (await self.collect()).text

    async def audio(self) -> AudioChunk | None:
        """Read the rest of the answer and return its sound; None if there is none. Raises as ``collect`` does."""
        return (await self.collect()).audio

    async def picture(self) -> Picture | None:
        """Read the rest of the answer and return its first finished picture; None if there is none.

        Raises as ``collect`` does.
        """
        return (await self.collect()).picture

    async def pictures(self) -> tuple[Picture, ...]:
        """Read the rest of the answer and return its finished pictures, without previews. Raises as ``collect``."""
        return (await self.collect()).pictures

    async def save(self, path: str | Path) -> AudioChunk | Picture | None:
        """Read the rest of the answer and write its sound, as it arrives, or its first finished picture to a file.

        Args:
            path: The file; its suffix chooses the format. Sound: .wav (16 bits), .flac, .ogg or .mp3. A picture: .png,
                .jpg, .jpeg or .webp.

        Returns:
            The sound or the picture; None if there is none, and then no file is written.

        Raises:
            ValueError: The suffix names no known format: nothing was read. Or the picture is too large for its format.
            RequestError: The error that ended the request. A file of sound has what came before it.
        """
        suffix = Path(path).suffix.lower()
        if suffix in PICTURE_SUFFIXES:
            picture = await self.picture()
            if picture is not None:
                await trio.to_thread.run_sync(picture.save, path)
            return picture
        if suffix not in SOUND_SUFFIXES:
            known = ", ".join((*SOUND_SUFFIXES, *PICTURE_SUFFIXES))
            raise ValueError(f"{path}: {suffix!r} is not a sound format, nor one of pictures; accepted: {known}")
        with SoundWriter(path) as file:
            return (await self._collect(file)).audio

    async def _collect(self, file: SoundWriter | None) -> Answer:
        async with self._collecting:
            if self._answer is None:
                self._answer = await self._read_rest(file)
            elif file is not None and self._answer.audio is not None:
                await file.write(self._answer.audio)
            return self._answer

    async def _read_rest(self, file: SoundWriter | None) -> Answer:
        self.played_at = None
        collected = self._collected
        if file is not None:
            for chunk in collected.sound:
                await file.write(chunk)
        async for output in self:
            collected.add(output)
            if file is not None and isinstance(output.delta, AudioChunk):
                await file.write(output.delta)
        self._collected = _Collected()
        return collected.answer()

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while (output := await self.next_or_none()) is None:
            pass
        return output

    async def next_or_none(self) -> Output | None:
        """Return the next output; None for a piece that was for downstream stages only. Raises as iteration does."""
        try:
            piece = await self.stream.__anext__()
        except (RequestError, StopAsyncIteration):
            self._end_speech()
            raise
        if not (piece.data or piece.tensors or piece.last):
            return None
        request = self.stream.request
        delta = _delta(piece)
        if isinstance(delta, AudioChunk):
            self._audio_s += delta.duration_s
            self._play(delta.duration_s)
        final = request.finished is not None and not request.pieces and request.error is None
        modality = self._pipeline.stages[piece.stage].emits or ""
        if delta is not None:
            self._first.setdefault(_measured_as(delta, modality), piece.arrived - request.arrived)
            answer = (piece.stage, piece.data.get("index"))
            if (before := self._latest.get(answer)) is not None:
                self._on_interval(piece.stage, piece.arrived - before)
            self._latest[answer] = piece.arrived
        if piece.last and modality == "audio":
            self._end_speech()
        metrics = self._metrics(request) if final else None
        if metrics is not None:
            self._on_final(metrics)
        return Output(
            request_id=request.name,
            stage=piece.stage,
            modality=modality,
            delta=delta,
            finished=piece.last,
            data=piece.data,
            tensors=piece.tensors,
            metrics=metrics,
            total=self._total(piece, delta),
        )

    def _play(self, duration_s: float) -> None:
        """Give the simulated player sound, unless its listener does not get it now."""
        if self.played_at is not None and self.stream.request.account.reader != "whole":
            self._playback = self._playback or self._speech.open()
            self._speech.feed(self._playback, duration_s / self.played_at)
            self.stream.request.underruns = self._playback.underruns

    def _end_speech(self) -> None:
        if self._playback is not None:
            self._speech.close(self._playback)

    def _total(self, piece: Piece, delta: Delta | None) -> Delta | None:
        if self._totals is None:
            return None
        return self._totals.setdefault((piece.stage, piece.data.get("index")), Total()).add(delta)

    def _metrics(self, request: Request) -> RequestMetrics:
        began = request.arrived
        return RequestMetrics(
            ttft_s=self._first.get("text"),
            ttfa_s=self._first.get("audio"),
            preview_s=self._first.get("preview"),
            picture_s=self._first.get("picture"),
            total_s=(request.finished or began) - began,
            audio_s=self._audio_s,
            underruns=0 if self._playback is None else self._playback.underruns,
            gap_s=0.0 if self._playback is None else self._playback.silence_s,
            sent_bytes=request.sent_bytes,
            replays=request.replays,
            stages={
                stage: StageTimes(
                    started_s=stats.started - began,
                    first_input_s=None if stats.first_input is None else stats.first_input - began,
                    first_output_s=None if stats.first_output is None else stats.first_output - began,
                    finished_s=stats.finished - began,
                    step_s=stats.step_s,
                    chunks=stats.chunks,
                    sent_bytes=stats.sent_bytes,
                )
                for stage in request.route.stages
                if (stats := request.stats.get(stage))
            },
        )


class _Collected:
    """The outputs that were read of an answer."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self.sound: list[AudioChunk] = []
        self._pictures: list[Picture] = []
        self._data: dict[str, Mapping[str, Any]] = {}
        self._metrics: RequestMetrics | None = None

    def add(self, output: Output) -> None:
        self._data[output.modality], self._metrics = output.data, output.metrics
        if isinstance(output.delta, str):
            self._text.append(output.delta)
        elif isinstance(output.delta, Picture):
            if output.delta.final:
                self._pictures.append(output.delta)
        elif output.delta is not None:
            self.sound.append(output.delta)

    def answer(self) -> Answer:
        return Answer(
            text="".join(self._text),
            audio=_joined(self.sound),
            pictures=tuple(self._pictures),
            data=self._data,
            metrics=self._metrics,
        )


def _delta(piece: Piece) -> Delta | None:
    """Return the content of a piece: the tensor "audio" or "image", or the value "text" of its data."""
    if (audio := piece.tensors.get("audio")) is not None:
        samples = audio.numpy()
        return AudioChunk(samples, piece.data["sample_rate"]) if len(samples) else None
    if (image := piece.tensors.get("image")) is not None:
        step, total = piece.data.get("step", 0), piece.data.get("total", 0)
        return Picture(image.numpy(), step, total, final=piece.data.get("final", True))
    return piece.data.get("text") or None


def _measured_as(delta: Delta, modality: str) -> str:
    """Return what the first output of this kind is measured as."""
    if isinstance(delta, Picture):
        return "picture" if delta.final else "preview"
    return modality


def _joined(chunks: list[AudioChunk]) -> AudioChunk | None:
    if not chunks:
        return None
    return AudioChunk(np.concatenate([chunk.samples for chunk in chunks]), chunks[0].sample_rate)
