"""Early detection of a worker's death: a robust mutex that the worker's engine thread holds until it exits.

A process is seen to be dead (by its pidfd, by its sockets) only when the kernel has taken down its memory and closed
its devices. That takes milliseconds for a small process, and much longer for one with gigabytes or a GPU. A robust
mutex is released at the very beginning of its owner's end, whatever ends it (futex(2), "robust futexes"): about 0.1 ms
after SIGKILL.

Rules
1. The worker's engine thread is the owner, and the only thread that writes to the control socket and the rings. So when
   the mutex is released, all that the worker sent lies in the receivers' buffers.
2. One thread of the parent per worker waits for the mutex. It ends with the worker; ``close`` is called after the
   worker's death.
3. The release of the mutex carries no exit status. From then on, /proc/PID/stat has it.
4. Nothing depends on it: the death of a worker without such a thread, or whose page is damaged, is seen by its pidfd.
   (A damaged page costs a thread that never ends.)
5. The waiting thread wakes trio's thread by a write that stays blocked. If the write returned, both threads would
   compete for the interpreter's lock, and the kernel could schedule the loser only after the teardown. ``close`` ends
   the write by a shutdown: a forked child may still have the other end, so closing that would not end it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import threading
from contextlib import ExitStack, suppress

from ringbuf import create_memory  # allocated at once: a lack of memory is an OSError, never a SIGBUS

SHARED = ROBUST = 1
MUTEX, HELD, SIZE = 0, 128, 4096
"""Offsets in the shared page: the mutex, and the semaphore that is posted once the mutex is held. The page's size."""
MORE_THAN_FITS = 1 << 16
"""Bytes that block the thread which writes them: the socket's buffer, of twice SIZE, does not hold them."""
EXIT_CODE = 52 - 3
"""Index of the wait status in /proc/PID/stat, counted after the process name."""
JOIN_TIMEOUT_S = 1.0
"""How long ``close`` waits for the thread of a dead worker to end."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Page:
    """The shared page, mapped."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._start = ctypes.c_char.from_buffer(self._map)

    def at(self, offset: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self._start) + offset)

    def close(self) -> None:
        del self._start
        self._map.close()


_mapped: list[_Page] = []
"""In a worker: the page, which must stay mapped, because the kernel looks for the mutex in it."""


def acquire_death_mutex(fd: int) -> None:
    """Acquire the mutex for the rest of the process. Called by a worker's engine thread, before it starts others.

    fd: the shared page (``DeathMutex.fd``); it is closed here. Raises OSError.
    """
    page = _Page(fd)
    _mapped.append(page)
    os.close(fd)
    _check(_libc.pthread_mutex_lock(page.at(MUTEX)))
    _libc.sem_post(page.at(HELD))


class DeathMutex:
    """The parent's side of the mutex.

    fd: the shared page, to be inherited by the worker. released_fd: readable once the worker begins to exit, if
    ``watch`` was called. Raises OSError (no memory, no descriptors).
    """

    def __init__(self) -> None:
        with ExitStack() as undo:
            self._reader, self._writer = socket.socketpair()
            undo.enter_context(self._reader)
            undo.enter_context(self._writer)
            self.fd = create_memory(SIZE)
            undo.callback(os.close, self.fd)
            self._page = _Page(self.fd)
            undo.pop_all()
        self.released_fd = self._reader.fileno()
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SIZE)
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, ROBUST))
        _check(_libc.pthread_mutex_init(self._page.at(MUTEX), attributes))
        _check(_libc.sem_init(self._page.at(HELD), SHARED, 0))
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Start the thread that waits for the mutex. If the machine has no thread left, nothing happens (rule 4)."""

        def wait() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # SIGPIPE too
            _libc.sem_wait(self._page.at(HELD))
            _libc.pthread_mutex_lock(self._page.at(MUTEX))
            with suppress(BrokenPipeError):
                self._writer.sendall(bytes(MORE_THAN_FITS))

        thread = threading.Thread(target=wait, name="death_mutex", daemon=True)
        with suppress(RuntimeError):  # can't start new thread
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Free everything. Called once the worker is dead or was never started, when no task waits for the mutex."""
        self._reader.shutdown(socket.SHUT_RDWR)
        self._reader.close()
        if self._thread is not None:
            _libc.sem_post(self._page.at(HELD))  # it may have died before it held the mutex
            self._thread.join(JOIN_TIMEOUT_S)
        if self._thread is None or not self._thread.is_alive():
            self._writer.close()
            self._page.close()
        os.close(self.fd)


def exit_of_dying(pid: int) -> int | None:
    """Return a dying child's exit code, or its negative signal number; None if the kernel reports 0 or no status."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read()
    except OSError:
        return None
    status = int(stat.rpartition(b")")[2].split()[EXIT_CODE])
    return os.waitstatus_to_exitcode(status) if status else None


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
