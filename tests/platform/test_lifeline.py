"""The first word of a death: when it comes, what it leaves, and who goes first when it does."""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import threading

import pytest
import trio

from omni_actors.platform.lifeline import SCHED_GETATTR, SIZE, Lifeline

WATCHDOG_S = 60.0
WORKER = """
import ctypes, sys, threading
from omni_actors.platform import lifeline

lifeline.acquire_death_mutex(int(sys.argv[1]))
threading.Thread(target=sys.stdin.read).start()
print("held", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit: of the main thread alone
"""


def slice_ns(thread: int) -> int:
    """The time slice of a thread; 0 where the kernel has none to give."""
    attributes = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR, thread, attributes, len(attributes), 0) == 0
    return int(struct.unpack_from("Q", attributes, 24)[0])


def unread(fd: int) -> int:
    """Bytes that lie in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


async def test_the_word_comes_while_the_process_still_lives_and_who_brought_it_sleeps() -> None:
    """What is left of it may take seconds. The thread must not come back for the interpreter meanwhile."""
    line = Lifeline()
    line.watch()
    with subprocess.Popen(  # noqa: ASYNC220 - it execs
        [sys.executable, "-c", WORKER, str(line.fd)], pass_fds=[line.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        pidfd = os.pidfd_open(worker.pid)
        with trio.fail_after(WATCHDOG_S):
            await line.wait_released()
            assert not select.select([pidfd], [], [], 0)[0]
            while unread(line._heard) < SIZE:  # noqa: ASYNC110 - it is full before long
                await trio.sleep(0.001)
            assert line._thread is not None
            assert line._thread.is_alive()
            worker.stdin.close()
            await trio.lowlevel.wait_readable(pidfd)
        os.close(pidfd)
    thread = line._thread
    line.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("watched", [True, False])
def test_one_that_nobody_ever_held_leaves_nothing(watched: bool) -> None:
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    line = Lifeline()
    if watched:
        line.watch()
    line.close()
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_who_sees_a_death_preempts_who_dies() -> None:
    """Linux from 6.12 on lets a thread with a shorter time slice go first; earlier ones know none."""
    line = Lifeline()
    with subprocess.Popen(
        [sys.executable, "-c", WORKER.rpartition("ctypes.CDLL")[0], str(line.fd)],
        pass_fds=[line.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"held\n"
        threads = [int(name) for name in os.listdir(f"/proc/{worker.pid}/task")]
        assert len(threads) == 2
        assert {slice_ns(thread) for thread in threads} == {2 * slice_ns(0)}
        worker.stdin.close()
    line.close()
