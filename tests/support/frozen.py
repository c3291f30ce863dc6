"""Processes that are stopped for a while."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def freeze(pid: int) -> None:
    """Stop a process, and return when all its threads have stopped: until then, they go on.

    Raises ProcessLookupError, FileNotFoundError: it has ended.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while (states := {_state(task) for task in tasks.iterdir()}) != {"T"}:
        if "Z" in states:
            raise ProcessLookupError(f"process {pid} has ended")
        time.sleep(0.001)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
