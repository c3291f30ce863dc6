"""The times of one request to a server, as its client sees them."""

from __future__ import annotations

from array import array

from omni_actors.cli.answer_events import SAMPLE_BYTES, SPEECH_RATE, AnswerPart
from omni_actors.playback import Playback


class Measurement:
    """The times of one request. All times are seconds of the monotonic clock.

    Args:
        due: When the request had to be sent.
        sent: When it was sent.
    """

    def __init__(self, due: float, sent: float) -> None:
        self.due, self.sent = due, sent
        self.ended: float | None = None
        self.error: str | None = None
        """The kind of the error that ended the request."""
        self.first_text: float | None = None
        self.first_sound: float | None = None
        self._latest_text = 0.0
        self.intervals = array("d")
        """Between two events with text."""
        self.delays = array("d")
        """From the server's sending of an event until it was read, where the server says when it sent it."""
        self.tokens: int | None = None
        """The answer's tokens, as the server counts them."""
        self.pictures = 0
        self.sound_s = 0.0
        self.playback = Playback()
        self.is_complete = False
        """Whether the server ended the answer, rather than the connection."""

    def add(self, part: AnswerPart, at: float) -> None:
        """Take a part of the answer that arrived at a time."""
        if part.sent_s is not None:
            self.delays.append(at - part.sent_s)
        if part.text or part.thought:  # both are made of the tokens that the server counts
            self.add_text(at)
        if part.sound:
            self.add_sound(len(part.sound), at)
        self.pictures += len(part.pictures)
        if part.usage is not None:
            self.tokens = part.usage.completion_tokens
        if part.finish_reason is not None:
            self.is_complete = True

    def add_text(self, at: float) -> None:
        """Note that text of the answer, or of its thoughts, arrived."""
        if self.first_text is None:
            self.first_text = at
        else:
            self.intervals.append(at - self._latest_text)
        self._latest_text = at

    def add_sound(self, size: int, at: float) -> None:
        """Note that ``size`` bytes of samples arrived, and play them."""
        if self.first_sound is None:
            self.first_sound = at
        duration_s = size / SAMPLE_BYTES / SPEECH_RATE
        self.sound_s += duration_s
        self.playback.feed(at, duration_s)

    def figures(self) -> dict[str, float]:
        """Return the figures of a request that has succeeded, by the names of ``summary.FIGURES``."""
        assert self.ended is not None
        found = {"e2e": self.ended - self.due, "late": self.sent - self.due}
        if self.first_text is not None:
            found["ttft"] = self.first_text - self.due
            if self.tokens is not None and self.tokens > 1:
                found["tpot"] = (self._latest_text - self.first_text) / (self.tokens - 1)
        if self.first_sound is not None:
            found["ttfa"] = self.first_sound - self.due
            found["underruns"] = self.playback.underruns
            found["gap"] = self.playback.silence_s
            found["rtf"] = found["e2e"] / self.sound_s
        return found
