"""A simulated player of a spoken stream, which finds the moments at which a listener hears a gap.

Rules
1. The player begins ``BUDGET_S`` after it gets the first sound, and plays in real time.
2. It underruns when it has played everything and more sound arrives later. It then waits ``BUDGET_S`` again, so that a
   stream which is a little too slow does not underrun at every chunk.
3. No clock and no trio here: the caller gives the time of each chunk. The end of a stream is no underrun.

Where the peers measure the continuity of speech, they simulate a player with the same budget. The page's player
(``serve/page/static/js/sound.js``) waits as this one does.
"""

from __future__ import annotations

BUDGET_S = 0.1
"""The sound that the player collects before it plays: what a listener does not notice as a delay."""


class Playback:
    """The player of one stream. All times are seconds of one monotonic clock.

    Args:
        ends: When the player will have played what it has from an earlier stream, behind which it plays this one. None:
            it has nothing.
    """

    def __init__(self, *, ends: float | None = None) -> None:
        self._ends = ends
        """When the player will have played everything that it has; None before the first sound."""
        self.underruns = 0
        """How often the player had nothing to play, and more sound came later."""
        self.silence_s = 0.0
        """The sum of these gaps, from the last sample played until playing goes on."""

    def feed(self, at: float, duration_s: float) -> float:
        """Give the player sound.

        Args:
            at: The time at which the sound leaves for the player. It never decreases.
            duration_s: The duration of the sound.

        Returns:
            The gap that a listener hears before this sound, in seconds; 0.0 if there is none.
        """
        gap_s = 0.0
        if self._ends is None:
            self._ends = at + BUDGET_S
        elif at > self._ends:
            begins = at + BUDGET_S
            gap_s = begins - self._ends
            self.underruns += 1
            self.silence_s += gap_s
            self._ends = begins
        self._ends += duration_s
        return gap_s

    def drop(self, duration_s: float) -> None:
        """Let the player drop sound that it has not played: it plays what follows so much sooner."""
        if self._ends is not None:
            self._ends -= duration_s

    @property
    def ends(self) -> float | None:
        """When the player will have played everything that it has; None before the first sound."""
        return self._ends

    def ahead_s(self, now: float) -> float:
        """Return the sound that the player has and has not played yet, in seconds.

        It is negative while the player waits for more: the seconds since it played its last sample. Before the first
        sound it is 0.0.
        """
        return 0.0 if self._ends is None else self._ends - now

    def is_silent(self, now: float) -> bool:
        """Return whether the player has played everything that it was given."""
        return self._ends is not None and now > self._ends

    def restart(self) -> None:
        """Begin again with the next sound, as after an interruption: what was not played is dropped, without a gap."""
        self._ends = None
