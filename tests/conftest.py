"""What every test runs under.

Rules
1. A test leaves no process and no /dev/shm entry behind; one that does fails, by name, whatever it asserted.
   What was there before it (a worker of a wider fixture) is not its doing.
2. Orphans count: every process started from here inherits ``MARK`` in its environment, so one that outlived its parent
   is still known as ours. A fork that execs nothing has no environment of its own; as a child it is found all the same.
3. In CI, Hypothesis draws the same examples each time: a red run can be run again.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

MARK = "OMNI_ACTORS_TEST_RUN"
GRACE_S = 5.0
"""A killed process is still seen until its parent, or the kernel's own reaper, has collected it."""

os.environ[MARK] = uuid.uuid4().hex

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def our_processes() -> set[psutil.Process]:
    """Descendants of this process, and orphans of former ones."""
    found = set(psutil.Process().children(recursive=True))
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            if pid != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(psutil.Process(pid))
        except (OSError, psutil.NoSuchProcess):
            continue  # another user's, or gone between the listing and the look
    return {process for process in found if not _is_resource_tracker(process)}


def _is_resource_tracker(process: psutil.Process) -> bool:
    """multiprocessing keeps one such process until the interpreter ends, by design."""
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def shm_entries() -> set[str]:
    """Rings with a name. One has it for an instant, while it is created."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("ringbuf-")}


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Rule 1. Processes that remain are killed, so that the next test starts clean."""
    processes_before, shm_before = our_processes(), shm_entries()
    yield
    processes = our_processes() - processes_before
    # A child is for its test to reap: one that is still here, if only as a zombie, was not. Others may take a moment.
    children = processes & set(psutil.Process().children())
    _, orphans = psutil.wait_procs(processes - children, timeout=GRACE_S)
    left = [*children, *orphans]
    facts = [_describe(process) for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=GRACE_S)
    assert not left, f"processes left behind: {facts}"
    shm = shm_entries() - shm_before
    assert not shm, f"/dev/shm entries left behind: {sorted(shm)}"


def _describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.Error as error:
        return str(error)
