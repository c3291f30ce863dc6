"""Locks that keep two workers from loading onto one device at a time.

A worker that loads measures the device's free memory, which is wrong while another one loads.

Rules
1. A lock is a listening socket with a name in the abstract namespace, ``@omni-actors/device/NAME``. Binding the name is
   exclusive. The kernel frees the name with the last descriptor of the socket, and no file exists, so no death leaves
   anything behind. ``ss -xl`` lists the locks. They reach as far as the network namespace.
2. A process that waits connects to the socket, and is woken when the socket is closed. The connection has the pid of
   the process that listens (SO_PEERCRED).
3. The devices of one worker are locked in the order of their names, so no two processes wait for each other.
4. The parent and the worker both have the socket. So the lock outlives a parent that is killed, until its worker has
   ended too, and a worker that is killed, until the parent has seen its end.
5. A process that the parent forks has no part of the locks. It would keep them for as long as it lives.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import weakref
from collections.abc import Iterable

import trio

from omni_actors.errors import OmniError

PREFIX, LONGEST = "\0omni-actors/device/", 80
"""The beginning of a lock's name, and how many bytes of a device's name follow: a socket's name has 108 bytes."""
BACKLOG = 1024
RETRY_S = 0.01
"""Seconds until the next try, when the holder cannot be connected to: it is about to listen, or has just closed."""


class DeviceBusy(OmniError):
    """A worker was not started, because another one still loads onto its device.

    Attributes:
        device: Name of the device, as in CUDA_VISIBLE_DEVICES.
        holder_pid: The process of the system whose worker loads; None if unknown.
        timeout_s: How long the worker waited (``device_lock_timeout_s``), in seconds.
    """

    def __init__(self, device: str, holder_pid: int | None, timeout_s: float) -> None:
        self.device, self.holder_pid, self.timeout_s = device, holder_pid, timeout_s
        holder = "an unknown process" if holder_pid is None else f"pid {holder_pid}"
        super().__init__(f"device {device!r} was locked by {holder} for {timeout_s:g} s (device_lock_timeout_s)")


class DeviceLocks:
    """The locks of some devices, held until ``release``."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        _held.add(self)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that a worker inherits (``worker/device_locks.py``)."""
        return tuple(each.fileno() for each in self._sockets)

    async def acquire(self, devices: Iterable[str], timeout_s: float) -> None:
        """Lock ``devices`` in a global order. It is no checkpoint if all are free.

        Raises DeviceBusy after ``timeout_s``, OSError (no descriptors). It holds no lock then, nor if it is cancelled.
        """
        busy, holder = "", None
        try:
            with trio.move_on_after(timeout_s):
                for device in sorted(set(devices)):
                    while (lock := _try_lock(device)) is None:
                        busy, (connection, holder) = device, _connect(device)
                        await _wait_closed(connection)
                    self._sockets.append(lock)
                return
        except BaseException:
            self.release()
            raise
        self.release()
        raise DeviceBusy(busy, holder, timeout_s)

    def release(self) -> None:
        """Release this process's part of the locks. Harmless if there is none."""
        while self._sockets:
            self._sockets.pop().close()


_held = weakref.WeakSet[DeviceLocks]()


def _release_all() -> None:
    for each in list(_held):
        each.release()


os.register_at_fork(after_in_child=_release_all)


def _address(device: str) -> bytes:
    """Return the name of a device's lock. The names of two devices differ also if they are long."""
    name = device.encode("utf-8", "surrogatepass")
    if len(name) > LONGEST:
        digest = hashlib.blake2b(name, digest_size=16).hexdigest().encode()
        name = name[: LONGEST - len(digest)] + digest
    return PREFIX.encode() + name


def _try_lock(device: str) -> socket.socket | None:
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(_address(device))
        lock.listen(BACKLOG)
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return lock


def _connect(device: str) -> tuple[socket.socket | None, int | None]:
    """Return a connection to the holder of a lock, and its pid; None for what cannot be had now."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(_address(device))
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError as error:
        connection.close()
        if error.errno not in (errno.ECONNREFUSED, errno.EAGAIN):
            raise
        return None, None
    return connection, pid or None  # 0: a process of another pid namespace


async def _wait_closed(connection: socket.socket | None) -> None:
    if connection is None:
        await trio.sleep(RETRY_S)
        return
    with connection:
        await trio.lowlevel.wait_readable(connection)
