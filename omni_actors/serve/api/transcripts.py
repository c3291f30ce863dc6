"""A transcript in the formats of OpenAI's API, from the outputs of a speech recognizer.

An output with times has ``data["segment"]``: ``start`` and ``end`` in seconds, the decoder's measurements, and
``words`` if their times were asked for (see ``stages.whisper.engine``).
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omni_actors.outputs import Output


class Transcript:
    """Collects the transcript of one recording.

    Args:
        task: "transcribe" or "translate".
        duration_s: the length of the recording in seconds.
        timestamps: what has times in ``verbose``: "segment", "word", both or nothing.
        language: the code of the language of the text; None: the recognizer tells it.
    """

    def __init__(self, task: str, duration_s: float, timestamps: Sequence[str], language: str | None) -> None:
        self._task, self._duration_s, self._timestamps, self._language = task, duration_s, timestamps, language
        self._texts: list[str] = []
        self._segments: list[tuple[str, dict[str, Any]]] = []

    def add(self, output: Output) -> str:
        """Add an output; return the text that it adds."""
        self._language = self._language or output.data.get("language")
        if not isinstance(output.delta, str):
            return ""
        self._texts.append(output.delta)
        if "segment" in output.data:
            self._segments.append((output.delta, output.data["segment"]))
        return output.delta

    @property
    def text(self) -> str:
        """All text so far, without white space around it."""
        return "".join(self._texts).strip()

    @property
    def usage(self) -> dict[str, Any]:
        """What was transcribed, in seconds."""
        return {"type": "duration", "seconds": math.ceil(self._duration_s)}

    def verbose(self) -> dict[str, Any]:
        """Return the object of ``verbose_json``. The language is a code such as "en"; "" if it is unknown."""
        found: dict[str, Any] = {
            "task": self._task,
            "language": self._language or "",
            "duration": self._duration_s,
            "text": self.text,
            "usage": self.usage,
        }
        if "segment" in self._timestamps:
            found["segments"] = [
                {"id": at, "seek": 0, "text": text, **{key: segment[key] for key in segment if key != "words"}}
                for at, (text, segment) in enumerate(self._segments)
            ]
        if "word" in self._timestamps:
            words = [word for _, segment in self._segments for word in segment.get("words", ())]
            found["words"] = [word | {"word": word["word"].strip()} for word in words]
        return found

    def srt(self) -> str:
        """Return the transcript as SubRip subtitles."""
        return "".join(f"{at}\n{times}\n{text}\n\n" for at, (times, text) in enumerate(self._cues(","), 1))

    def vtt(self) -> str:
        """Return the transcript as WebVTT subtitles."""
        cues = (f"{times}\n{html.escape(text, quote=False)}\n\n" for times, text in self._cues("."))
        return "WEBVTT\n\n" + "".join(cues)

    def _cues(self, mark: str) -> Iterator[tuple[str, str]]:
        """Yield the times and the text of each segment. mark: of decimals."""
        for text, segment in self._segments:
            times = f"{_clock(segment['start'], mark)} --> {_clock(segment['end'], mark)}"
            yield times, re.sub("-+>", "->", " ".join(text.split()))


def _clock(seconds: float, mark: str) -> str:
    """Return a time as "01:02:03,456"."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"
