"""What an answer was, and how it differs from the one without a fault.

Rules
1. An answer is one stream of bytes for each (stage, content): text in UTF-8, samples, codes and other tensors as they
   are in memory, and a byte for each "finished". How a stream was cut into chunks does not matter.
2. Two answers are equal where all their streams are, byte for byte.
3. One that differs is *duplicated* where some stream is longer than the oracle's, else *lost* where some is shorter,
   else *corrupted*. Of a request that failed, what came must be a beginning of the oracle's.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from omni_actors.generation import Output

Damage: TypeAlias = Literal["lost", "duplicated", "corrupted"]
Streams: TypeAlias = "dict[tuple[str, str], bytes]"


class Answer:
    """Collects the outputs of one request."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], bytearray] = {}

    def add(self, output: Output) -> None:
        if text := output.data.get("text"):
            self._stream(output.stage, "text").extend(str(text).encode())
        for name, tensor in output.tensors.items():
            self._stream(output.stage, name).extend(tensor.data)
        if output.finished:
            self._stream(output.stage, "finished").extend(b".")

    def _stream(self, stage: str, content: str) -> bytearray:
        return self._streams.setdefault((stage, content), bytearray())

    @property
    def streams(self) -> Streams:
        return {place: bytes(stream) for place, stream in self._streams.items() if stream}


def damage(answer: Answer, oracle: Answer) -> tuple[Damage, str] | None:
    """How a complete answer differs, and where; None where it does not."""
    got, expected = answer.streams, oracle.streams
    for kind in ("duplicated", "lost", "corrupted"):
        for place in sorted(got.keys() | expected.keys()):
            ours, theirs = got.get(place, b""), expected.get(place, b"")
            if ours != theirs and _kind(ours, theirs) == kind:
                stage, content = place
                return _kind(ours, theirs), f"{content} of {stage!r}: {len(ours)} bytes, {len(theirs)} expected"
    return None


def damage_so_far(answer: Answer, oracle: Answer) -> tuple[Damage, str] | None:
    """As ``damage`` for an answer that broke off: it may be short."""
    expected = oracle.streams
    for (stage, content), ours in sorted(answer.streams.items()):
        theirs = expected.get((stage, content), b"")
        if not theirs.startswith(ours):
            kind: Damage = "duplicated" if len(ours) > len(theirs) else "corrupted"
            return kind, f"{content} of {stage!r} is no beginning of the oracle's"
    return None


def _kind(ours: bytes, theirs: bytes) -> Damage:
    return "duplicated" if len(ours) > len(theirs) else "lost" if len(ours) < len(theirs) else "corrupted"
