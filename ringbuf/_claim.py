"""Ownership of the two ends: claims, detecting an owner's death, and waiting for the peer.

Rule 1: a claim word is start time << 22 | pid. No two processes of a boot share one, so a recycled pid is not mistaken
for the owner. A zombie is dead.
Rule 2: a record lock, of a byte for each end, makes a claim's load, check and store one step among processes; the
kernel drops it when the process that holds it dies. Claiming one end never waits for a process at the other.
Rule 3: the death of the owner is an event (a pidfd), not a timeout.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import threading
import time
from typing import Final

from ringbuf._errors import AlreadyClaimed, PeerDied, RingClosed
from ringbuf._words import Column, Segment, peek_claims
from ringbuf.syscalls import pidfd_open

_PID_BITS: Final = 22
_LONGEST_S: Final = 86_400.0  # poll accepts a month at most; an early wake-up is harmless
_among_threads = threading.Lock()


def claim(segment: Segment, column: Column, memory_fd: int) -> None:
    """Make this process the owner of an end; a dead owner is succeeded.

    Raises AlreadyClaimed, RingClosed, RingCorrupted.
    """
    with _among_threads:
        fcntl.lockf(memory_fd, fcntl.LOCK_EX, 1, column.claim)
        try:
            if segment.is_closed(column):
                raise RingClosed(column.end)
            owner = segment.claim_of(column)
            if owner and claim_word_of(pid_of(owner)) == owner:
                raise AlreadyClaimed(column.end, pid_of(owner))
            segment.check_positions()
            mine = claim_word_of(os.getpid())
            if mine is None:
                raise OSError(errno.ENOENT, "no /proc, which shows whether the owner of an end is alive")
            segment.store_claim(column, mine)
        finally:
            fcntl.lockf(memory_fd, fcntl.LOCK_UN, 1, column.claim)


def read_claims(path: str) -> tuple[int, int, int] | None:
    """Return generation and claims of the ring in another process's memory file. None: no ring. Raises OSError."""
    with _among_threads:  # closing a descriptor of the file releases its record locks of this process
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return peek_claims(fd)
        finally:
            os.close(fd)


def pid_of(claim_word: int) -> int:
    return claim_word & ((1 << _PID_BITS) - 1)


def claim_word_of(pid: int) -> int | None:
    """Return the claim word of a process; None if no process with that pid runs."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, start_ticks = fields[0], int(fields[19])
    return None if state in (b"Z", b"X") else start_ticks << _PID_BITS | pid


def _open_pidfd(pid: int) -> int | None:
    """Return a pidfd; None if no process has this pid, or the number is 0 or a thread's."""
    try:
        return pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            return None
        raise


class Waiter:
    """Blocks a thread at its own doorbell, unless the process at the other end dies."""

    def __init__(self, segment: Segment, peer: Column, bell: int, creator: int = 0) -> None:
        """creator: the claim word of the process to watch while no process has claimed the peer's end."""
        self._segment, self._peer, self._bell, self._creator = segment, peer, bell, creator
        self._watched = 0
        self._pidfd: int | None = None

    def wait(self, deadline: float | None) -> bool:
        """Wait for the bell. Return False once ``deadline`` (time.monotonic()) has passed. Raises PeerDied."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if (pidfd := self._watch()) is not None:
            poll.register(pidfd, select.POLLIN)
        ready = poll.poll(None if deadline is None else min(max(0.0, deadline - time.monotonic()), _LONGEST_S) * 1000)
        if ready and all(fd == pidfd for fd, _ in ready):
            raise PeerDied(self._peer.end, pid_of(self._watched))
        return deadline is None or time.monotonic() < deadline

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd, self._watched = None, 0

    def _watch(self) -> int | None:
        """Return a pidfd of the owner; None while the end is unclaimed, or claimed by this process. Raises PeerDied.

        The creator of a named ring counts as the owner of an unclaimed end: the name dies with it.
        """
        owner = self._segment.claim_of(self._peer) or self._creator
        if owner != self._watched:
            self.close()
            pid = pid_of(owner)
            if owner and pid != os.getpid():
                self._pidfd = _open_pidfd(pid)
            if owner and claim_word_of(pid) != owner:
                self.close()
                raise PeerDied(self._peer.end, pid)
            self._watched = owner
        return self._pidfd
