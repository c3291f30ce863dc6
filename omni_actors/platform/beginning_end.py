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
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    begun = fields[0] in (b"Z", b"X") or int(fields[FLAGS]) & PF_EXITING
    return None if begun else int(fields[START])
