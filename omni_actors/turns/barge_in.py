"""Barge-in: whether the user's speech cuts the answer that is being played or computed.

Without ``ignore_backchannels``, the start of speech cuts the answer. With it, the speech is judged first:

| state    | event                                  | decision    | next state |
|----------|----------------------------------------|-------------|------------|
| quiet    | speech starts while an answer is heard |             | undecided  |
| quiet    | ... while one is only computed         | CUT         | turn       |
| quiet    | ... while there is none                |             | turn       |
| undecided| the speech lasts ``LONGEST_MS``        | CUT         | turn       |
| undecided| the speech stops before that           | BACKCHANNEL | quiet      |
| turn     | the speech stops                       | TURN        | quiet      |
| turn     | ... while an answer is in progress     | CUT, TURN   | quiet      |

The words are not looked at: a short "stop" is a backchannel too. Speech before the first sound of an answer is none: it
goes on with what the user has said. The last row is for an answer that has begun while the user spoke, such as one to
the output of a function: it would keep the turn from an answer of its own.
"""

from __future__ import annotations

import enum

from omni_actors.turns.events import SpeechStarted, SpeechStopped

LONGEST_MS = 700
"""Speech of this length is no backchannel, in milliseconds."""


class Decision(enum.Enum):
    """What the session does now."""

    CUT = "cut"
    """Cut the answer that is being played."""
    BACKCHANNEL = "backchannel"
    """The speech was so short that the answer goes on: discard it."""
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
        """Whether speech is in progress that may still be a backchannel."""
        return self._state is _State.UNDECIDED

    def reset(self) -> None:
        """Forget the speech in progress, as ``Detector.reset`` does."""
        self._state = _State.QUIET

    def started(self, event: SpeechStarted, *, playing: bool, heard: bool) -> Decision | None:
        """Return CUT if the speech cuts the answer at once.

        Args:
            event: the start of the speech.
            playing: whether an answer is being played or computed.
            heard: whether the sound of one was being played when the speech began.
        """
        self._speech_ms = event.speech_ms
        judged = heard and self._interrupts and self._ignores_backchannels
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

    def stopped(self, event: SpeechStopped, *, answering: bool = False) -> list[Decision]:
        """Return what the end of the speech means: [TURN], [BACKCHANNEL], or [CUT, TURN].

        Args:
            event: the end of the speech.
            answering: whether an answer is in progress that keeps the turn from one of its own.
        """
        cut = self.advanced(event.speech_ms)
        undecided, self._state = self._state is _State.UNDECIDED, _State.QUIET
        if undecided:
            return [Decision.BACKCHANNEL]
        if answering and self._interrupts:
            cut = Decision.CUT
        return [Decision.TURN] if cut is None else [cut, Decision.TURN]
