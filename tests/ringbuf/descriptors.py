"""File descriptors of this process, and of the rings under test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import TypeAlias

from ringbuf import Ring

Peer: TypeAlias = Callable[..., "subprocess.Popen[str]"]
"""peer(script, *rings)"""


def descriptors() -> set[str]:
    """Return the descriptors of this process."""
    with os.scandir("/proc/self/fd") as entries:
        return {entry.name for entry in entries}


def duplicates(ring: Ring) -> list[int]:
    """Return duplicates of a ring's descriptors, for another mapping."""
    return [os.dup(fd) for fd in ring.fds]
