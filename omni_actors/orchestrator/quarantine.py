"""Which requests are refused because one like them ended its workers.

Rules
1. An entry ends after ``hold_s``; at most ``MAX_ENTRIES`` are kept, the latest ones.
2. No clock here: time is an argument, in seconds.
"""

from __future__ import annotations

import collections

from omni_actors.errors import Quarantined

MAX_ENTRIES = 1024


class Quarantine:
    """Fingerprints that are refused for a time, with the stage whose workers they ended."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._entries: collections.OrderedDict[str, tuple[str, float]] = collections.OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, fingerprint: str, stage: str, now: float) -> None:
        """Refuse requests of this fingerprint from now on."""
        if self._hold_s:
            self._entries[fingerprint] = stage, now + self._hold_s
            self._entries.move_to_end(fingerprint)
            if len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)

    def check(self, fingerprint: str, now: float) -> None:
        """Raise Quarantined where requests of this fingerprint are refused."""
        while self._entries and next(iter(self._entries.values()))[1] <= now:
            self._entries.popitem(last=False)
        if (entry := self._entries.get(fingerprint)) is not None:
            stage, until = entry
            raise Quarantined(stage, until - now)
