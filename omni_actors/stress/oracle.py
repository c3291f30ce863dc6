"""Compares an output with the one of the same request without a fault.

Rules
1. An answer is one stream of bytes for each (stage, content): text in UTF-8, samples, codes and other tensors as in
   memory, and a byte for each "finished". How a stream was cut into chunks does not matter.
2. Two answers are equal if all their streams are, byte for byte.
3. An answer that differs is *duplicated* if some stream is longer than the oracle's, else *lost* if some is shorter,
   else *corrupted*. The answer of a request that failed must be a prefix of the oracle's.
4. An output may name what it depends on: ``data["trail"]``, records of a stage, the number of its output, and digests
   of its history before and after that output. An answer is also corrupted if these digests contradict each
   other: two outputs then depend on different histories of one stage.
5. All outputs of one stage for one request have one version of its weights. A stage whose weights are updated has
   none that is older than the version that all of its workers had when the request was submitted.
6. Outputs are compared as they arrive and not kept, because the harness shares the memory of the process that it
   measures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Literal, TypeAlias, get_args

from omni_actors.outputs import Output

Damage: TypeAlias = Literal["duplicated", "lost", "corrupted"]
"""The first that applies to some stream."""
Place: TypeAlias = tuple[str, str]
"""Stage and content."""


class Oracle:
    """The answer to one request without a fault."""

    def __init__(self) -> None:
        self.streams: defaultdict[Place, bytearray] = defaultdict(bytearray)

    def add(self, output: Output) -> None:
        for place, data in _pieces(output):
            self.streams[place] += data


class ExpectedAnswer:
    """Compares the answer to one request with the oracle's."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._received: dict[Place, int] = {}
        """Bytes received so far, by stream."""
        self._wrong: set[Place] = set()
        """Streams that are not a prefix of the oracle's."""
        self._history: dict[tuple[str, int], int] = {}
        """For a stage and a number of outputs, the digest of its history until then (rule 4)."""
        self._forked: str | None = None
        """Where the answer first named two histories."""

    def add(self, output: Output) -> None:
        for stage, number, before, after in output.data.get("trail", ()):
            for count, digest in ((number, before), (number + 1, after)):
                if self._history.setdefault((stage, count), digest) != digest:
                    self._forked = self._forked or f"two histories of {stage!r} after {count} outputs"
        for place, data in _pieces(output):
            received = self._received.get(place, 0)
            self._received[place] = received + len(data)
            if self._oracle.streams.get(place, b"")[received : received + len(data)] != data:
                self._wrong.add(place)

    def damage(self, *, complete: bool) -> tuple[Damage, str] | None:
        """How and where the answer differs; None if it does not. If it is not complete, it may be short."""
        found: dict[Damage, str] = {}
        for place in sorted(self._received.keys() | self._oracle.streams.keys()):
            received, expected = self._received.get(place, 0), len(self._oracle.streams.get(place, b""))
            if place in self._wrong or (complete and received != expected):
                is_short = complete and received < expected
                kind: Damage = "duplicated" if received > expected else "lost" if is_short else "corrupted"
                wanted = f"{expected} expected" if complete else f"not a prefix of the {expected} expected"
                found.setdefault(kind, f"{place[1]} of {place[0]!r}: {received} bytes, {wanted}")
        if self._forked is not None:
            found.setdefault("corrupted", self._forked)
        return next(((kind, found[kind]) for kind in get_args(Damage) if kind in found), None)


def _pieces(output: Output) -> Iterator[tuple[Place, bytes]]:
    """The non-empty parts of an output, by stream."""
    contents = [("text", str(output.data.get("text") or "").encode())]
    contents += [(name, bytes(tensor.data)) for name, tensor in output.tensors.items()]
    contents.append(("finished", b"." * output.finished))
    yield from (((output.stage, content), data) for content, data in contents if data)


class Versions:
    """Checks the versions in the outputs of one request. least: the oldest that outputs of ``updated`` may have."""

    def __init__(self, least: int = 0, updated: Collection[str] = ()) -> None:
        self._least, self._updated = least, updated
        self._of_stage: dict[str, str | None] = {}
        self.wrong: str | None = None
        """How an output contradicts rule 5."""

    def add(self, output: Output) -> None:
        version = output.data.get("weights_version")
        first = self._of_stage.setdefault(output.stage, version)
        if version != first:
            self.wrong = f"outputs of {output.stage!r} with the weights {first} and {version}"
        elif output.stage in self._updated and int(version or 0) < self._least:
            self.wrong = f"an output of {output.stage!r} with the weights {version}, established were {self._least}"
