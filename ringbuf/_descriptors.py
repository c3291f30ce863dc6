"""The three descriptors of a ring: how they are made, and how others are told from them.

Rule 1: the memory is a memfd, which has no name at any instant, so no crash of anyone can leave it behind.
Rule 2: its pages are allocated at once: a lack of memory is an OSError in ``create``, never a SIGBUS in a worker.
Rule 3: its size is sealed: a peer cannot truncate it, which would be a SIGBUS at the next access of whoever mapped it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
from typing import Final

from ringbuf._errors import RingCorrupted

# Linux's numbers on x86-64. Pythons that were built for old C libraries (conda's, uv's) lack os.memfd_create.
_MEMFD_CREATE: Final = 319
_CLOEXEC, _ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW, _WRITE, _FUTURE_WRITE = 1, 2, 4, 8, 16
_SIZE_IS_SEALED: Final = _SEAL | _SHRINK | _GROW

_libc = ctypes.CDLL(None, use_errno=True)


def create_memory(size: int) -> int:
    """Zeroed, mode 0600, close-on-exec. Raises OSError (no memory, no descriptor)."""
    if size > (available := _available()):
        # The kernel would go on until it has to kill somebody.
        raise OSError(errno.ENOMEM, f"a ring of {size} bytes, where {available} are available")
    fd: int = _libc.syscall(_MEMFD_CREATE, b"ringbuf", _CLOEXEC | _ALLOW_SEALING)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"memfd_create: {os.strerror(number)}")
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SIZE_IS_SEALED)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_bell() -> int:
    """Raises OSError (no descriptor)."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def check_memory(fd: int) -> None:
    """Raises RingCorrupted unless ``create_memory`` made it, as far as that shows."""
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & (_SIZE_IS_SEALED | _WRITE | _FUTURE_WRITE) != _SIZE_IS_SEALED:
        raise RingCorrupted(0, (), f"{_describe(fd)} is no memory of a sealed size")
    if status.st_blocks * 512 < status.st_size or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise RingCorrupted(0, (), f"{_describe(fd)} is not allocated, or not to be written")


def check_bell(fd: int) -> None:
    """Raises RingCorrupted unless it is an eventfd that blocks nobody."""
    if os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]" or os.get_blocking(fd):
        raise RingCorrupted(0, (), f"{_describe(fd)} is no doorbell")


def _describe(fd: int) -> str:
    return f"descriptor {fd} ({os.readlink(f'/proc/self/fd/{fd}')})"


def _available() -> int:
    """Bytes to be had without the kernel killing somebody: of the machine, and of this process's control group."""
    with open("/proc/meminfo", "rb") as file:
        free = next((int(line.split()[1]) << 10 for line in file if line.startswith(b"MemAvailable:")), None)
    if free is None:
        raise OSError(errno.ENOSYS, "/proc/meminfo has no MemAvailable")
    return min(free, _left_to_group())


def _left_to_group() -> int:
    """File pages that nobody has used for long do not count: they go first. Without a limit (or cgroup v2): endless."""
    try:
        with open("/proc/self/cgroup") as file:
            group = "/sys/fs/cgroup" + next(line[3:].strip() for line in file if line.startswith("0::"))
        with open(f"{group}/memory.max") as file:
            limit = int(file.read())
        with open(f"{group}/memory.current") as file:
            used = int(file.read())
        with open(f"{group}/memory.stat") as file:
            idle = next(int(line.split()[1]) for line in file if line.startswith("inactive_file "))
    except (OSError, StopIteration, ValueError):  # "max" is no number
        return sys.maxsize
    return limit - used + idle
