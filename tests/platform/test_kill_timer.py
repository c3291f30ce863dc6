"""The kernel's timer kills its process, whatever state that is in."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from omni_actors.platform.kill_timer import KillTimer, now
timer = KillTimer()
timer.kill_at(now() + 3600)
print("armed", flush=True)
if sys.argv[1] == "cancelled":
    timer.kill_at(now() + 5)  # later than a busy machine lets this process go on
    timer.close()
    time.sleep(5.2)
    print("alive", flush=True)
elif sys.argv[1] == "late":
    timer.kill_at(now() - 10)
    signal.pause()
elif sys.argv[1] == "blocked":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    timer.kill_at(now() + 0.3)
    while True:
        pass
else:
    timer.kill_at(now() + 0.3)
    os.kill(os.getpid(), signal.SIGSTOP) if sys.argv[1] == "stopped" else signal.pause()
"""


def start(state: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "armed\n"
    return process


@pytest.mark.parametrize("state", ["asleep", "stopped", "blocked", "late"])
def test_a_process_is_killed_when_its_time_has_come(state: str) -> None:
    with start(state) as process:
        assert process.wait(30) == -signal.SIGKILL


def test_a_cancelled_timer_kills_nothing() -> None:
    """The process lives on behind the time at which it would have been killed."""
    with start("cancelled") as process:
        assert process.communicate(timeout=30)[0] == "alive\n"
    assert process.returncode == 0
