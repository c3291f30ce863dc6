"""Every error of the ring, as one tree. Each carries the facts, not only a sentence.

RingError
├── RingClosed           an end was closed: no message follows, or none will be read
├── RingCorrupted        the shared memory contains what the protocol never writes
├── WrongGeneration      the ring belongs to another incarnation
├── AlreadyClaimed       a living process owns that end
├── PeerDied             the process at the other end is gone
├── RingNotFound         no living process has a ring of that name
├── RingNameTaken        a living process has a ring of that label
├── RingNameRefused      a name that another user or another program made
├── MessageTooLarge      more than the place for it can take
├── FrameBorrowed        a view of the frame is alive, so its bytes may not be given back
├── FrameReleased        the frame was released, so its bytes may not be read
├── RingMisuse           calls in an order that is not allowed
├── BundleCorrupted      the bytes are not a bundle
├── CudaFailed           the ring's memory could not be page-locked
└── UnsupportedMachine   the memory ordering of this machine is not the one that the ring needs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

EndName: TypeAlias = Literal["producer", "consumer"]
"""Names one of the two ends of a ring."""


class RingError(Exception):
    """Root of the errors of rings, and of the bundles in them."""


class RingClosed(RingError):
    """An end of the ring was closed.

    end: the one that was closed.
    """

    def __init__(self, end: EndName) -> None:
        self.end = end
        super().__init__(f"the {end} of the ring is closed")


class RingCorrupted(RingError):
    """The shared memory contains what the protocol never writes.

    offset: byte offset in the segment. words: the 8-byte words found there. why: what is wrong, in words.
    """

    def __init__(self, offset: int, words: Sequence[int], why: str) -> None:
        self.offset, self.words, self.why = offset, tuple(words), why
        found = " ".join(f"{word:#x}" for word in self.words)
        super().__init__(f"corrupted ring: {why}, at byte {offset} (found {found or 'nothing'})")


class WrongGeneration(RingError):
    """The ring belongs to another incarnation than the process expects."""

    def __init__(self, expected: int, found: int) -> None:
        self.expected, self.found = expected, found
        super().__init__(f"the ring is of generation {found}, not {expected}")


class AlreadyClaimed(RingError):
    """A living process owns the end that was to be claimed.

    end: the end. pid: the process that owns it.
    """

    def __init__(self, end: EndName, pid: int) -> None:
        self.end, self.pid = end, pid
        super().__init__(f"the {end} of the ring is claimed by the living process {pid}")


class PeerDied(RingError):
    """The process that had claimed ``end`` exited without closing it."""

    def __init__(self, end: EndName, pid: int) -> None:
        self.end, self.pid = end, pid
        super().__init__(f"the {end} of the ring, process {pid}, died")


class RingNotFound(RingError):
    """No living process has an unclaimed ring of this name.

    name: what was looked for, a label or a complete name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no living process has an unclaimed ring named {name!r}")


class RingNameTaken(RingError):
    """A living process has a ring of this label already.

    pids: the living processes whose rings have the label.
    """

    def __init__(self, label: str, pids: Sequence[int]) -> None:
        self.label, self.pids = label, tuple(pids)
        super().__init__(f"the label {label!r} belongs to a ring of process {', '.join(map(str, self.pids))}")


class RingNameRefused(RingError):
    """An entry of this name was made by another user or another program.

    why: what is wrong with the entry, in words.
    """

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why
        super().__init__(f"{name!r} is not the name of a ring: {why}")


class MessageTooLarge(RingError):
    """A message exceeds what the ring, or the place for the message, can take.

    size, limit: in bytes.
    """

    def __init__(self, size: int, limit: int, hint: str) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"a message of {size} bytes exceeds {limit}: {hint}")


class FrameBorrowed(RingError):
    """A view of the frame is alive, so its bytes may not be given back."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is still borrowed: an array or a view of it is alive; drop it, or copy first")


class FrameReleased(RingError):
    """The frame was released, so its bytes may not be read."""

    def __init__(self) -> None:
        super().__init__("the frame of this data was released: copy what you keep")


class RingMisuse(RingError):
    """Calls came in an order that is not allowed."""


class BundleCorrupted(RingError):
    """The bytes are not a bundle.

    why: what is wrong with them, in words.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"not a bundle: {why}")


class CudaFailed(RingError):
    """The ring's memory could not be page-locked.

    function: the function of the CUDA runtime that failed. code: its error code; None if there is no runtime.
    """

    def __init__(self, function: str, code: int | None, why: str) -> None:
        self.function, self.code = function, code
        super().__init__(f"{function} failed{'' if code is None else f' with code {code}'}: {why}")


class UnsupportedMachine(RingError, ImportError):
    """The machine does not have the memory ordering that the ring needs; the import of ringbuf raises this."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        super().__init__(f"ringbuf relies on the total store order of x86-64; this machine is {machine!r}")
