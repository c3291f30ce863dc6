"""What a run must not leave behind: processes, descriptors, threads, segments, temporary files.

Rules
1. Every process that a run starts inherits ``MARKER`` in its environment, so an orphan can be recognised.
2. A run has its own directory for temporary files (``TMPDIR``). Files in it at the end were left behind.
3. A snapshot holds identities, not counts, so a new thing and a vanished thing do not cancel out.
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
    """What this process and its children hold."""

    processes: frozenset[int]
    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[str]
    segments: frozenset[str]
    """This user's names in /dev/shm, and mappings of ring memory here."""
    files: frozenset[str]


def snapshot(mark: str, directory: Path) -> Snapshot:
    gc.collect()  # a cycle that was not collected yet is no leak
    named = {entry.name for entry in os.scandir("/dev/shm") if entry.stat(follow_symlinks=False).st_uid == os.getuid()}
    return Snapshot(
        processes=marked_processes(mark) | children(),
        descriptors=descriptors("self"),
        threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
        segments=frozenset(named | ring_mappings("self")),
        files=frozenset(str(path.relative_to(directory)) for path in directory.rglob("*")),
    )


def left(before: Snapshot, after: Snapshot) -> list[str]:
    """Describe each thing that is in ``after`` and not in ``before``."""
    return [
        *(f"process {pid}: {command_line(pid)}" for pid in sorted(after.processes - before.processes)),
        *(f"descriptor {fd} -> {target}" for fd, target in sorted(after.descriptors - before.descriptors)),
        *(f"thread {name}" for name in sorted(after.threads - before.threads)),
        *(f"segment {name}" for name in sorted(after.segments - before.segments)),
        *(f"file {name}" for name in sorted(after.files - before.files)),
    ]


def marked_processes(mark: str) -> frozenset[int]:
    """The pids of the processes whose marker is ``mark``, without this process."""
    wanted = f"{MARKER}={mark}".encode()

    def is_marked(pid: int) -> bool:
        with suppress(OSError):  # another user's, or gone
            return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    return frozenset(pid for pid in _processes() if is_marked(pid))


def children() -> frozenset[int]:
    """The pids of this process's children. Zombies count: an unreaped child is a leak."""

    def is_child(pid: int) -> bool:
        with suppress(OSError):
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
        return False

    return frozenset(pid for pid in _processes() if is_child(pid))


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


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
