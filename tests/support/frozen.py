"""Processes that are stopped for a while."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def freeze(pid: int) -> None:
    """Stop a process, and return when all its threads have stopped: until then, they go on."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()} != {"T"}:
        time.sleep(0.001)
