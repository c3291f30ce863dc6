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


class RingError(Exception):
    """Root of the tree."""


class RingClosed(RingError):
    """end: the one that was closed."""

    def __init__(self, end: EndName) -> None:
        self.end = end
        super().__init__(f"the {end} of the ring is closed")


class RingCorrupted(RingError):
    """offset: byte offset in the segment. words: the 8-byte words found there."""

    def __init__(self, offset: int, words: Sequence[int], why: str) -> None:
        self.offset, self.words, self.why = offset, tuple(words), why
        found = " ".join(f"{word:#x}" for word in self.words)
        super().__init__(f"corrupted ring: {why}, at byte {offset} (found {found or 'nothing'})")


class WrongGeneration(RingError):
    def __init__(self, expected: int, found: int) -> None:
        self.expected, self.found = expected, found
        super().__init__(f"the ring is of generation {found}, not {expected}")


class AlreadyClaimed(RingError):
    def __init__(self, end: EndName, pid: int) -> None:
        self.end, self.pid = end, pid
        super().__init__(f"the {end} of the ring is claimed by the living process {pid}")


class PeerDied(RingError):
    """The process that had claimed ``end`` exited without closing it."""

    def __init__(self, end: EndName, pid: int) -> None:
        self.end, self.pid = end, pid
        super().__init__(f"the {end} of the ring, process {pid}, died")


class RingNotFound(RingError):
    """name: what was looked for, a label or a whole name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no living process has an unclaimed ring named {name!r}")


class RingNameTaken(RingError):
    """pids: of the living processes whose rings have this label."""

    def __init__(self, label: str, pids: Sequence[int]) -> None:
        self.label, self.pids = label, tuple(pids)
        super().__init__(f"the label {label!r} belongs to a ring of process {', '.join(map(str, self.pids))}")


class RingNameRefused(RingError):
    """why: what is wrong with the entry of that name, in words."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why
        super().__init__(f"{name!r} is not the name of a ring: {why}")


class MessageTooLarge(RingError):
    """size and limit in bytes."""

    def __init__(self, size: int, limit: int, hint: str) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"a message of {size} bytes exceeds {limit}: {hint}")


class FrameBorrowed(RingError):
    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is still borrowed: an array or a view of it is alive; drop it, or copy first")


class FrameReleased(RingError):
    def __init__(self) -> None:
        super().__init__("the frame of this data was released: copy what you keep")


class RingMisuse(RingError):
    pass


class BundleCorrupted(RingError):
    """why: what is wrong, in words."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"not a bundle: {why}")


class CudaFailed(RingError):
    """code: the CUDA runtime's; None when there is no runtime."""

    def __init__(self, function: str, code: int | None, why: str) -> None:
        self.function, self.code = function, code
        super().__init__(f"{function} failed{'' if code is None else f' with code {code}'}: {why}")


class UnsupportedMachine(RingError, ImportError):
    """Raised by the import of ringbuf."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        super().__init__(f"ringbuf relies on the total store order of x86-64; this machine is {machine!r}")
