"""The kernel's timer kills its process, whatever state that is in."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from omni_actors.platform.kill_timer import KillTimer, now
timer = KillTimer()
timer.kill_at(now() + 3600)
timer.kill_at(now() + 0.3)
if sys.argv[1] == "cancelled":
    timer.close()
print("armed", flush=True)
if sys.argv[1] == "late":
    timer.kill_at(now() - 10)
if sys.argv[1] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
elif sys.argv[1] == "blocked":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        pass
elif sys.argv[1] in ("asleep", "late"):
    signal.pause()
else:
    sys.stdin.read()
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
    with start("cancelled") as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.6)  # twice the time after which it would have been killed
        process.communicate("")
    assert process.returncode == 0
