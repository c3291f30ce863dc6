"""The death_mutex: when it shows a death, and what it leaves behind."""

from __future__ import annotations

import array
import fcntl
import os
import select
import subprocess
import sys
import termios
import threading

import pytest
import trio

from omni_actors.platform.death_mutex import SIZE, DeathMutex
from tests.support.open_descriptors import open_descriptors

WATCHDOG_S = 60.0
WORKER = """
import ctypes, sys, threading
from omni_actors.platform import death_mutex

death_mutex.acquire_death_mutex(int(sys.argv[1]))
threading.Thread(target=sys.stdin.read).start()
print("held", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit: of the main thread alone
"""


def unread(fd: int) -> int:
    """How many bytes can be read."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


async def test_a_death_is_shown_while_the_process_still_exists_and_the_waiting_thread_stays_blocked() -> None:
    """The teardown may take seconds, in which the thread must not want the interpreter's lock."""
    line = DeathMutex()
    line.watch()
    with subprocess.Popen(  # noqa: ASYNC220 - it execs
        [sys.executable, "-c", WORKER, str(line.fd)], pass_fds=[line.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        pidfd = os.pidfd_open(worker.pid)
        with trio.fail_after(WATCHDOG_S):
            await trio.lowlevel.wait_readable(line.released_fd)
            assert not select.select([pidfd], [], [], 0)[0]
            while unread(line.released_fd) < SIZE // 2:  # noqa: ASYNC110 - the buffer is full soon
                await trio.sleep(0.001)
            assert line._thread is not None
            assert line._thread.is_alive()
            worker.stdin.close()
            await trio.lowlevel.wait_readable(pidfd)
        os.close(pidfd)
    thread = line._thread
    held = os.dup(line.released_fd)  # as a child has it that this process forked
    line.close()
    assert not thread.is_alive()
    os.close(held)


@pytest.mark.parametrize("watched", [True, False])
def test_a_death_mutex_that_was_never_held_leaves_nothing(watched: bool) -> None:
    before, threads = open_descriptors(), threading.enumerate()
    line = DeathMutex()
    if watched:
        line.watch()
    line.close()
    assert open_descriptors() == before
    assert set(threading.enumerate()) <= set(threads), "a thread of an earlier test may have ended"
