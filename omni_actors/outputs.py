"""What a request gives back: text, sound and pictures, one by one and collected, and its measurements."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np

from omni_actors.errors import RequestError
from ringbuf import Tensor

PictureFormat: TypeAlias = Literal["png", "jpeg", "webp"]
"""File formats of ``Picture.encode``."""
PICTURE_SUFFIXES: Mapping[str, PictureFormat] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""File formats of ``Picture.save``, by the suffix of the file."""
LONGEST_SIDES: Mapping[PictureFormat, int] = {"jpeg": 65_500, "webp": 16_383}
"""The most pixels of a side that a file of a format can have. No picture is too large for a PNG."""
QUALITY = 90
"""The quality of JPEG and WebP without another one, from 1 to 100."""


class AudioChunk(msgspec.Struct, frozen=True, eq=False):
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


class Picture(msgspec.Struct, frozen=True, eq=False):
    """A picture, or a preview of one that is not finished.

    Attributes:
        pixels: uint8 (height, width, 3), RGB.
        step: The denoising steps that were done when it was made.
        total: The denoising steps of the finished picture.
        final: Whether the picture is finished. A preview is not.
    """

    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    step: int = 0
    total: int = 0
    final: bool = True

    @property
    def width(self) -> int:
        """Width in pixels."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """Height in pixels."""
        return int(self.pixels.shape[0])

    def encode(self, format: PictureFormat = "png", *, quality: int = QUALITY) -> bytes:
        """Return the picture as a file's bytes. It takes up to seconds: call it in a thread.

        Args:
            format: "png" keeps every pixel; "jpeg" and "webp" lose some.
            quality: From 1 to 100; PNG ignores it.

        Raises:
            ValueError: The format is unknown, or cannot have so large a picture, see ``too_large``.
            ImportError: Pillow is not installed; the extra "image" has it.
        """
        if format not in get_args(PictureFormat):
            raise ValueError(f"format: found {format!r}; accepted: {', '.join(get_args(PictureFormat))}")
        if (reason := too_large(format, self.width, self.height)) is not None:
            raise ValueError(reason)
        from PIL import Image  # only some installations have it

        file = io.BytesIO()
        options: dict[str, Any] = {} if format == "png" else {"quality": quality}
        Image.fromarray(self.pixels).save(file, format, **options)
        return file.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the picture to a file. The suffix chooses the format, see ``PICTURE_SUFFIXES``.

        Raises ValueError: the suffix names no known format; OSError; and ValueError and ImportError as ``encode`` does.
        """
        Path(path).write_bytes(self.encode(picture_format(path)))

    def _repr_png_(self) -> bytes:
        """Show the picture in a notebook."""
        return self.encode("png")


def too_large(format: PictureFormat, width: int, height: int) -> str | None:
    """Return why a file of a format cannot have a picture of this size, in words; None if it can."""
    longest = LONGEST_SIDES.get(format)
    if longest is None or max(width, height) <= longest:
        return None
    return f"{format} has at most {longest} pixels a side, and the picture {width} × {height}; png takes any size"


def picture_format(path: str | Path) -> PictureFormat:
    """Return the format that the suffix of a file names. Raises ValueError if it names none."""
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURE_SUFFIXES:
        raise ValueError(f"{path}: {suffix!r} is not a picture format; accepted: {', '.join(PICTURE_SUFFIXES)}")
    return PICTURE_SUFFIXES[suffix]


Delta: TypeAlias = str | AudioChunk | Picture
"""The content of an output: text, sound or a picture."""


class StageTimes(msgspec.Struct, frozen=True):
    """One stage's part in a request. Times are seconds since the request arrived.

    Attributes:
        started_s: The engine started the request.
        first_input_s: The stage received its first chunk; None if it received none.
        first_output_s: The stage made its first chunk; None if it made none.
        finished_s: The stage made its last chunk.
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
        preview_s: Time to the first preview of a picture; None if there was none.
        picture_s: Time to the first finished picture; None if there was none.
        total_s: Time until every stage had finished.
        audio_s: Duration of the answer's sound.
        stages: The part of each stage. After a replay, the figures are those of the last run; a stage whose work was
            not needed any more may be missing.
        sent_bytes: Bytes of the request's input, by consumer.
        replays: How often the request was replayed after the death of a worker.
        underruns: How many gaps a listener of the sound heard, as its reader took it (see ``playback``). 0 if the
            reader collected the sound, or sent it later as a realtime session does.
        gap_s: Their duration in all.
    """

    ttft_s: float | None
    ttfa_s: float | None
    total_s: float
    audio_s: float
    stages: dict[str, StageTimes]
    sent_bytes: dict[str, int] = {}
    replays: int = 0
    preview_s: float | None = None
    picture_s: float | None = None
    underruns: int = 0
    gap_s: float = 0.0

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
        delta: New text (str), new sound (``AudioChunk``), or a picture or preview (``Picture``); None if there is none
            of them, as in an output that only tells progress or ends its stage's part.
        finished: Whether this is the stage's last output.
        data: Small data that the engine attached, such as "completion_tokens". With "step" and "total", the request
            has done so many of its denoising steps.
        tensors: Tensors that the engine attached. They own their memory.
        metrics: Measurements of the request, on its last output; None before.
        total: With ``output_kind="cumulative"``: all text (str) or all sound (``AudioChunk``) of the stage so far, this
            delta included, or the newest picture. Outputs with an "index" in their data, such as the number of a
            recording, are counted by index. None if there was nothing, and with ``output_kind="delta"``.
        index: Position of its prompt in a list of prompts; 0 otherwise. ``data["index"]`` is another number: that of a
            recording of the prompt, or of one of the choices (``n``) that an engine makes in one request.
    """

    request_id: str
    stage: str
    modality: str
    delta: Delta | None
    finished: bool
    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    metrics: RequestMetrics | None = None
    total: Delta | None = None
    index: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A collected answer.

    Attributes:
        index: Position of its prompt in a list of prompts, or in those of ``OmniSystem.map``; 0 otherwise.
        text: All text of the answer, joined. Iterate the generation to tell several text modalities apart.
        audio: All sound of the answer, joined; None if there was none.
        pictures: The finished pictures in the order of their arrival, without previews.
        data: The data of the last output of each modality, such as ``{"text": {"completion_tokens": 12}}``.
        metrics: Measurements of the request; None if it failed.
        error: The error that ended the request. Only ``OmniSystem.map(..., keep_errors=True)`` returns such answers;
            ``text``, ``audio`` and ``pictures`` are empty then. ``Generations.collect`` has the same argument.
    """

    index: int = 0
    text: str = ""
    audio: AudioChunk | None = None
    pictures: tuple[Picture, ...] = ()
    data: Mapping[str, Mapping[str, Any]] = {}
    metrics: RequestMetrics | None = None
    error: RequestError | None = None

    @property
    def picture(self) -> Picture | None:
        """The first finished picture; None if there is none."""
        return self.pictures[0] if self.pictures else None


class Total:
    """The text, the sound or the newest picture of one stage so far."""

    def __init__(self) -> None:
        self._text, self._samples, self._rate = "", np.empty(0, np.float32), 0
        self._size = 0
        self._picture: Picture | None = None

    def add(self, delta: Delta | None) -> Delta | None:
        """Add what is new; return all of it. Sound is a view of a buffer that later sound does not change."""
        if isinstance(delta, str):
            self._text += delta
        elif isinstance(delta, Picture):
            self._picture = delta
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
        return self._picture or self._text or None
