"""What a run must not leave behind: processes, descriptors, threads, segments, temporary files.

Rules
1. Every process that a run starts inherits ``MARKER`` in its environment, so an orphan can be recognised.
2. A run has its own directory for temporary files (``TMPDIR``). Files in it at the end were left behind.
3. A snapshot contains identities, not counts, so a new thing and a vanished thing do not cancel out.
"""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path

MARKER = "OMNI_ACTORS_STRESS"
_IDLE = re.compile(r"Trio thread \d+$")
"""Threads without work, which trio ends after a while."""


def snapshot(mark: str, directory: Path) -> dict[str, set[str]]:
    """What this process and its children have open, by kind.

    Segments are this user's names in /dev/shm, and mappings of ring memory in this process.
    """
    gc.collect()  # a cycle that was not collected yet is no leak
    named = {entry.name for entry in os.scandir("/dev/shm") if entry.stat(follow_symlinks=False).st_uid == os.getuid()}
    return {
        "process": {str(pid) for pid in marked_processes(mark) | _children()},
        "descriptor": {f"{fd} -> {target}" for fd, target in descriptors("self")},
        "thread": {f"{each.name} ({each.ident})" for each in threading.enumerate() if not _IDLE.match(each.name)},
        "segment": named | ring_mappings("self"),
        "file": {str(path.relative_to(directory)) for path in directory.rglob("*")},
    }


def left(before: Mapping[str, Set[str]], after: Mapping[str, Set[str]]) -> list[str]:
    """Describe each thing that is in ``after`` and not in ``before``."""
    return [
        f"{kind} {each}" + (f": {command_line(int(each))}" if kind == "process" else "")
        for kind, things in after.items()
        for each in sorted(things - before[kind])
    ]


def marked_processes(mark: str) -> set[int]:
    """The pids of the processes whose marker is ``mark``, without this process."""
    wanted = f"{MARKER}={mark}".encode()
    return _processes(lambda entry: wanted in (entry / "environ").read_bytes().split(b"\0"))


def _children() -> set[int]:
    """The pids of this process's children. Zombies count: an unreaped child is a leak."""
    return _processes(lambda entry: int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid())


def _processes(is_wanted: Callable[[Path], bool]) -> set[int]:
    """The pids of other processes. is_wanted: takes the directory in /proc; OSError means no."""
    found = set()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with suppress(OSError):  # another user's, or gone
            if pid != os.getpid() and is_wanted(Path(f"/proc/{pid}")):
                found.add(pid)
    return found


def descriptors(pid: int | str) -> frozenset[tuple[int, str]]:
    """Descriptor numbers and their targets. The target has the inode's number, so a reused number is another entry."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # the descriptor of this listing
            found.add((int(name), os.readlink(f"/proc/{pid}/fd/{name}")))
    return frozenset(each for each in found if not each[1].startswith("/proc/"))


def ring_mappings(pid: int | str) -> set[str]:
    """The addresses at which ring memory is mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if "memfd:ringbuf" in line}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError as error:
        return str(error)
