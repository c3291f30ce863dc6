"""Files that are named with their size in bytes and the time of their last change in nanoseconds."""

from __future__ import annotations

import os
from pathlib import Path

from omni_actors.stages.base import InvalidRequest


def require_named(path: Path, status: os.stat_result, expected: tuple[int, int]) -> None:
    """Raise InvalidRequest if a file is not the one that was named. expected: its size and time."""
    found, named = (status.st_size, status.st_mtime_ns), tuple(expected)
    if found != named:
        message = (
            f"{path} has changed since it was named, or is another copy: it has the size and the time (ns) {found}, "
            f"named were {named}; on each node it must be one shared file, or a copy that keeps the time of the last "
            "change (cp -p, rsync -t)"
        )
        raise InvalidRequest(message, param="path")
