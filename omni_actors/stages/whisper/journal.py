"""What a window of a transcription decides, as numbers of a journal (``stages.base``, rule 6).

A decoder of 30 s of sound writes a text at once, and a later incarnation may write another one. So the first output of
a window brings all outputs of the window, with their measurements. Each entry is bounded by the longest text that the
model writes for a window (448 tokens).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from omni_actors.stages.base import Decisions
from omni_actors.stages.packing import pack, unpack


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a transcription goes on: all that the windows before it hand on."""

    index: int
    """The recording's number in the request."""
    seek: int
    """The frame at which the next window begins."""
    loudest: float
    """The largest feature so far, if the recording has several pieces; else minus infinity."""
    language: str | None
    """The code of the language; None before the first window, if the model detects it."""


class Window(msgspec.Struct, frozen=True, array_like=True):
    """A decoded window, or the end of the last recording, which has no outputs of a window.

    outputs: the data of each. place: where the transcription goes on behind the window.
    """

    outputs: list[dict[str, Any]]
    place: Place


def decisions(window: Window) -> Decisions:
    """Return the decisions of the first output of a window."""
    return pack(msgspec.msgpack.encode(window))


def windows(journal: Iterable[Decisions]) -> Iterator[Window]:
    """Yield the windows of a journal. Outputs behind the first one of a window have no decisions."""
    for entry in journal:
        if entry:
            yield msgspec.msgpack.decode(unpack(entry), type=Window)
