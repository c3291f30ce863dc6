"""A snapshot keeps the last message, wherever its writer dies and whatever else is written into its memory."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringbuf import FrameBorrowed, FrameReleased, MessageTooLarge, Ring, RingCorrupted, Snapshot, create_memory
from ringbuf._snapshot import CURRENT, MAGIC, SLOT_HEADER, VERSION
from ringbuf._words import PAGE
from ringbuf.syscalls import memfd_create
from tests.ringbuf.descriptors import descriptors

CAPACITY = PAGE - SLOT_HEADER
"""One page per slot."""


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def message(number: int, size: int = 3000) -> memoryview:
    return memoryview(bytes([number % 251]) * size)


def read(snapshot: Snapshot) -> bytes | None:
    frame = snapshot.read()
    if frame is None:
        return None
    with frame:
        return bytes(frame.data)


def attached(fd: int) -> Snapshot:
    return Snapshot.attach(os.dup(fd))


@pytest.fixture
def pair() -> Iterator[tuple[Snapshot, int]]:
    snapshot, fd = Snapshot.create(CAPACITY)
    yield snapshot, fd
    snapshot.close()
    os.close(fd)


def test_the_last_message_is_read_in_another_mapping(pair: tuple[Snapshot, int]) -> None:
    snapshot, fd = pair
    assert snapshot.capacity == CAPACITY
    assert snapshot.nbytes == Snapshot.needed_bytes(CAPACITY) == 3 * PAGE
    other = attached(fd)
    assert read(other) is None
    for number in range(1, 6):
        snapshot.write(message(number, 10 * number), message(number + 1, 7))
        assert read(other) == bytes(message(number, 10 * number)) + bytes(message(number + 1, 7))
    other.close()


def test_a_successor_continues(pair: tuple[Snapshot, int]) -> None:
    snapshot, fd = pair
    snapshot.write(message(1))
    successor = attached(fd)
    frame = successor.read()
    assert frame is not None
    successor.write(message(2))  # not into the slot that is being read
    assert frame.data == message(1)
    frame.release()
    assert read(successor) == message(2)
    successor.close()


def test_a_message_that_is_too_large_leaves_the_one_before(pair: tuple[Snapshot, int]) -> None:
    snapshot, _ = pair
    snapshot.write(message(1))
    for _ in range(2):
        with pytest.raises(MessageTooLarge):
            snapshot.write(message(2, CAPACITY + 1))
        with pytest.raises(ValueError, match="structures"):
            snapshot.write(message(2), memoryview(np.zeros(3)))  # not bytes: it fails in the middle
        assert read(snapshot) == message(1)
    snapshot.write(message(3, CAPACITY))
    assert read(snapshot) == message(3, CAPACITY)


def test_a_view_that_is_alive_keeps_the_memory(pair: tuple[Snapshot, int]) -> None:
    snapshot, _ = pair
    snapshot.write(message(1))
    frame = snapshot.read()
    assert frame is not None
    array = np.frombuffer(frame.data, np.uint8)
    with pytest.raises(FrameBorrowed):
        frame.release()
    with pytest.raises(FrameBorrowed):
        snapshot.close()
    assert array[0] == 1
    del array
    frame.release()
    with pytest.raises(FrameReleased):
        frame.data  # noqa: B018


def attach_and_read(fd: int) -> bytes | None:
    snapshot = attached(fd)
    try:
        return read(snapshot)
    finally:
        snapshot.close()


class Killed(Exception):
    pass


class Stepping:
    """Memory whose owner dies just before its n-th access; of a copy, also in its middle."""

    def __init__(self, memory: memoryview, steps: Iterator[int], fatal: int) -> None:
        self._memory, self._steps, self._fatal = memory, steps, fatal

    def _step(self) -> None:
        if next(self._steps) == self._fatal:
            raise Killed

    def __getitem__(self, index: Any) -> Any:
        self._step()
        return self._memory[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._step()
        if isinstance(index, slice):
            half = len(value) // 2
            self._memory[index.start : index.start + half] = value[:half]
            self._step()
        self._memory[index] = value


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_death_at_every_access_leaves_a_whole_message(before: int) -> None:
    for fatal in itertools.count():
        snapshot, fd = Snapshot.create(CAPACITY)
        for number in range(1, before + 1):
            snapshot.write(message(number))
        words, data, steps = snapshot.words, snapshot.data, itertools.count()
        snapshot.words = Stepping(words, steps, fatal)  # type: ignore[assignment]
        snapshot.data = Stepping(data, steps, fatal)  # type: ignore[assignment]
        try:
            snapshot.write(message(before + 1, 2000), message(before + 1, 1000))
            survived = True
        except Killed:
            survived = False
        snapshot.words, snapshot.data = words, data
        successor = attached(fd)
        left = before + survived
        assert read(successor) == (bytes(message(left)) if left else None)
        for number in (101, 102, 103):
            successor.write(message(number))
            assert read(successor) == message(number)
        successor.close()
        snapshot.close()
        os.close(fd)
        if survived:
            assert fatal > 8
            return


WRITER = """
import sys
from ringbuf import Snapshot
snapshot = Snapshot.attach(int(sys.argv[1]))
number = 0
while True:
    number += 1
    body = number.to_bytes(8, "little")
    snapshot.write(memoryview(body), memoryview(body * 60_000))
    print(number, flush=True)
"""


def test_a_killed_process_leaves_a_whole_message() -> None:
    snapshot, fd = Snapshot.create(600_000)
    for after in (1, 2, 7):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            written = [int(writer.stdout.readline()) for _ in range(after)][-1]
            writer.kill()
            written = max([written, *map(int, writer.stdout.read().split())])
        left = attach_and_read(fd)
        assert left is not None
        number = int.from_bytes(left[:8], "little")
        assert written <= number <= written + 1
        assert left == number.to_bytes(8, "little") * 60_001
    snapshot.close()
    os.close(fd)


def test_every_changed_byte_is_noticed_or_harmless() -> None:
    """Outcomes: the message, the one before it, none, or RingCorrupted; never other bytes."""
    draw = random.Random(0)
    for place in [*range(256), *range(PAGE, 3 * PAGE, 53)]:
        snapshot, fd = Snapshot.create(CAPACITY)
        snapshot.write(message(1))
        snapshot.write(message(2))
        snapshot.data[place] ^= draw.randrange(1, 256)
        try:
            successor = attached(fd)
        except RingCorrupted:
            pass
        else:
            with suppress(RingCorrupted):
                assert read(successor) in (bytes(message(1)), bytes(message(2)), None), place
            successor.write(message(3))
            assert read(successor) == message(3)
            successor.close()
        snapshot.close()
        os.close(fd)


@pytest.mark.parametrize("seed", range(20))
def test_memory_full_of_garbage_is_refused(seed: int) -> None:
    snapshot, fd = Snapshot.create(CAPACITY)
    garbage = random.Random(seed).randbytes(snapshot.nbytes - PAGE * (seed % 2))
    if seed % 4 < 2:  # the fixed words are right
        garbage = bytes(snapshot.data[:64]) + garbage[64:]
    snapshot.data[: len(garbage)] = garbage
    with pytest.raises(RingCorrupted):
        attach_and_read(fd)
    snapshot.close()
    os.close(fd)


def test_other_descriptors_are_refused_and_closed() -> None:
    with Ring.create(CAPACITY) as ring:
        for fd in ring.fds:
            with pytest.raises(RingCorrupted):
                Snapshot.attach(os.dup(fd))
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        with pytest.raises(RingCorrupted):
            Snapshot.attach(fd)


FORGED = {
    "the header alone": (PAGE, {2: 0}),
    "one slot": (2 * PAGE, {2: PAGE // 2}),
    "no whole word": (3 * PAGE + 2, {2: PAGE + 1}),
    "another magic": (3 * PAGE, {0: MAGIC + 1}),
    "another version": (3 * PAGE, {1: VERSION + 1}),
    "other slots": (3 * PAGE, {2: PAGE - 64}),
    "a number that no writer reaches": (3 * PAGE, {CURRENT: 1 << 62}),
}


def forged(size: int, wrong: dict[int, int]) -> int:
    fd = create_memory(size)
    for word, value in ({0: MAGIC, 1: VERSION, 2: PAGE} | wrong).items():
        os.pwrite(fd, value.to_bytes(8, "little"), 8 * word)
    return fd


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:ringbuf")


@pytest.mark.parametrize(("size", "wrong"), FORGED.values(), ids=FORGED.keys())
def test_memory_of_another_size_or_with_another_header_is_refused(size: int, wrong: dict[int, int]) -> None:
    Snapshot.attach(forged(3 * PAGE, {})).close()
    before = mappings()
    with pytest.raises(RingCorrupted) as caught:
        Snapshot.attach(forged(size, wrong))
    assert mappings() == before, "it is unmapped, also while the error is kept"
    assert caught.value.words or size != 3 * PAGE


def test_memory_that_may_be_truncated_is_refused(pair: tuple[Snapshot, int]) -> None:
    fd = memfd_create("forged")
    os.write(fd, pair[0].data)
    with pytest.raises(RingCorrupted, match="sealed"):
        Snapshot.attach(fd)


def test_a_length_beyond_the_slot_is_refused_whatever_its_checksum(pair: tuple[Snapshot, int]) -> None:
    snapshot, _ = pair
    snapshot.write(message(1))
    snapshot.write(message(2))  # in slot 0, before the other one
    length = CAPACITY + SLOT_HEADER
    words = PAGE // 8
    snapshot.words[words + 1], snapshot.words[words + 2] = length, zlib.crc32(snapshot.data[PAGE + 64 :][:length])
    with pytest.raises(RingCorrupted, match="no message of number 2"):
        snapshot.read()


def test_a_memory_that_cannot_be_mapped_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, "no room")

    monkeypatch.setattr(mmap, "mmap", no_room)
    with pytest.raises(OSError, match="no room"):
        Snapshot.create(CAPACITY)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="positive"):
        Snapshot.create(0)
    with pytest.raises(OSError, match="available"):
        Snapshot.create(1 << 50)
    assert CURRENT * 8 < PAGE
