"""The transcription of one recording, window by window, while the rest of it arrives.

faster-whisper decodes a long recording in windows of 30 s; where a window begins depends on the timestamps that were
decoded in the one before. It needs all features at once. This module gives it the features of one window at a time.

Rules
1. A window is decoded when all of its sound has arrived, or the recording is complete.
2. The outputs depend on the pieces of the recording and not on when they arrive. So a recording begins when it is
   complete or its second piece is there.
3. A recording of one piece gives the text that faster-whisper gives for it. With several pieces, the floor of the
   features, 80 dB below the loudest sound, is that of the sound up to the window's end: louder sound may follow.
4. A transcription can begin at the ``place`` that an earlier one had behind any window. The windows are the same then.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from faster_whisper import WhisperModel
from faster_whisper.feature_extractor import FeatureExtractor
from faster_whisper.transcribe import Segment, Word

from omni_actors.stages.multimodal.audio import Floats, Recording
from omni_actors.stages.whisper.journal import Place

SAMPLE_RATE = 16000
_Features: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
"""(mel bands, frames); 100 frames a second."""

_HOP = 160
"""Samples for each frame."""
_WINDOW = 3000
"""Frames of a window."""
_BEFORE, _AFTER = 2, 3
"""Frames before and after a window that its own frames overlap."""
_FLOOR = 2.0
"""80 dB in the unit of the features."""


class _Extractor(FeatureExtractor):  # type: ignore[misc]
    """A feature extractor that returns features as they are."""

    def __call__(self, waveform: Floats, padding: int = _HOP, chunk_length: int | None = None) -> _Features:
        features: _Features = waveform if waveform.ndim == 2 else super().__call__(waveform, padding, chunk_length)
        return features


class Recognizer(WhisperModel):  # type: ignore[misc]
    """A Whisper model that decodes single windows."""

    _split = WhisperModel._split_segments_by_timestamps

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.feature_extractor = _Extractor(**self.feat_kwargs)
        self._advance = 0

    def decode(self, features: _Features, **options: Any) -> tuple[list[Segment], int, str]:
        """Decode one window.

        features: of n + 1 frames, of which the first n are decoded. options: of ``transcribe``.
        Returns the segments; how many frames later the next window begins; and the language.
        """
        segments, info = self.transcribe(features, **options)
        self._advance = features.shape[1] - 1
        found = list(segments)
        return found, self._advance, info.language

    def _split_segments_by_timestamps(self, *args: Any, **kwargs: Any) -> Any:
        """Called by faster-whisper once for each window. It decodes no other one behind it.

        The last value is True, so that times of words do not decide where the next window begins: the text is the same
        with and without them.
        """
        segments, seek, _ = self._split(*args, **kwargs)
        end = self._advance
        self._advance = seek or end  # a window without progress would be decoded again and again
        return segments, end, True


class Transcription:
    """The transcription of one recording.

    options: of ``WhisperModel.transcribe``, with the language. place: where it begins; None: with the first window.
    """

    def __init__(self, model: Recognizer, index: int, options: dict[str, Any], place: Place | None = None) -> None:
        self.index = index
        self.at_start = place is None
        """Whether it has given no text yet."""
        if place is None:
            place = Place(index, 0, -np.inf, options["language"])
        else:
            options = {**options, "language": place.language, "initial_prompt": None}
        self._model, self._options = model, options
        self._first: Floats | None = None
        """The first piece, until the second one has arrived."""
        self._has_several = False
        """Whether the second one has arrived."""
        self._resampler: Any = None
        self._pieces: list[Floats] = []
        """Sound at ``SAMPLE_RATE`` from sample ``_begin`` on."""
        self._begin = self._end = 0
        self._whole: _Features | None = None
        """The features of the whole recording, if it had one piece."""
        self._complete = False
        self._seek, self._loudest = place.seek, place.loudest
        self._window_s = 0.0
        """Where the newest window begins."""

    def take(self, recording: Recording) -> None:
        """Take the pieces of a recording that have arrived since the last call."""
        for piece in recording.take_pieces():
            if self._has_several:
                self._append(piece, recording.sample_rate)
            elif self._first is None:
                self._first = piece
            else:
                self._has_several = True
                self._append(self._first, recording.sample_rate)
                self._append(piece, recording.sample_rate)
                self._first = None

    def complete(self, recording: Recording) -> None:
        """Take what is left of a recording, which is complete now."""
        self.take(recording)
        self._complete = True
        if not self._has_several:
            assert self._first is not None, "a recording has sound"
            whole = Recording(self.index, recording.sample_rate, [self._first]).resampled(SAMPLE_RATE)
            self._end = len(whole)
            self._whole = self._model.feature_extractor(whole)
        elif self._resampler is not None:
            self._add(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))

    @property
    def ready(self) -> bool:
        """Whether ``next_window`` has something to do."""
        return self._complete or self._end >= (self._seek + _WINDOW + _AFTER) * _HOP

    @property
    def place(self) -> Place:
        """Where the transcription goes on behind the newest window."""
        return Place(self.index, self._seek, self._loudest, self.language)

    @property
    def language(self) -> str | None:
        """The code of the language that was given or detected; None before the first window."""
        language: str | None = self._options["language"]
        return language

    def next_window(self) -> list[Segment] | None:
        """Decode the next window, and return its segments. None: the whole recording was transcribed.

        Their times count from the beginning of the window; see ``times``.
        """
        frames = min(_WINDOW, self._end // _HOP - self._seek)
        if frames <= 0:
            return None
        segments, advance, language = self._model.decode(self._features(frames), **self._options)
        self._options |= {"language": language, "initial_prompt": None}
        self._window_s = self._seek * _HOP / SAMPLE_RATE
        self._seek += advance
        self._forget_sound()
        return segments

    def times(self, found: Segment | Word) -> dict[str, float]:
        """Return the start and the end of a segment of the newest window, or of a word in it, in seconds.

        They count from the beginning of the recording, and do not exceed its length.
        """
        end = self._end / SAMPLE_RATE
        return {name: min(self._window_s + float(getattr(found, name)), end) for name in ("start", "end")}

    def _features(self, frames: int) -> _Features:
        """Return the features of the next window: ``frames`` frames, and the one behind them."""
        end = self._seek + frames + 1
        if self._whole is not None:
            return self._whole[:, self._seek : end]
        first = max(0, self._seek - _BEFORE)
        until = (self._seek + _WINDOW + _AFTER) * _HOP - self._begin
        behind = next((n for n, end in enumerate(accumulate(map(len, self._pieces)), 1) if end >= until), None)
        sound = np.concatenate(self._pieces[:behind])  # a recording may be hours ahead of its windows
        found: _Features = self._model.feature_extractor(sound[first * _HOP - self._begin : until])
        found = found[:, self._seek - first : end - first]
        self._loudest = max(self._loudest, float(found.max()))
        return np.maximum(found, np.float32(self._loudest - _FLOOR))

    def _append(self, piece: Floats, sample_rate: int) -> None:
        if sample_rate == SAMPLE_RATE:
            self._add(piece)
            return
        if self._resampler is None:
            import soxr

            self._resampler = soxr.ResampleStream(sample_rate, SAMPLE_RATE, 1, dtype="float32")
        self._add(self._resampler.resample_chunk(piece))

    def _add(self, sound: Floats) -> None:
        if len(sound):
            self._pieces.append(sound)
            self._end += len(sound)
            self._forget_sound()  # a transcription that begins at a place has no use for the sound before it

    def _forget_sound(self) -> None:
        """Drop the sound before the next window."""
        kept = max(0, self._seek - _BEFORE) * _HOP
        while self._pieces and self._begin + len(self._pieces[0]) <= kept:
            self._begin += len(self._pieces.pop(0))
