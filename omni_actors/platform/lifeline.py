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
5. Whoever wakes to see a death goes before the one who dies. The kernel lets a running process be until its time slice
   is over, for up to a tick of 4 ms, unless who wakes has a shorter one: so workers ask for a longer one.
6. The thread wakes trio's in a call in which it then sleeps. Did it return, both would want the interpreter, and who
   goes back to sleep for that has had its turn, as the kernel sees it, and waits until the dead is gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import threading
from contextlib import ExitStack, suppress

import trio

from ringbuf import create_memory  # allocated at once: a lack of memory is an OSError, never a SIGBUS

SHARED = ROBUST = 1
MUTEX, HELD, SIZE = 0, 128, 4096
"""Where in the shared page the mutex is, and the semaphore that says that it is held."""
EXIT_CODE = 52 - 3
"""Place of the wait status in /proc/PID/stat, behind the name."""
JOIN_TIMEOUT_S = 1.0
"""For the thread of a worker that is dead."""
SCHED_SETATTR, SCHED_GETATTR = 314, 315
"""System calls' numbers on x86-64."""

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


def acquire_death_mutex(fd: int) -> None:
    """For the worker's main thread, before it has others: take the mutex, for ever."""
    page = _Page(fd)
    _held.append(page)
    os.close(fd)
    _let_others_go_first()
    _check(_libc.pthread_mutex_lock(page.at(MUTEX)))
    _libc.sem_post(page.at(HELD))


class _Scheduling(ctypes.Structure):
    """Linux's ``struct sched_attr``."""

    _fields_ = (
        *(("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64)),
        *(("nice", ctypes.c_int32), ("priority", ctypes.c_uint32)),
        *(("slice_ns", ctypes.c_uint64), ("deadline", ctypes.c_uint64), ("period", ctypes.c_uint64)),
    )


def _let_others_go_first() -> None:
    """For this thread and those that it will start: a time slice that is twice as long (see rule 5).

    Linux has them since 6.12; before, and for who is scheduled otherwise, nothing changes.
    """
    mine = _Scheduling()
    _libc.syscall(SCHED_GETATTR, 0, ctypes.byref(mine), ctypes.sizeof(mine), 0)
    mine.slice_ns *= 2
    _libc.syscall(SCHED_SETATTR, 0, ctypes.byref(mine), 0)


class Lifeline:
    """The parent's side. Raises OSError (no memory, no descriptors)."""

    def __init__(self) -> None:
        with ExitStack() as undo:
            self._heard, self._said = os.pipe()
            undo.callback(os.close, self._heard)
            undo.callback(os.close, self._said)
            self.fd = create_memory(SIZE)
            undo.callback(os.close, self.fd)
            self._page = _Page(self.fd)
            undo.pop_all()
        self._room = fcntl.fcntl(self._said, fcntl.F_SETPIPE_SZ, SIZE)
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, ROBUST))
        _check(_libc.pthread_mutex_init(self._page.at(MUTEX), attributes))
        _check(_libc.sem_init(self._page.at(HELD), SHARED, 0))
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """From now on ``wait_released`` will return. Not where the machine gives no thread (see rule 4)."""

        def wait() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # SIGPIPE too
            _libc.sem_wait(self._page.at(HELD))
            _libc.pthread_mutex_lock(self._page.at(MUTEX))
            with suppress(BrokenPipeError):
                os.write(self._said, bytes(self._room + 1))

        thread = threading.Thread(target=wait, name="lifeline", daemon=True)
        with suppress(RuntimeError):  # can't start new thread
            thread.start()
            self._thread = thread

    async def wait_released(self) -> None:
        """Until the worker begins to die."""
        await trio.lowlevel.wait_readable(self._heard)

    def close(self) -> None:
        """Once the worker is dead, or never was, and nobody waits."""
        os.close(self._heard)
        if self._thread is not None:
            _libc.sem_post(self._page.at(HELD))  # it may have died before it held anything
            self._thread.join(JOIN_TIMEOUT_S)
        if self._thread is None or not self._thread.is_alive():
            os.close(self._said)
            self._page.close()
        os.close(self.fd)


def exit_of_dying(pid: int) -> int | None:
    """Exit code, or minus the signal, of a child that is ending; None where its end cannot be told from 0 yet."""
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
