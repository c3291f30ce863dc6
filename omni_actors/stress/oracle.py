"""What an answer was, and how it differs from the one without a fault.

Rules
1. An answer is one stream of bytes for each (stage, content): text in UTF-8, samples, codes and other tensors as they
   are in memory, and a byte for each "finished". How a stream was cut into chunks does not matter.
2. Two answers are equal where all their streams are, byte for byte.
3. One that differs is *duplicated* where some stream is longer than the oracle's, else *lost* where some is shorter,
   else *corrupted*. Of a request that failed, what came must be a beginning of the oracle's.
4. What comes is compared as it comes and not kept: the memory of a process under fire is its system's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from omni_actors.generation import Output

Damage: TypeAlias = Literal["lost", "duplicated", "corrupted"]
Place: TypeAlias = tuple[str, str]
"""Stage and content."""


class Oracle:
    """Keeps the answer to one request: the one without a fault."""

    def __init__(self) -> None:
        self.streams: dict[Place, bytearray] = {}

    def add(self, output: Output) -> None:
        for place, data in _pieces(output):
            self.streams.setdefault(place, bytearray()).extend(data)


class Answer:
    """Compares the answer to one request with the oracle's."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._came: dict[Place, int] = {}
        """Bytes so far, by stream."""
        self._wrong: set[Place] = set()
        """Streams that are no beginning of the oracle's."""

    def add(self, output: Output) -> None:
        for place, data in _pieces(output):
            came = self._came.get(place, 0)
            self._came[place] = came + len(data)
            if self._oracle.streams.get(place, b"")[came : came + len(data)] != data:
                self._wrong.add(place)

    def damage(self) -> tuple[Damage, str] | None:
        """How it differs where it is complete, and where; None where it does not."""
        kind: Damage
        for kind in ("duplicated", "lost", "corrupted"):
            for place in sorted(self._came.keys() | self._oracle.streams.keys()):
                came, expected = self._came.get(place, 0), self._expected(place)
                if (came != expected or place in self._wrong) and self._kind(place) == kind:
                    stage, content = place
                    return kind, f"{content} of {stage!r}: {came} bytes, {expected} expected"
        return None

    def damage_so_far(self) -> tuple[Damage, str] | None:
        """As ``damage`` where it broke off: it may be short."""
        if not self._wrong:
            return None
        stage, content = place = min(self._wrong)
        kind: Damage = "duplicated" if self._kind(place) == "duplicated" else "corrupted"
        return kind, f"{content} of {stage!r} is no beginning of the oracle's"

    def _expected(self, place: Place) -> int:
        return len(self._oracle.streams.get(place, b""))

    def _kind(self, place: Place) -> Damage:
        came, expected = self._came.get(place, 0), self._expected(place)
        return "duplicated" if came > expected else "lost" if came < expected else "corrupted"


def _pieces(output: Output) -> Iterator[tuple[Place, bytes]]:
    """Those that are not empty."""
    contents = [("text", str(output.data.get("text") or "").encode())]
    contents += [(name, bytes(tensor.data)) for name, tensor in output.tensors.items()]
    contents.append(("finished", b"." * output.finished))
    yield from (((output.stage, content), data) for content, data in contents if data)
