"""The priority of a worker's threads while it loads behind another worker of its stage.

Rules
1. Loading takes seconds of CPU time. Where workers share the cores, a worker that replaces a standby, or is a further
   replica, would take them from the requests that are being served. So it loads with ``LOADING_NICE``.
2. On Linux each thread has a priority of its own, and gives it to the threads and processes that it starts. Engines
   keep some from loading, so these get their earlier priority back at the end.
3. A worker that began to load behind another one keeps the low priority until it is ready, also if the other dies.
4. That needs the right to raise a priority (``RLIMIT_NICE``, or CAP_SYS_NICE). Without it, nothing is lowered.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

LOADING_NICE: Final = 10
"""A tenth of the share of a thread with 0: so loading goes on where all cores are in use."""


@contextmanager
def lowered() -> Iterator[None]:
    """Lower the priority of this thread, and of those that it starts, for the block."""
    nice = _nice_of(threading.get_native_id())
    if nice >= LOADING_NICE or not may_raise_to(nice):
        yield
        return
    _set_nice_of(threading.get_native_id(), LOADING_NICE)
    try:
        yield
    finally:
        while found := [thread for thread in _threads(os.getpid()) if _is_lowered(thread)]:
            for thread in found:  # those that they have started meanwhile are found the next time
                with suppress(ProcessLookupError):  # it has ended
                    _set_nice_of(thread, nice)


def may_raise_to(nice: int) -> bool:
    """Return whether a thread with ``LOADING_NICE`` may have ``nice`` again: one that ends here tries."""
    allowed = list[bool]()

    def attempt() -> None:
        _set_nice_of(threading.get_native_id(), LOADING_NICE)
        try:
            _set_nice_of(threading.get_native_id(), nice)
        except PermissionError:
            return
        allowed.append(True)

    trial = threading.Thread(target=attempt)
    trial.start()
    trial.join()
    return bool(allowed)


def _threads(pid: int) -> Iterator[int]:
    """Yield the threads of a process and of its descendants, also some that end meanwhile."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has ended
        return
    for thread in threads:
        yield int(thread)
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
        except OSError:  # the thread has ended
            continue
        for child in children.split():
            yield from _threads(int(child))


def _is_lowered(thread: int) -> bool:
    try:
        return _nice_of(thread) == LOADING_NICE
    except ProcessLookupError:  # it has ended
        return False


def _nice_of(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def _set_nice_of(thread: int, nice: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, nice)
