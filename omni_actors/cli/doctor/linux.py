"""The checks of a Linux machine: processor, memory, limits, kernel features."""

from __future__ import annotations

import mmap
import os
import resource
import select
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from rich import filesize

from omni_actors.cli.doctor.findings import Finding, error, ok, warning
from ringbuf.syscalls import memfd_create, pidfd_open, pidfd_send_signal, seal_size

LITTLE_MEMORY = 4 * 2**30
"""Bytes below which the pipeline ``voice`` leaves little room: it takes about 2 GB."""
LITTLE_SHM = 64 * 2**20
FEW_FILES = 4096
"""Open files below which a server of the default settings accepts fewer connections than configured."""
CGROUP = Path("/sys/fs/cgroup")


def check() -> Iterator[Finding]:
    """Yield what the machine has, and whether its kernel has what the runtime uses."""
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield _open_files()
    yield _locked_memory()
    for name, use, attempt in FEATURES:
        yield _feature(name, use, attempt)


def _cores() -> Finding:
    cores, quota = len(os.sched_getaffinity(0)), _cpu_quota()
    found = f"{cores}" + (f", limited to {quota:g} by the control group" if quota is not None else "")
    if min(cores, quota or cores) < 2:
        return warning("machine", "cores", found, "give the process two cores: stages compute in parallel")
    return ok("machine", "cores", found)


def _cpu_quota() -> float | None:
    """Return the cores' worth of time that the control group allows; None if it sets no limit."""
    text = _read(CGROUP / "cpu.max").split()
    return int(text[0]) / int(text[1]) if len(text) == 2 and text[0] != "max" else None


def _memory() -> Finding:
    sizes = {line.partition(":")[0]: line.split()[1] for line in _read(Path("/proc/meminfo")).splitlines()}
    total, free = int(sizes["MemTotal"]) * 1024, int(sizes["MemAvailable"]) * 1024
    limit = _read(CGROUP / "memory.max").strip()
    found = f"{filesize.decimal(free)} available of {filesize.decimal(total)}"
    if limit.isdecimal():
        free = min(free, int(limit))
        found += f", limited to {filesize.decimal(int(limit))} by the control group"
    if free < LITTLE_MEMORY:
        remedy = "close other programs; `omni-actors config explain NAME` shows what a pipeline needs"
        return warning("machine", "memory", found, remedy)
    return ok("machine", "memory", found)


def _shared_memory() -> Finding:
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):
        remedy = "mount a tmpfs on /dev/shm, which named rings need; other rings do not"
        return warning("machine", "/dev/shm", "not there, or not writable", remedy)
    usage = shutil.disk_usage(place)
    found = f"{filesize.decimal(usage.free)} free of {filesize.decimal(usage.total)}"
    if usage.free < LITTLE_SHM:
        remedy = "give the container more (--shm-size=1g): named rings, and libraries such as torch, use it"
        return warning("machine", "/dev/shm", found, remedy)
    return ok("machine", "/dev/shm", found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = _limit(soft) if soft == hard else f"{_limit(soft)}, which a server raises to {_limit(hard)}"
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        remedy = f"raise the hard limit (ulimit -Hn {FEW_FILES}, LimitNOFILE=): a server accepts fewer connections"
        return warning("machine", "open files", found, remedy)
    return ok("machine", "open files", found)


def _locked_memory() -> Finding:
    """Report the limit of locked memory. Only drivers of devices may count page-locked rings against it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_device = Path("/dev/nvidiactl").exists()
    found = filesize.decimal(soft) if soft != resource.RLIM_INFINITY else "no limit"
    if has_device and soft != resource.RLIM_INFINITY and soft < LITTLE_SHM:
        remedy = "if workers log that page-locking fails: ulimit -l unlimited, or `pin_rings: false`"
        return warning("machine", "locked memory", found, remedy)
    return ok("machine", "locked memory", found)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def _feature(name: str, use: str, attempt: Callable[[], None]) -> Finding:
    try:
        attempt()
    except (OSError, AttributeError) as failure:
        remedy = f"use Linux 5.4 or newer, and let the container's seccomp profile allow {name}: {use}"
        return error("kernel", name, str(failure), remedy)
    return ok("kernel", name, use)


def _try_pidfd() -> None:
    pidfd = pidfd_open(os.getpid())
    try:
        pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)


def _try_eventfd() -> None:
    descriptor = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(0):
            raise OSError("an eventfd that was rung is not readable")
    finally:
        os.close(descriptor)


def _try_memfd() -> None:
    descriptor = memfd_create("omni_actors_doctor")
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        seal_size(descriptor)
        mmap.mmap(descriptor, mmap.PAGESIZE).close()
    finally:
        os.close(descriptor)


def _try_seqpacket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [b"."], [ours.fileno()])
        _, [received], _, _ = socket.recv_fds(theirs, 1, 1)
        os.close(received)


FEATURES: tuple[tuple[str, str, Callable[[], None]], ...] = (
    ("pidfd", "the supervisor waits for the death of a worker with it", _try_pidfd),
    ("eventfd", "rings wake their ends with it", _try_eventfd),
    ("memfd", "rings are made of it, sealed in size", _try_memfd),
    ("unix sockets", "workers get their rings' descriptors over one", _try_seqpacket),
)
"""(name, what it is for, a function that tries it)."""


def _read(path: Path) -> str:
    """Return the text of a kernel's file; "" if the kernel does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
