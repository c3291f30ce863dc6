"""Descriptors that are not a ring's are refused before they are mapped, and a ring's memory cannot be truncated."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ringbuf import Ring, RingCorrupted, _descriptors
from ringbuf._descriptors import create_bell, create_memory, create_pipe_bell
from ringbuf._words import HEADER, PAGE
from ringbuf.syscalls import F_ADD_SEALS, FUTURE_WRITE, SEAL, SIZE_IS_SEALED, WRITE, memfd_create
from tests.ringbuf.descriptors import Peer, descriptors, duplicates

GENERATION = 7


@contextmanager
def closing(*fds: int) -> Iterator[tuple[int, ...]]:
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def memory(size: int, seals: int, *, allocate: bool = True) -> int:
    """A segment as ``create_memory`` makes it, with a valid header, except for the arguments."""
    fd = memfd_create("forged")
    with Ring.create(PAGE, generation=GENERATION) as ring:
        header = bytearray(bytes(ring._segment.words[:8]))
    header[16:24] = max(0, size - HEADER).to_bytes(8, "little")
    os.ftruncate(fd, size)
    os.pwrite(fd, header[:size], 0)
    if allocate and size:
        os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def read_only() -> int:
    with closing(memory(2 * PAGE, SIZE_IS_SEALED)) as (fd,):
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


def large_file(path: Path) -> int:
    path.write_bytes(bytes(HEADER + PAGE))
    return os.open(path, os.O_RDWR)


def pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


NO_MEMORY: dict[str, Callable[[Path], int]] = {
    "a pipe": lambda path: pipe(),
    "/dev/null": lambda path: os.open("/dev/null", os.O_RDWR),
    "/dev/zero": lambda path: os.open("/dev/zero", os.O_RDWR),
    "a directory": lambda path: os.open(path.parent, os.O_RDONLY),
    "a socket": lambda path: socket.socket().detach(),
    "a doorbell": lambda path: os.eventfd(0, os.EFD_NONBLOCK),
    "a file": large_file,
    "memory of no size": lambda path: memory(0, SIZE_IS_SEALED),
    "memory of the header alone": lambda path: memory(HEADER, SIZE_IS_SEALED),
    "memory of no whole page": lambda path: memory(HEADER + PAGE + 100, SIZE_IS_SEALED),
    "memory of no whole word": lambda path: memory(HEADER + PAGE + 1, SIZE_IS_SEALED),
    "memory that may be truncated": lambda path: memory(2 * PAGE, SEAL),
    "memory whose seals may change": lambda path: memory(2 * PAGE, SIZE_IS_SEALED & ~SEAL),
    "read-only memory": lambda path: memory(2 * PAGE, SIZE_IS_SEALED | WRITE),
    "memory that becomes read-only": lambda path: memory(2 * PAGE, SIZE_IS_SEALED | FUTURE_WRITE),
    "memory to be read only": lambda path: read_only(),
    "memory that is not there": lambda path: memory(1 << 26, SIZE_IS_SEALED, allocate=False),
}


@pytest.mark.parametrize("what", NO_MEMORY.values(), ids=NO_MEMORY.keys())
def test_what_is_no_memory_of_a_ring(what: Callable[[Path], int], tmp_path: Path, ring: Ring) -> None:
    before = descriptors()
    with pytest.raises(RingCorrupted) as caught:
        Ring.attach([what(tmp_path / "file"), *map(os.dup, ring.fds[1:])], generation=GENERATION)
    assert caught.value.offset == 0
    assert descriptors() == before


def test_memory_with_all_that_it_needs_is_taken() -> None:
    """Without this, the test above would prove nothing."""
    with Ring.create(PAGE) as ring:
        fds = [memory(2 * PAGE, SIZE_IS_SEALED), *map(os.dup, ring.fds[1:])]
        with Ring.attach(fds, generation=GENERATION) as forged:
            forged.claim_producer().send(b"through")
            assert bytes(forged.claim_consumer().recv(timeout=0).data) == b"through"


NO_BELL: dict[str, Callable[[Path], int]] = {
    "a pipe": lambda path: pipe(),
    "/dev/null": lambda path: os.open("/dev/null", os.O_RDWR),
    "a file": large_file,
    "memory": lambda path: create_memory(2 * PAGE),
    "a socket": lambda path: socket.socket().detach(),
}


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("what", NO_BELL.values(), ids=NO_BELL.keys())
def test_what_is_no_doorbell(what: Callable[[Path], int], which: int, tmp_path: Path, ring: Ring) -> None:
    before = descriptors()
    fds = duplicates(ring)
    os.close(fds[which])
    fds[which] = what(tmp_path / "file")
    os.set_blocking(fds[which], False)
    with pytest.raises(RingCorrupted, match="doorbell"):
        Ring.attach(fds, generation=0)
    assert descriptors() == before


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("make", [create_bell, create_pipe_bell])
def test_a_doorbell_that_blocks(make: Callable[[], int], which: int, ring: Ring) -> None:
    fds = duplicates(ring)
    os.close(fds[which])
    fds[which] = make()
    with Ring.attach(list(map(os.dup, fds)), generation=0):
        pass
    os.set_blocking(fds[which], True)
    with pytest.raises(RingCorrupted, match="doorbell"):
        Ring.attach(fds, generation=0)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_number_that_is_no_descriptor_is_an_error_of_the_system_and_the_others_are_closed(
    which: int, ring: Ring
) -> None:
    before = descriptors()
    fds = duplicates(ring)
    os.close(fds[which])
    fds[which] = 1 << 20
    with pytest.raises(OSError, match="Bad file descriptor"):
        Ring.attach(fds, generation=0)
    assert descriptors() == before


def test_no_process_can_change_the_size_of_the_memory_or_its_seals(ring: Ring) -> None:
    for change in (
        lambda: os.ftruncate(ring.fds[0], 0),
        lambda: os.ftruncate(ring.fds[0], 1 << 20),
        lambda: os.posix_fallocate(ring.fds[0], 0, 1 << 20),
        lambda: fcntl.fcntl(ring.fds[0], F_ADD_SEALS, FUTURE_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()


def test_too_large_a_ring_is_an_error_and_kills_no_process() -> None:
    before = descriptors()
    with pytest.raises(OSError, match="available") as caught:
        Ring.create(psutil.virtual_memory().total)
    assert caught.value.errno == errno.ENOMEM
    assert descriptors() == before


def test_a_ring_takes_what_its_control_group_and_those_around_it_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler of batch jobs limits the job's group, and runs each task in a group below."""

    def group(path: str, limit: str, used: int, idle: int) -> None:
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"file 1\ninactive_file {idle}\n")

    own = tmp_path / "own"
    own.write_text("4:memory:/other\n0::/job/task\n")
    monkeypatch.setattr(_descriptors, "_OWN_GROUP", str(own))
    monkeypatch.setattr(_descriptors, "_GROUPS", str(tmp_path))
    size = HEADER + 10 * PAGE
    group("job/task", "max", 0, 0)
    for path, idle in (("job", 0), ("job/task", 3 * PAGE)):
        for missing in (0, 1):
            group(path, str(1_000_000 + size - missing), 1_000_000 + idle, idle)
            if missing:
                with pytest.raises(OSError, match=f"a ring of {size} bytes, where {size - 1} are available"):
                    Ring.create(10 * PAGE)
            else:
                Ring.create(10 * PAGE).close()
        group(path, "max", 0, 0)
    own.write_text("4:memory:/other\n")
    Ring.create(10 * PAGE).close()
    own.unlink()
    Ring.create(10 * PAGE).close()


def test_pages_that_a_peer_takes_away_are_zeros(ring: Ring, peer: Peer) -> None:
    """The one change to the memory that no seal forbids. In a process of its own: it might have been a SIGBUS."""
    child = peer(
        """
import ctypes
producer, consumer = ring.claim_producer(), ring.claim_consumer()
producer.send(b"x" * 5000)
punched = ctypes.CDLL(None).fallocate(ring.fds[0], 3, ctypes.c_long(0), ctypes.c_long(4096 + ring.capacity))
print(punched, consumer.try_recv())
try:
    producer.send(b"more")
    consumer.recv(0)
except RingError as error:
    print(type(error).__name__)
""",
        ring,
    )
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out.split()) == (0, ["0", "None", "RingCorrupted"])
