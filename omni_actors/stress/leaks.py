"""What a run must not leave behind: processes, descriptors, threads, segments, temporary files.

Rules
1. Everything started from here inherits ``MARKER`` in its environment, so an orphan can be recognised.
2. A run has a directory for temporary files of its own (``TMPDIR``); what is in it afterwards was left.
3. A snapshot holds identities, not counts: one thing that comes and another that goes do not cancel out.
"""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARKER = "OMNI_ACTORS_STRESS"


@dataclass(frozen=True)
class Snapshot:
    """Of this process and of what it started."""

    processes: frozenset[int]
    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[str]
    segments: frozenset[str]
    """This user's names in /dev/shm, and mappings of ring memory here."""
    files: frozenset[str]


def snapshot(mark: str, directory: Path) -> Snapshot:
    gc.collect()  # what was dropped in a cycle is not left, only not collected
    named = {entry.name for entry in os.scandir("/dev/shm") if entry.stat(follow_symlinks=False).st_uid == os.getuid()}
    return Snapshot(
        marked_processes(mark) | children(),
        descriptors("self"),
        frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
        frozenset(named | ring_mappings("self")),
        frozenset(str(path.relative_to(directory)) for path in directory.rglob("*")),
    )


def left(before: Snapshot, after: Snapshot) -> list[str]:
    """Each thing that is there now and was not, in words."""
    return [
        *(f"process {pid}: {command_line(pid)}" for pid in sorted(after.processes - before.processes)),
        *(f"descriptor {fd} -> {target}" for fd, target in sorted(after.descriptors - before.descriptors)),
        *(f"thread {name}" for name in sorted(after.threads - before.threads)),
        *(f"segment {name}" for name in sorted(after.segments - before.segments)),
        *(f"file {name}" for name in sorted(after.files - before.files)),
    ]


def marked_processes(mark: str) -> frozenset[int]:
    """Those started under ``mark``, by whomever, other than this one."""
    wanted = f"{MARKER}={mark}".encode()

    def is_marked(pid: int) -> bool:
        with suppress(OSError):  # another user's, or gone since it was listed
            return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    return frozenset(pid for pid in _processes() if is_marked(pid))


def children() -> frozenset[int]:
    """Of this process. Zombies too, which have no environment: who has ended and was not reaped is left."""

    def is_child(pid: int) -> bool:
        with suppress(OSError):
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
        return False

    return frozenset(pid for pid in _processes() if is_child(pid))


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def descriptors(pid: int | str) -> frozenset[tuple[int, str]]:
    """Numbers, and what they are. An inode's number is part of it: a number used again is another descriptor."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # the one that lists
            found.add((int(name), os.readlink(f"/proc/{pid}/fd/{name}")))
    return frozenset(each for each in found if not each[1].startswith("/proc/"))


def ring_mappings(pid: int | str) -> set[str]:
    """Where ring memory is mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if "memfd:ringbuf" in line}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError as error:
        return str(error)
