"""What comes out of a system: typed pieces of an answer, and what the answer took."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
import trio

from omni_actors.config import Pipeline
from omni_actors.orchestrator.pieces import Piece
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.stream import OutputStream
from ringbuf import Tensor


class AudioChunk(msgspec.Struct, frozen=True):
    """Sound: samples float32 (n,) in [-1, 1], mono; sample_rate in Hz."""

    samples: np.ndarray[Any, np.dtype[np.float32]]
    sample_rate: int

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate


class StageTimes(msgspec.Struct, frozen=True):
    """One stage's part in one request; seconds since the request was submitted."""

    started_s: float
    first_input_s: float | None
    first_output_s: float | None
    finished_s: float
    step_s: float
    """Time in the engine's steps while the request was active (shared with the requests in its batch)."""
    chunks: int
    sent_bytes: dict[str, int]
    """Bytes this stage put into each ring, by consumer."""


class RequestMetrics(msgspec.Struct, frozen=True):
    """What a request took, in seconds from its submission."""

    ttft_s: float | None
    """To the first piece of modality ``text``."""
    ttfa_s: float | None
    """To the first piece of modality ``audio``."""
    total_s: float
    audio_s: float
    """Duration of the audio that it gave."""
    stages: dict[str, StageTimes]
    sent_bytes: dict[str, int] = {}
    """Bytes of the request's input, by the ring's consumer."""
    replays: int = 0
    """How often it was replayed after the death of a worker; the stages' figures are of the last time. One that died
    and was wanted no more may have none."""

    @property
    def rtf(self) -> float | None:
        """Total time / audio duration."""
        return self.total_s / self.audio_s if self.audio_s else None


class Output(msgspec.Struct, frozen=True):
    """A piece of an answer.

    delta: new text (str), new sound (AudioChunk), or None where this piece only closes its stage's output.
    finished: this stage's output is complete. metrics: on the request's final output only.
    """

    request_id: str
    stage: str
    modality: str
    delta: str | AudioChunk | None
    finished: bool
    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    metrics: RequestMetrics | None = None


class Generation:
    """The answer to one request: ``async for output in omni.generate(...)``.

    Iteration raises the RequestError that ended the request. Leaving the loop early, or cancelling it, drops this
    object and with it the request; ``abort()`` does so at once.
    """

    def __init__(self, stream: OutputStream, pipeline: Pipeline, on_final: Callable[[RequestMetrics], None]) -> None:
        self._stream, self._pipeline, self._on_final = stream, pipeline, on_final
        self._audio_s = 0.0
        self._first: dict[str, float] = {}

    @property
    def request_id(self) -> str:
        return self._stream.request.name

    def abort(self) -> None:
        """End the request now, in every stage, and drop what is not read; iteration then raises ``Aborted``.

        Harmless for an answer that was read to its end.
        """
        self._stream.abort()

    def hold(self, *, whole: bool) -> None:
        """Before reading, by a reader that passes the answer on: ``OutputStream.hold``."""
        self._stream.hold(whole=whole)

    @property
    def held_bytes(self) -> int:
        """Bytes of output that a reader that passes the answer on holds."""
        return self._stream.held_bytes

    def delivered(self, size: int) -> None:
        """The connection has taken ``size`` bytes of that output."""
        self._stream.delivered(size)

    def delivering(self) -> AbstractContextManager[trio.CancelScope]:
        """Around each wait for the connection to which the answer is passed on: ``OutputStream.delivering``."""
        return self._stream.delivering()

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        piece = await self._stream.__anext__()
        while not (piece.data or piece.tensors or piece.last):  # all of it was for the stages below
            piece = await self._stream.__anext__()
        request = self._stream.request
        delta = _delta(piece)
        if isinstance(delta, AudioChunk):
            self._audio_s += delta.duration_s
        final = request.finished is not None and not request.pieces and request.error is None
        modality = self._pipeline.stages[piece.stage].emits or ""
        if delta is not None:
            self._first.setdefault(modality, piece.arrived - request.submitted)
        metrics = self._metrics(request) if final else None
        if metrics is not None:
            self._on_final(metrics)
        return Output(request.name, piece.stage, modality, delta, piece.last, piece.data, piece.tensors, metrics)

    def _metrics(self, request: Request) -> RequestMetrics:
        began = request.submitted
        return RequestMetrics(
            ttft_s=self._first.get("text"),
            ttfa_s=self._first.get("audio"),
            total_s=(request.finished or began) - began,
            audio_s=self._audio_s,
            sent_bytes=request.sent_bytes,
            replays=request.replays,
            stages={
                stage: StageTimes(
                    stats.started - began,
                    None if stats.first_input is None else stats.first_input - began,
                    None if stats.first_output is None else stats.first_output - began,
                    stats.finished - began,
                    stats.step_s,
                    stats.chunks,
                    stats.sent_bytes,
                )
                for stage in request.route.stages
                if (stats := request.stats.get(stage))
            },
        )


def _delta(piece: Piece) -> str | AudioChunk | None:
    """By the field's names for content: ``text`` in the data, ``audio`` among the tensors."""
    if (audio := piece.tensors.get("audio")) is not None:
        samples = audio.numpy()
        return AudioChunk(samples, piece.data["sample_rate"]) if len(samples) else None
    return piece.data.get("text") or None
