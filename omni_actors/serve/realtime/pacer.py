"""When the sound of an answer may leave.

Rules
1. Sound leaves at most ``AHEAD_S`` before the client needs it, so that an interruption has little to discard.
2. What the client does is not known. It counts as the player by which underruns are counted (``playback``).
3. The client plays the answers of a conversation one after the other. So the sound of an answer is played behind the
   sound of earlier ones that the player still has, and both count as ahead.
4. No clock and no trio here: the caller gives the time.
"""

from __future__ import annotations

from omni_actors.playback import Playback

AHEAD_S = 2.0
"""A gap in the computation of this length is not heard."""


class Pacer:
    """Paces the sound of one answer. All times are seconds of one monotonic clock.

    Args:
        ahead_s: see rule 1.
        ends: when the player will have played the answers before (rule 3); None: it has nothing.
    """

    def __init__(self, ahead_s: float = AHEAD_S, *, ends: float | None = None) -> None:
        self._ahead_s, self._player = ahead_s, Playback(ends=ends)
        self.sent_s = 0.0
        """The duration of the sound that has left."""

    @property
    def ends(self) -> float | None:
        """When the player will have played everything that it has; None before the first sound."""
        return self._player.ends

    def wait_s(self, now: float) -> float:
        """Return how long to wait before more sound leaves; 0.0: none."""
        return max(0.0, self._player.ahead_s(now) - self._ahead_s)

    def sent(self, now: float, duration_s: float) -> None:
        """Record that sound leaves."""
        self._player.feed(now, duration_s)
        self.sent_s += duration_s

    def played_s(self, now: float) -> float:
        """Return how much of the sound the player has played."""
        return max(0.0, self.sent_s - self.unplayed_s(now))

    def dropped_s(self, now: float) -> float:
        """Return how much of this answer's own sound the player drops if it drops all that it has not played."""
        return min(self.sent_s, self.unplayed_s(now))

    def play_sooner(self, seconds: float) -> None:
        """Record that the player has dropped so much sound of an answer before this one."""
        self._player.drop(seconds)

    def unplayed_s(self, now: float) -> float:
        """Return how long the player will play until the end of this answer's sound.

        The wait before the first sound and the sound of the answers before count.
        """
        return max(0.0, self._player.ahead_s(now))
