"""Remembers the fingerprints of requests that ended their workers.

Rules
1. The fingerprint of a convicted culprit is refused for ``keep_s``.
2. A culprit that left before it was convicted or cleared is remembered for ``keep_s``, with the deaths that it caused.
3. At most ``MAX_ENTRIES`` fingerprints are kept, the latest ones.
4. This module has no clock: time is an argument, in seconds.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from omni_actors.errors import Quarantined

MAX_ENTRIES = 1024


@dataclass(frozen=True)
class Culprit:
    """A request that ended workers of ``stage``. deaths: how many; None for a convicted one, which is refused."""

    stage: str
    deaths: int | None = None


class Quarantine:
    """The culprits of the last ``keep_s`` seconds, by fingerprint. With a ``keep_s`` of 0 there are none."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._entries: collections.OrderedDict[str, tuple[Culprit, float]] = collections.OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, fingerprint: str, culprit: Culprit, now: float) -> None:
        """Remember a culprit from now on. A fingerprint that was convicted before stays so."""
        known, _ = self._entries.get(fingerprint, (culprit, 0.0))
        if self._keep_s and (known.deaths is not None or culprit.deaths is None):
            self._entries[fingerprint] = culprit, now + self._keep_s
            self._entries.move_to_end(fingerprint)
            if len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)

    def check(self, fingerprint: str, now: float) -> None:
        """Raise Quarantined if requests with this fingerprint are refused."""
        while self._entries and next(iter(self._entries.values()))[1] <= now:
            self._entries.popitem(last=False)
        if (entry := self._entries.get(fingerprint)) is not None and entry[0].deaths is None:
            culprit, until = entry
            raise Quarantined(culprit.stage, until - now)

    def pop(self, fingerprint: str) -> Culprit | None:
        """Remove and return the remembered culprit with this fingerprint, if any. Call ``check`` first."""
        return self._entries.pop(fingerprint, (None, 0.0))[0]
