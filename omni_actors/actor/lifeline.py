"""The kernel's first word that a worker is dying: a mutex that its main thread holds for life.

A process is seen to be dead (by its pidfd, by its sockets) only when the kernel has taken down its memory and closed
its devices: milliseconds for a small one, much longer for one with gigabytes or a GPU. A robust mutex is released at
the very beginning of its owner's end, whatever ends it (futex(2), "robust futexes"): about 0.1 ms after SIGKILL.

Rules
1. The worker's main thread is the owner, and the only one that writes to the control socket: when the mutex is
   released, all that the worker said lies in the parent's buffers.
2. A thread of the parent waits for it, one a worker. It ends with the worker: ``close`` comes after its death.
3. It says when to look, not what happened: how a process ends is in its /proc/PID/stat from then on.
4. Nothing rests on it: a worker without a thread here, or whose page is gone, is seen to die by its pidfd. (The latter
   costs a thread that never ends.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trio.lowlevel import TrioToken

from ringbuf._descriptors import create_memory  # allocated at once: a lack of it is an OSError, never a SIGBUS

SHARED = ROBUST = 1
MUTEX, HELD, SIZE = 0, 128, 4096
"""Where in the shared page the mutex is, and the semaphore that says that it is held."""
EXIT_CODE = 52 - 3
"""Place of the wait status in /proc/PID/stat, behind the name."""
PATIENCE_S = 1.0
"""For the thread of a worker that is dead."""

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


_held: list[_Page] = []
"""In a worker: the page, which has to stay where the kernel looks for it."""


def hold(fd: int) -> None:
    """For the worker's main thread: take the mutex, for ever."""
    page = _Page(fd)
    _held.append(page)
    os.close(fd)
    _check(_libc.pthread_mutex_lock(page.at(MUTEX)))
    _libc.sem_post(page.at(HELD))


class Lifeline:
    """The parent's side. Raises OSError where there is no memory."""

    def __init__(self) -> None:
        self.fd = create_memory(SIZE)
        try:
            self._page = _Page(self.fd)
        except OSError:
            os.close(self.fd)
            raise
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, ROBUST))
        _check(_libc.pthread_mutex_init(self._page.at(MUTEX), attributes))
        _check(_libc.sem_init(self._page.at(HELD), SHARED, 0))
        self._thread: threading.Thread | None = None

    def watch(self, token: TrioToken, released: Callable[[], object]) -> None:
        """Have ``released`` called in trio's thread when the worker begins to die, or at ``close``.

        Not where the machine gives no thread (see rule 4).
        """

        def wait() -> None:
            while _libc.sem_wait(self._page.at(HELD)):
                pass  # a signal came
            _libc.pthread_mutex_lock(self._page.at(MUTEX))
            token.run_sync_soon(released)

        thread = threading.Thread(target=wait, name="lifeline", daemon=True)
        with suppress(RuntimeError):  # can't start new thread
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Once the worker is dead, or never was."""
        if self._thread is not None:
            _libc.sem_post(self._page.at(HELD))  # it may have died before it held anything
            self._thread.join(PATIENCE_S)
        if self._thread is None or not self._thread.is_alive():
            self._page.close()
        os.close(self.fd)


def exit_of_dying(pid: int) -> int | None:
    """Exit code, or minus the signal, of a child that is ending; None where its end cannot be told from 0 yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    status = int(stat.rpartition(b")")[2].split()[EXIT_CODE])
    return os.waitstatus_to_exitcode(status) if status else None


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
