"""System calls for which some Pythons have no function.

A Python that was built for an old C library, or with the headers of an old kernel, lacks these functions, whatever the
machine has: conda's, and uv's of before July 2026.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from typing import Final

# Linux's numbers on x86-64.
_MEMFD_CREATE: Final = 319
_PIDFD_SEND_SIGNAL: Final = 424
_PIDFD_OPEN: Final = 434
_CLOEXEC, _ALLOW_SEALING = 1, 2
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL, SHRINK, GROW, WRITE, FUTURE_WRITE = 1, 2, 4, 8, 16
SIZE_IS_SEALED: Final = SEAL | SHRINK | GROW

_libc = ctypes.CDLL(None, use_errno=True)


def memfd_create(name: str) -> int:
    """Create an anonymous file in memory, empty, sealable and close-on-exec. Raises OSError (no memory, no descriptor).

    name: what /proc shows. Returns the file's descriptor, which the caller closes.
    """
    return _checked("memfd_create", _libc.syscall(_MEMFD_CREATE, os.fsencode(name), _CLOEXEC | _ALLOW_SEALING))


def seal_size(fd: int) -> None:
    """Let no process change the size of a file of ``memfd_create`` any more. Raises OSError."""
    fcntl.fcntl(fd, F_ADD_SEALS, SIZE_IS_SEALED)


def pidfd_open(pid: int) -> int:
    """Return a descriptor of a process, close-on-exec, which the caller closes. It is readable once the process ended.

    Raises ProcessLookupError (no such process, or it was reaped), OSError (no descriptor; ``pid`` is a thread's).
    """
    return _checked("pidfd_open", _libc.syscall(_PIDFD_OPEN, pid, 0))


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Send a signal to the process of ``pidfd_open``. Raises ProcessLookupError (it was reaped), PermissionError."""
    _checked("pidfd_send_signal", _libc.syscall(_PIDFD_SEND_SIGNAL, pidfd, number, None, 0))


def _checked(call: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
