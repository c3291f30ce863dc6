"""The three descriptors of a ring: how they are created, and how foreign descriptors are recognised.

Rule 1: the memory is a memfd. It never has a name, so no crash of any process can leave it behind.
Rule 2: its pages are allocated at once: a lack of memory is an OSError in ``create``, never a SIGBUS in a worker.
Rule 3: its size is sealed: a peer cannot truncate it, which would be a SIGBUS at the other processes' next access.
Rule 4: a doorbell is an eventfd. That of a named ring is a pipe instead, because another process can open a pipe
through /proc and an eventfd not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Final

from ringbuf._errors import RingCorrupted
from ringbuf.syscalls import F_GET_SEALS, FUTURE_WRITE, SIZE_IS_SEALED, WRITE, memfd_create, seal_size

_OWN_GROUP: Final = "/proc/self/cgroup"
_GROUPS: Final = "/sys/fs/cgroup"


def create_memory(size: int) -> int:
    """Create an anonymous memory file of ``size`` bytes: zeroed, allocated, of sealed size, mode 0600, close-on-exec.

    Returns its descriptor, which the caller closes. Raises OSError (no memory, no descriptor).
    """
    if size > (available := _available()):
        # The kernel would allocate until it has to kill a process.
        raise OSError(errno.ENOMEM, f"a ring of {size} bytes, where {available} are available")
    fd = memfd_create("ringbuf")
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size)
        seal_size(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_bell() -> int:
    """Create a non-blocking eventfd. Raises OSError (no descriptor)."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def create_pipe_bell() -> int:
    """Create a non-blocking pipe, open for reading and writing, which no end's death closes. Raises OSError."""
    read, write = os.pipe()
    try:
        return os.open(f"/proc/self/fd/{read}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(read)
        os.close(write)


def check_memory(fd: int) -> None:
    """Raise RingCorrupted unless the descriptor has the properties that ``create_memory`` gives it."""
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & (SIZE_IS_SEALED | WRITE | FUTURE_WRITE) != SIZE_IS_SEALED:
        raise RingCorrupted(0, (), f"{_describe(fd)} is not memory of a sealed size")
    if status.st_blocks * 512 < status.st_size or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise RingCorrupted(0, (), f"{_describe(fd)} is not allocated, or not writable")


def check_bell(fd: int) -> None:
    """Raise RingCorrupted unless the descriptor is a non-blocking eventfd, or such a pipe as ``create_pipe_bell``'s."""
    is_eventfd = os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]"
    is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if not (is_eventfd or is_pipe) or os.get_blocking(fd):
        raise RingCorrupted(0, (), f"{_describe(fd)} is not a doorbell")


def _describe(fd: int) -> str:
    return f"descriptor {fd} ({os.readlink(f'/proc/self/fd/{fd}')})"


def _available() -> int:
    """Return the bytes that the machine and the control groups can give without the kernel killing a process."""
    with open("/proc/meminfo", "rb") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith(b"MemAvailable:"))
    own = PurePosixPath("/")
    with suppress(FileNotFoundError), open(_OWN_GROUP) as file:
        own = next((PurePosixPath(line[3:].strip()) for line in file if line.startswith("0::")), own)
    return min(free, *(_left_to(f"{_GROUPS}{group}") for group in (own, *own.parents)))


def _left_to(group: str) -> int:
    """Return the bytes left to a control group; ``sys.maxsize`` without a limit or without cgroup v2.

    File pages that have not been used for a while count as free: the kernel reclaims them first.
    """
    try:
        with open(f"{group}/memory.max") as file:
            limit = int(file.read())
        with open(f"{group}/memory.current") as file:
            used = int(file.read())
        with open(f"{group}/memory.stat") as file:
            idle = next(int(line.split()[1]) for line in file if line.startswith("inactive_file "))
    except (OSError, StopIteration, ValueError):  # "max" is no number
        return sys.maxsize
    return limit - used + idle
