"""The answer to a request: its pieces, its measurements, and ways to collect it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import trio

from omni_actors.config import Pipeline
from omni_actors.errors import RequestError
from omni_actors.orchestrator.pieces import Piece
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.stream import OutputStream
from ringbuf import Tensor

SOUND_SUFFIXES = (".flac", ".mp3", ".ogg", ".wav")
"""File formats of ``Generation.save``."""


class AudioChunk(msgspec.Struct, frozen=True):
    """A piece of mono sound.

    Attributes:
        samples: float32 (n,), in [-1, 1].
        sample_rate: Samples per second.
    """

    samples: np.ndarray[Any, np.dtype[np.float32]]
    sample_rate: int

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / self.sample_rate


class StageTimes(msgspec.Struct, frozen=True):
    """One stage's part in a request. Times are seconds since the request arrived.

    Attributes:
        started_s: The engine started the request.
        first_input_s: The stage received its first chunk; None if it received none.
        first_output_s: The stage sent its first chunk; None if it sent none.
        finished_s: The stage sent its last chunk.
        step_s: Duration of the engine's steps during the request. Requests of one batch share their steps.
        chunks: Number of chunks that the stage sent.
        sent_bytes: Bytes that the stage sent, by consumer ("talker.0", "client.0").
    """

    started_s: float
    first_input_s: float | None
    first_output_s: float | None
    finished_s: float
    step_s: float
    chunks: int
    sent_bytes: dict[str, int]


class RequestMetrics(msgspec.Struct, frozen=True):
    """Measurements of a request. Times are seconds since it arrived: was submitted, or its ``arrival_time``.

    Attributes:
        ttft_s: Time to the first output of modality "text"; None if there was none.
        ttfa_s: Time to the first output of modality "audio"; None if there was none.
        total_s: Time until every stage had finished.
        audio_s: Duration of the answer's sound.
        stages: The part of each stage. After a replay, the figures are those of the last run; a stage whose work was
            not needed any more may be missing.
        sent_bytes: Bytes of the request's input, by consumer.
        replays: How often the request was replayed after the death of a worker.
    """

    ttft_s: float | None
    ttfa_s: float | None
    total_s: float
    audio_s: float
    stages: dict[str, StageTimes]
    sent_bytes: dict[str, int] = {}
    replays: int = 0

    @property
    def rtf(self) -> float | None:
        """Real-time factor: ``total_s`` / ``audio_s``; None for an answer without sound."""
        return self.total_s / self.audio_s if self.audio_s else None


class Output(msgspec.Struct, frozen=True):
    """One output of a stage for the client.

    Attributes:
        request_id: The request's identifier.
        stage: The stage that produced the output.
        modality: The modality that the stage emits.
        delta: New text (str) or new sound (``AudioChunk``); None if there is neither, as in an output that only ends
            its stage's part.
        finished: Whether this is the stage's last output.
        data: Small data that the engine attached, such as "completion_tokens".
        tensors: Tensors that the engine attached. They own their memory.
        metrics: Measurements of the request, on its last output; None before.
        total: With ``output_kind="cumulative"``: all text (str) or all sound (``AudioChunk``) of the stage so far, this
            delta included. Outputs with an "index" in their data, such as the number of a recording, are counted by
            index. None if there was neither, and with ``output_kind="delta"``.
        index: Position of its prompt in a list of prompts; 0 otherwise.
    """

    request_id: str
    stage: str
    modality: str
    delta: str | AudioChunk | None
    finished: bool
    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    metrics: RequestMetrics | None = None
    total: str | AudioChunk | None = None
    index: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A collected answer.

    Attributes:
        index: Position of its prompt in a list of prompts, or in those of ``OmniSystem.map``; 0 otherwise.
        text: All text of the answer, joined. Iterate the generation to tell several text modalities apart.
        audio: All sound of the answer, joined; None if there was none.
        data: The data of the last output of each modality, such as ``{"text": {"completion_tokens": 12}}``.
        metrics: Measurements of the request; None if it failed.
        error: The error that ended the request. Only ``OmniSystem.map(..., keep_errors=True)`` returns such answers;
            ``text`` and ``audio`` are empty then. ``Generations.collect`` has the same argument.
    """

    index: int = 0
    text: str = ""
    audio: AudioChunk | None = None
    data: Mapping[str, Mapping[str, Any]] = {}
    metrics: RequestMetrics | None = None
    error: RequestError | None = None


class SoundWriter:
    """Writes sound to a file chunk by chunk, as 16-bit samples or compressed. The first chunk creates the file.

    Args:
        path: The file. Its suffix chooses the format, see ``SOUND_SUFFIXES``.

    Raises:
        ValueError: The suffix names no known format.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: Any = None
        if self._path.suffix.lower() not in SOUND_SUFFIXES:
            known = ", ".join(SOUND_SUFFIXES)
            raise ValueError(f"{self._path}: {self._path.suffix!r} is not a sound format; accepted: {known}")

    def __enter__(self) -> SoundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    async def write(self, chunk: AudioChunk) -> None:
        """Append ``chunk``. A WAV file is valid after each chunk. Not cancellable while a thread writes.

        Raises OSError or soundfile.LibsndfileError if the file cannot be written.
        """
        await trio.to_thread.run_sync(self._write, chunk)

    def _write(self, chunk: AudioChunk) -> None:
        import soundfile  # takes 50 ms; most systems write no file

        if self._file is None:
            self._file = soundfile.SoundFile(self._path, "w", chunk.sample_rate, channels=1)
        self._file.write(chunk.samples)
        self._file.flush()


class Total:
    """The text or the sound of one stage so far."""

    def __init__(self) -> None:
        self._text, self._samples, self._rate = "", np.empty(0, np.float32), 0
        self._size = 0

    def add(self, delta: str | AudioChunk | None) -> str | AudioChunk | None:
        """Add what is new; return all of it. Sound is a view of a buffer that later sound does not change."""
        if isinstance(delta, str):
            self._text += delta
        elif delta is not None:
            begin, self._rate = self._size, delta.sample_rate
            self._size += len(delta.samples)
            if self._size > len(self._samples):
                samples = np.empty(2 * self._size, np.float32)
                samples[:begin] = self._samples[:begin]
                self._samples = samples
            self._samples[begin : self._size] = delta.samples
        if self._size:
            return AudioChunk(self._samples[: self._size], self._rate)
        return self._text or None


class Generation:
    """The answer to one request, as an asynchronous iterator of ``Output``.

    Iteration raises the ``RequestError`` that ended the request. Cancelling a read loses nothing: the output stays
    queued. Dropping the object, for instance by leaving the loop early, aborts the request; ``abort`` does so at once.

    ``collect``, ``text``, ``audio`` and ``save`` read the rest of the answer. They may follow each other:

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
        cumulative: bool = False,
    ) -> None:
        self.stream, self._pipeline, self._on_final = stream, pipeline, on_final
        """stream: for a reader that relays output to a connection (see ``OutputStream.relay``)."""
        self._totals: dict[tuple[str, Any], Total] | None = {} if cumulative else None
        self._audio_s = 0.0
        self._first: dict[str, float] = {}
        self._answer: Answer | None = None

    @property
    def request_id(self) -> str:
        """The request's identifier, as ``OmniSystem.abort`` takes it."""
        return self.stream.request.name

    def abort(self) -> None:
        """End the request now, in every stage, and drop unread output; iteration then raises ``Aborted``.

        It has no effect on an answer that was read to its end.
        """
        self.stream.abort()

    async def collect(self) -> Answer:
        """Read the rest of the answer and return it. Later calls return the same answer.

        Cancellation loses the outputs that were already read. Raises the ``RequestError`` that ended the request.
        """
        return await self._collect(None)

    async def text(self) -> str:
        """Read the rest of the answer and return its text; "" if there is none. Raises as ``collect`` does."""
        return (await self.collect()).text

    async def audio(self) -> AudioChunk | None:
        """Read the rest of the answer and return its sound; None if there is none. Raises as ``collect`` does."""
        return (await self.collect()).audio

    async def save(self, path: str | Path) -> AudioChunk | None:
        """Read the rest of the answer and write its sound to a file as it arrives.

        Args:
            path: The file; its suffix chooses the format: .wav (16 bits), .flac, .ogg or .mp3.

        Returns:
            The sound; None if there is none, and then no file is written.

        Raises:
            ValueError: The suffix names no known format. Nothing was read.
            RequestError: The error that ended the request. The file has the sound that came before it.
        """
        with SoundWriter(path) as file:
            if self._answer is not None and self._answer.audio is not None:
                await file.write(self._answer.audio)
            return (await self._collect(file)).audio

    async def _collect(self, file: SoundWriter | None) -> Answer:
        if self._answer is not None:
            return self._answer
        text: list[str] = []
        sound: list[AudioChunk] = []
        data: dict[str, Mapping[str, Any]] = {}
        metrics = None
        async for output in self:
            data[output.modality], metrics = output.data, output.metrics
            if isinstance(output.delta, str):
                text.append(output.delta)
            elif output.delta is not None:
                sound.append(output.delta)
                if file is not None:
                    await file.write(output.delta)
        self._answer = Answer(text="".join(text), audio=_joined(sound), data=data, metrics=metrics)
        return self._answer

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while (output := await self.next_or_none()) is None:
            pass
        return output

    async def next_or_none(self) -> Output | None:
        """Return the next output; None for a piece that was for downstream stages only. Raises as iteration does."""
        piece = await self.stream.__anext__()
        if not (piece.data or piece.tensors or piece.last):
            return None
        request = self.stream.request
        delta = _delta(piece)
        if isinstance(delta, AudioChunk):
            self._audio_s += delta.duration_s
        final = request.finished is not None and not request.pieces and request.error is None
        modality = self._pipeline.stages[piece.stage].emits or ""
        if delta is not None:
            self._first.setdefault(modality, piece.arrived - request.arrived)
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

    def _total(self, piece: Piece, delta: str | AudioChunk | None) -> str | AudioChunk | None:
        if self._totals is None:
            return None
        return self._totals.setdefault((piece.stage, piece.data.get("index")), Total()).add(delta)

    def _metrics(self, request: Request) -> RequestMetrics:
        began = request.arrived
        return RequestMetrics(
            ttft_s=self._first.get("text"),
            ttfa_s=self._first.get("audio"),
            total_s=(request.finished or began) - began,
            audio_s=self._audio_s,
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


def _delta(piece: Piece) -> str | AudioChunk | None:
    """Return the content of a piece: the tensor "audio", or the value "text" of its data."""
    if (audio := piece.tensors.get("audio")) is not None:
        samples = audio.numpy()
        return AudioChunk(samples, piece.data["sample_rate"]) if len(samples) else None
    return piece.data.get("text") or None


def _joined(chunks: list[AudioChunk]) -> AudioChunk | None:
    if not chunks:
        return None
    return AudioChunk(np.concatenate([chunk.samples for chunk in chunks]), chunks[0].sample_rate)
