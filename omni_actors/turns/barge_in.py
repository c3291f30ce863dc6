"""Barge-in: whether the user's speech cuts the answer that is being played.

Without ``ignore_backchannels``, the start of speech cuts the answer. With it, the speech is judged first:

| state    | event                                  | decision    | next state |
|----------|----------------------------------------|-------------|------------|
| quiet    | speech starts while an answer plays    |             | undecided  |
| quiet    | speech starts and nothing plays        |             | turn       |
| undecided| the speech lasts ``LONGEST_MS``        | CUT         | turn       |
| undecided| the speech stops before that           | BACKCHANNEL | quiet      |
| turn     | the speech stops                       | TURN        | quiet      |

After BACKCHANNEL, a caller with a transcriber may ask ``is_backchannel`` about the words: a short "stop" is a turn, and
cuts the answer late. A caller without one discards the sound.
"""

from __future__ import annotations

import enum
import re

from omni_actors.turns.events import SpeechStarted, SpeechStopped

LONGEST_MS = 700
"""Speech of this length is no backchannel, in milliseconds."""
_BACKCHANNELS = frozenset(
    {
        *("ah", "aha", "all right", "alright", "cool", "exactly", "good", "got it", "great", "hm", "hmm", "huh"),
        *("i see", "indeed", "interesting", "mhm", "mm", "mm hm", "mm hmm", "mmhm", "nice", "of course", "oh", "ok"),
        *("okay", "really", "right", "sure", "true", "uh", "uh huh", "uhhuh", "um", "wow", "ya", "yeah", "yep", "yes"),
        "yup",
    }
)
"""What listeners say, in at most two words each. Transcribers spell some of them in several ways."""
_LONGEST_TRANSCRIPT = 80
_WORD = re.compile(r"[a-z]+")


class Decision(enum.Enum):
    """What the session does now."""

    CUT = "cut"
    """Cut the answer that is being played."""
    BACKCHANNEL = "backchannel"
    """The speech was so short that the answer goes on: discard it, or judge its words with ``is_backchannel``."""
    TURN = "turn"
    """The user's turn is complete: commit its sound."""


class _State(enum.Enum):
    QUIET = enum.auto()
    UNDECIDED = enum.auto()
    TURN = enum.auto()


class BargeIn:
    """Decides for one conversation. Give it every event of the detector in order, and how far the speech goes.

    Args:
        interrupts: Whether speech may cut an answer at all (``interrupt_response``).
        ignores_backchannels: Whether short speech does not (``ignore_backchannels``).
    """

    def __init__(self, *, interrupts: bool = True, ignores_backchannels: bool = False) -> None:
        self._interrupts, self._ignores_backchannels = interrupts, ignores_backchannels
        self._state = _State.QUIET
        self._speech_ms = 0

    @property
    def is_undecided(self) -> bool:
        """Whether there is speech of which is not known yet whether it cuts the answer."""
        return self._state is _State.UNDECIDED

    def reset(self) -> None:
        """Forget the speech in progress, as ``Detector.reset`` does."""
        self._state = _State.QUIET

    def started(self, event: SpeechStarted, *, playing: bool) -> Decision | None:
        """Return CUT if the speech cuts the answer at once. playing: whether an answer is being played or computed."""
        self._speech_ms = event.speech_ms
        judged = playing and self._interrupts and self._ignores_backchannels
        self._state = _State.UNDECIDED if judged else _State.TURN
        return Decision.CUT if playing and self._interrupts and not judged else None

    def advanced(self, spoken_until_ms: int) -> Decision | None:
        """Return CUT if the speech has gone on for too long to be a backchannel. Call it after every ``feed``.

        spoken_until_ms: ``Detector.spoken_until_ms``, so that the silence after the speech does not count.
        """
        if self._state is not _State.UNDECIDED or spoken_until_ms - self._speech_ms < LONGEST_MS:
            return None
        self._state = _State.TURN
        return Decision.CUT

    def stopped(self, event: SpeechStopped) -> list[Decision]:
        """Return what the end of the speech means: [TURN], [BACKCHANNEL], or [CUT, TURN]."""
        cut = self.advanced(event.speech_ms)
        undecided, self._state = self._state is _State.UNDECIDED, _State.QUIET
        if undecided:
            return [Decision.BACKCHANNEL]
        return [Decision.TURN] if cut is None else [cut, Decision.TURN]


def is_backchannel(transcript: str) -> bool:
    """Return whether a transcript only shows that its speaker listens. No words at all count as such.

    >>> is_backchannel("Mm-hm. Yeah, okay!"), is_backchannel("Yes, but why?")
    (True, False)
    """
    if len(transcript) > _LONGEST_TRANSCRIPT:
        return False
    words = _WORD.findall(transcript.lower())
    while words:
        longest = next((n for n in (2, 1) if " ".join(words[:n]) in _BACKCHANNELS), 0)
        if not longest:
            return False
        del words[:longest]
    return not any(character.isalnum() for character in _WORD.sub("", transcript.lower()))
