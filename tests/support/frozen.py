"""Processes that are stopped for a while, and calls that only those let time out."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from omni_actors.protocol.messages import Address
from omni_actors.supervisor.calls import PendingCall, Reply


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


def let_time_out_at(frozen: Collection[Address], patch: pytest.MonkeyPatch) -> None:
    """Let calls time out at these replicas alone, which may change later: the others have all the time they need."""
    wait = PendingCall.wait

    async def wait_patiently(call: PendingCall) -> Reply:
        if call.address not in frozen:
            call.deadline = math.inf
        return await wait(call)

    patch.setattr(PendingCall, "wait", wait_patiently)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
