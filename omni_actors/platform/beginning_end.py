"""Whether another process has begun to end: from then on, its memory, a device's included, may be gone at any moment.

The kernel marks a task as exiting before it closes the task's files and unmaps its memory. A CUDA device's memory is
freed with these. A process counts as ended some time later: a pidfd, or a zombie, shows that too late.
"""

from __future__ import annotations

FLAGS, START = 6, 19
"""Fields of /proc/PID/stat behind the name (proc(5), ``flags`` and ``starttime``)."""
PF_EXITING = 0x4


def start_of(pid: int) -> int | None:
    """Return the start time of a process, in ticks; None if it has begun to end, or there is none with this pid."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return start_in(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


def start_in(stat: bytes) -> int | None:
    """Return the start time in the text of a process's ``stat`` file; None if it has begun to end."""
    fields = stat.rpartition(b")")[2].split()
    has_begun = fields[0] in (b"Z", b"X") or int(fields[FLAGS]) & PF_EXITING
    return None if has_begun else int(fields[START])
