"""A process has begun to end before its memory goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from omni_actors.platform.beginning_end import start_in, start_of

RSS = 21
"""The field of /proc/PID/stat behind the name: pages in memory."""
HOLDER = "memory = bytearray(64 << 20); print('ready', flush=True); input()"


def stat(state: str, flags: int) -> bytes:
    """A ``stat`` file of a process that is named to mislead."""
    fields = [state, *["0"] * 5, str(flags), *["0"] * 12, "777", *["0"] * 20]
    return f"12 (a) R (b) {' '.join(fields)}".encode()


@pytest.mark.parametrize(
    ("state", "flags", "expected"),
    [("R", 0x400000, 777), ("S", 0, 777), ("R", 0x400004, None), ("D", 0x4, None), ("Z", 0, None), ("X", 0, None)],
)
def test_the_marks_of_a_process(state: str, flags: int, expected: int | None) -> None:
    assert start_in(stat(state, flags)) == expected


def test_a_living_process_has_its_start_and_none_has_none() -> None:
    own = start_of(os.getpid())
    assert own is not None
    assert own == int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    unused = next(pid for pid in range(2**22 - 1, 0, -1) if not psutil.pid_exists(pid))
    assert start_of(unused) is None


def test_whenever_memory_of_a_killed_process_is_gone_it_has_begun_to_end() -> None:
    """Looked at again and again until it is a zombie: no look finds less memory and a process that goes on."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        looks = [Path(f"/proc/{child.pid}/stat").read_bytes()]
        assert start_of(child.pid) is not None
        child.kill()
        while b") Z " not in looks[-1]:
            looks.append(Path(f"/proc/{child.pid}/stat").read_bytes())
        pages = [int(each.rpartition(b")")[2].split()[RSS]) for each in looks]
        assert pages[-1] < pages[0] // 2
        assert all(start_in(look) is None for look, left in zip(looks, pages, strict=True) if left < pages[0] // 2)
        assert start_of(child.pid) is None
