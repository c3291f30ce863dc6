"""Cuts TCP connections of other processes, from outside and with the kernel's means: pidfd_getfd(2) and shutdown(2).

Rules
1. A descriptor of the victim's socket is copied here, shut down in both directions, and closed. Both sides then see
   that the connection has ended.
2. It needs the right to trace the victim (ptrace(2)), which a process has for its children, and root for all. Where
   system calls are filtered, as Docker does by default, nothing can be cut.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ringbuf.syscalls import pidfd_open

PIDFD_GETFD: Final = 438
"""The number of the system call on x86-64."""
_ESTABLISHED, _LISTENING = 1, 10
_NO_FD: Final = 2**31 - 1
_libc = ctypes.CDLL(None, use_errno=True)


class Connection(NamedTuple):
    """A TCP connection of a process: its descriptor there, and the ports of both sides."""

    fd: int
    local_port: int
    remote_port: int


def accepted(pid: int) -> Callable[[Connection], bool]:
    """Return a function that tells whether a process has accepted a connection, at a port where it listens."""
    ports = {port for _, port, _, state in _sockets(pid) if state == _LISTENING}
    return lambda connection: connection.local_port in ports


def why_not(pid: int) -> str | None:
    """Return why this process cannot cut connections of another one (rule 2); None: it can.

    Raises ProcessLookupError.
    """
    pidfd = pidfd_open(pid)
    try:
        _copied(pidfd, _NO_FD)  # the right is checked before the descriptor
    except OSError as error:
        return f"pidfd_getfd: {error.strerror}"
    finally:
        os.close(pidfd)
    return None


def cut(pid: int, is_wanted: Callable[[Connection], bool]) -> int:
    """Cut the connections of a process that are wanted, and return how many those were.

    Raises ProcessLookupError, PermissionError (rule 2).
    """
    pidfd = pidfd_open(pid)
    try:
        wanted = [each for each in _connections(pid) if is_wanted(each)]
        return sum(_cut(pidfd, each.fd) for each in wanted)
    finally:
        os.close(pidfd)


def _cut(pidfd: int, fd: int) -> bool:
    if (copy := _copied(pidfd, fd)) is None:  # closed since
        return False
    with socket.socket(fileno=copy) as connection, suppress(OSError):  # it has ended since
        connection.shutdown(socket.SHUT_RDWR)
    return True


def _copied(pidfd: int, fd: int) -> int | None:
    """Copy a process's descriptor; None: it has no such descriptor. Raises OSError."""
    copy: int = _libc.syscall(PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        if (number := ctypes.get_errno()) == errno.EBADF:
            return None
        raise OSError(number, os.strerror(number))
    return copy


def _connections(pid: int) -> Iterator[Connection]:
    """Yield the established TCP connections of a process."""
    inodes = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since
            inodes[os.readlink(entry)] = int(entry.name)
    for inode, local, remote, state in _sockets(pid):
        if state == _ESTABLISHED and (fd := inodes.get(f"socket:[{inode}]")) is not None:
            yield Connection(fd, local, remote)


def _sockets(pid: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield inode, local port, remote port and state of the IPv4 TCP sockets that a process has open."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(entry))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in own:
            local, remote = (int(fields[n].rpartition(":")[2], 16) for n in (1, 2))
            yield int(fields[9]), local, remote, int(fields[3], 16)
