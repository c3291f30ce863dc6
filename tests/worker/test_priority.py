"""The priority of threads while a worker loads: all get theirs back, whatever starts and ends meanwhile."""

from __future__ import annotations

import os
import threading

import pytest

from omni_actors.worker import priority

WATCHDOG_S = 30.0
ENDED = "99999999"
"""No thread has this number: it is larger than Linux gives."""


def nice_of(thread: threading.Thread) -> int:
    assert thread.native_id is not None
    return os.getpriority(os.PRIO_PROCESS, thread.native_id)


def test_a_thread_that_ends_meanwhile_hides_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [ENDED, *listed(path)])
    assert threading.get_native_id() in priority._threads(os.getpid())


def test_a_thread_that_starts_meanwhile_gets_its_priority_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread with the low priority starts another one, when the threads have been listed once."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    listed, started, end = threading.Event(), threading.Event(), threading.Event()
    later = threading.Thread(target=end.wait)

    def start_another() -> None:
        listed.wait(WATCHDOG_S)
        later.start()
        started.set()
        end.wait(WATCHDOG_S)

    list_directory = os.listdir

    def list_threads(path: str) -> list[str]:
        found = list_directory(path)
        listed.set()
        assert started.wait(WATCHDOG_S)
        return found

    with priority.lowered():
        earlier = threading.Thread(target=start_another)
        earlier.start()
        monkeypatch.setattr(os, "listdir", list_threads)
    try:
        listed.set()  # without the right to raise a priority, nothing is lowered
        assert started.wait(WATCHDOG_S)
        assert [nice_of(thread) for thread in (threading.current_thread(), earlier, later)] == [nice] * 3
    finally:
        end.set()
        earlier.join()
        later.join()
