"""A timer of the kernel that kills this process with SIGKILL (timer_create(2)).

Rules
1. The kernel sends the signal. So it also ends a process that hangs, that is stopped (SIGSTOP), or whose machine was
   suspended meanwhile: the clock is CLOCK_BOOTTIME.
2. With the process, its children end that asked for it (PR_SET_PDEATHSIG): the workers of an agent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

TIMER_CREATE, TIMER_SETTIME, TIMER_DELETE = 222, 223, 226
"""Numbers of the system calls on x86-64."""
TIMER_ABSTIME = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Event(ctypes.Structure):
    """Linux's ``struct sigevent``; the kind 0 is SIGEV_SIGNAL."""

    _fields_ = (
        *(("value", ctypes.c_uint64), ("signal", ctypes.c_int), ("kind", ctypes.c_int)),
        ("rest", ctypes.c_byte * 48),
    )


class _Setting(ctypes.Structure):
    """Linux's ``struct itimerspec``."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("every_s", "every_ns", "at_s", "at_ns"))


def now() -> float:
    """Return the timer's clock, in seconds. It goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class KillTimer:
    """Kills this process at a time that can be put off. Raises OSError (the kernel has no such timer)."""

    def __init__(self) -> None:
        self._id = ctypes.c_int()
        event = _Event(signal=signal.SIGKILL)
        _check(_libc.syscall(TIMER_CREATE, time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._id)))

    def kill_at(self, when: float) -> None:
        """Let the kernel kill this process at ``when``, by ``now``, in place of an earlier setting."""
        seconds, rest = divmod(max(when, 1e-9), 1.0)
        setting = _Setting(at_s=int(seconds), at_ns=max(1, int(rest * 1e9)))
        _check(_libc.syscall(TIMER_SETTIME, self._id, TIMER_ABSTIME, ctypes.byref(setting), None))

    def close(self) -> None:
        """Cancel it."""
        _check(_libc.syscall(TIMER_DELETE, self._id))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
