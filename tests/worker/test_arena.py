"""Tensors by handle, on host memory: what is kept until when, and what the death of either side does to it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import ChunkCorrupted, ChunkHeader
from omni_actors.protocol.messages import Bounds
from omni_actors.worker.arena import ALIGN, Arena, FreeRanges, Placed, SharedMemory
from omni_actors.worker.host_memory import HostBlock, HostMemory
from omni_actors.worker.incoming import Incoming
from omni_actors.worker.outgoing import Outgoing, Retention, encode
from ringbuf import Deferred, Ring, RingClosed

WATCHDOG_S = 60.0
SIZE = 8 * ALIGN
"""Bytes of the tests' arenas."""


class SmallMemory(HostMemory):
    block_bytes, smallest = SIZE, 64


class Lost(SmallMemory):
    def make(self) -> HostBlock:
        raise OSError("no memory")


def arena_of(memory: SharedMemory | None = None) -> Arena:
    return Arena(lambda: memory or SmallMemory(), pytest.fail)


def header(seq: int = 0) -> ChunkHeader:
    return ChunkHeader(request=1, source="up", seq=seq, last=False, data={}, decisions=(seq,))


def pattern(seed: int, size: int = 2 * ALIGN) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def taken(arena: Arena) -> int:
    return SIZE - sum(stop - start for start, stop in arena.ranges.free)


class Edge:
    """Both ends of a ring in this process."""

    def __init__(self, *, by_handle: bool = True, capacity: int = 1 << 16) -> None:
        ring = Ring.create(capacity)
        far = Ring.attach([os.dup(fd) for fd in ring.fds], generation=0)
        self.out = Outgoing(ring, by_handle=by_handle)
        self.receiver = arena_of()
        self.into = Incoming(far, arena=self.receiver)

    def receive(self) -> dict[str, Any] | None:
        frame = self.into.next_frame()
        assert frame is not None
        with frame:
            found, tensors = chunks.decode(frame.data)
            whole = self.into.complete(found, tensors)
            return None if whole is None else {name: each.numpy().copy() for name, each in whole.items()}

    def close(self) -> None:
        self.out.close()
        self.into.close()


@contextmanager
def edges(*options: dict[str, Any]) -> Iterator[list[Edge]]:
    made = [Edge(**each) for each in options]
    yield made
    for each in made:
        each.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * ALIGN)), max_size=40))
def test_ranges_never_overlap_and_all_space_comes_back(actions: list[tuple[bool, int]]) -> None:
    ranges, held = FreeRanges(SIZE), list[tuple[Any, int]]()
    for gives_back, size in actions:
        if gives_back and held:
            held.pop(size % len(held))
        elif (place := ranges.take(size)) is not None:
            held.append((place, size))
        else:
            assert all(stop - start < size for start, stop in ranges.free)
        place = None
        spans = sorted([*ranges.free, *((each.start, each.stop) for each, _ in held)])
        assert [spans[0][0], *(stop for _, stop in spans)] == [*(start for start, _ in spans), SIZE]
        assert all(each.stop - each.start >= size for each, size in held)
    held.clear()
    assert ranges.free == [(0, SIZE)]


def test_one_output_goes_by_handle_where_it_can_and_as_bytes_elsewhere() -> None:
    """The target on another device, and one whose record is sent in fragments, get the same bytes."""
    arena, sent = arena_of(), {"rows": pattern(1), "small": pattern(2, 8)}
    large = msgspec.structs.replace(header(), data={"text": "x" * 2100})  # more than half the third ring
    with edges({}, {"by_handle": False}, {"capacity": 4096}) as made:
        output = encode(large, sent, kept=True, arena=arena)
        for edge in made:
            edge.out.send(1, output)
        sizes = [edge.out.ring.statistics().payload_bytes - 2100 for edge in made]
        assert sizes[0] < pattern(1).nbytes <= min(sizes[1:])
        for edge in made:
            received = edge.receive()
            assert received is not None
            assert received.keys() == sent.keys()
            assert all(np.array_equal(received[name], sent[name]) for name in sent)


def test_bytes_stay_until_the_consumer_has_released_their_record() -> None:
    arena = arena_of()
    with edges({}) as [edge]:
        for seed in range(2):
            edge.out.send(1, encode(header(seed), {"rows": pattern(seed)}, arena=arena))
        assert taken(arena) == 4 * ALIGN
        frames = [edge.into.next_frame() for _ in range(2)]
        assert frames[0]
        assert frames[1]
        frames[1].release()
        edge.out.free_passed()
        assert taken(arena) == 4 * ALIGN, "the first record is not released, so the head has passed neither"
        frames[0].release()
        edge.out.free_passed()
        assert taken(arena) == 0


def test_a_place_is_not_used_again_while_its_record_is_unread() -> None:
    """More outputs than the arena holds: those that find no place travel as bytes, and each one arrives as it was."""
    arena = arena_of()
    with edges({}) as [edge]:
        for seed in range(10):
            edge.out.free_passed()
            edge.out.send(1, encode(header(seed), {"rows": pattern(seed)}, arena=arena))
        assert taken(arena) == SIZE
        for seed in range(10):
            received = edge.receive()
            assert received is not None
            assert np.array_equal(received["rows"], pattern(seed))
        edge.out.free_passed()
        assert taken(arena) == 0


def test_a_retained_output_keeps_its_place_and_is_sent_again_from_there() -> None:
    """To a worker in the same memory, and then to one elsewhere."""
    arena, retention = arena_of(), Retention(Bounds(1 << 20, 1 << 20))
    retention.begin(1)
    with edges({}, {}, {"by_handle": False}) as [first, second, third]:
        output = encode(header(), {"rows": pattern(5)}, kept=True, arena=arena)
        assert retention.add(1, output) == []
        del output
        for edge in (first, second, third):
            [retained] = retention.chunks(1)
            assert not isinstance(retained, str)
            edge.out.send(1, retained)
            del retained
            received = edge.receive()
            assert received is not None
            assert np.array_equal(received["rows"], pattern(5))
            edge.out.free_passed()
            assert taken(arena) == 2 * ALIGN
        retention.forget(1)
        assert taken(arena) == 0


def test_a_retained_output_counts_with_all_its_bytes_and_an_evicted_one_frees_its_place() -> None:
    arena, retention = arena_of(), Retention(Bounds(2 * ALIGN, 1 << 20))
    retention.begin(1)
    evicted = retention.add(1, encode(header(), {"rows": pattern(5)}, kept=True, arena=arena))
    assert [request for request, _ in evicted] == [1]
    gc.collect()
    assert taken(arena) == 0


def test_an_abort_frees_what_waits_for_room_and_nothing_that_was_sent() -> None:
    arena = arena_of()
    with edges({"capacity": 4096}) as [edge]:
        filling = 0
        while not edge.out.waiting_bytes:
            edge.out.send(2, encode(header(filling), {"small": pattern(0, 63)}))
            filling += 1
        edge.out.send(1, encode(header(), {"rows": pattern(1)}, arena=arena))
        assert taken(arena) == 2 * ALIGN
        edge.out.drop(1)
        assert taken(arena) == 0
        for _ in range(filling - 1):
            assert edge.receive()
        edge.out.flush()
        assert edge.receive()
        edge.out.send(1, encode(header(), {"rows": pattern(1)}, arena=arena))
        edge.out.drop(1)
        assert taken(arena) == 2 * ALIGN
        received = edge.receive()
        assert received is not None
        assert np.array_equal(received["rows"], pattern(1))


def test_a_consumer_that_closes_frees_what_it_has_not_read() -> None:
    arena = arena_of()
    with edges({}) as [edge]:
        edge.out.send(1, encode(header(), {"rows": pattern(1)}, arena=arena))
        edge.into.close()
        edge.out.free_passed()
        assert taken(arena) == 0


def test_without_memory_for_an_arena_all_travels_as_bytes_after_one_line_in_the_log() -> None:
    warnings: list[str] = []
    arena = Arena(Lost, warnings.append)
    with edges({}) as [edge]:
        for seed in range(2):
            edge.out.send(1, encode(header(seed), {"rows": pattern(seed)}, arena=arena))
            received = edge.receive()
            assert received is not None
            assert np.array_equal(received["rows"], pattern(seed))
    assert warnings == ["tensors of this worker travel as bytes, not by handle: no memory"]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (("uint8", (8,), SIZE, 8), "8 bytes at 2048 lies outside the arena of 2048 bytes"),
        (("uint8", (8,), SIZE - 7, 8), "8 bytes at 2041 lies outside the arena of 2048 bytes"),
        (("uint8", (8,), -8, 8), "8 bytes at -8 lies outside the arena"),
        (("uint8", (8,), 0, -8), "-8 bytes at 0 lies outside the arena"),
        (("uint8", (9,), 0, 8), "8 bytes are not uint8 of shape"),
        (("strange", (8,), 0, 8), "unknown dtype"),
    ],
)
def test_a_tensor_outside_the_arena_or_of_another_size_is_refused(
    entry: tuple[str, tuple[int, ...], int, int], why: str
) -> None:
    arena = arena_of()
    with edges({}) as [edge]:
        named = arena.in_arena(arena.place({"rows": pattern(1)}))
        wrong = chunks.InArena(named.arena, {"rows": entry})
        with pytest.raises(ChunkCorrupted, match=why):
            edge.into.complete(ChunkHeader(1, "up", 0, False, {}, (0,), in_arena=wrong), {})


def test_a_worker_without_an_arena_of_its_own_opens_none() -> None:
    arena = arena_of()
    edge = Incoming(Ring.create(4096))
    with pytest.raises(ChunkCorrupted, match="opens no arenas"):
        edge.complete(ChunkHeader(1, "up", 0, False, {}, in_arena=arena.in_arena({})), {})
    edge.close()


SENDER = """
import os, sys
from tests.worker.test_arena import *
fds = [int(each) for each in sys.argv[1:]]
out, arena = Outgoing(Ring.attach(fds, generation=0), by_handle=True), arena_of()
for seed in range(3):
    out.send(1, encode(header(seed), {"rows": pattern(seed)}, arena=arena))
print("sent", flush=True)
sys.stdin.read()
"""
RECEIVER = """
import os, signal, sys
from tests.worker.test_arena import *
class Killing(HostBlock):
    def read(self, offset, nbytes):
        print("reads", flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
class Memory(SmallMemory):
    def open(self, pid, handle, size):
        fd = os.open(f"/proc/{pid}/fd/{int(handle)}", os.O_RDWR)
        return Killing(fd, size)
fds = [int(each) for each in sys.argv[1:]]
edge = Incoming(Ring.attach(fds, generation=0), arena=Arena(Memory, print))
frame = edge.consumer.recv(timeout=60)
found, tensors = chunks.decode(frame.data)
edge.complete(found, tensors)
"""


@contextmanager
def process(code: str, ring: Ring) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, ring.fds)],
        pass_fds=ring.fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.parametrize("moment", ["before it is opened", "before the copy", "in the copy"])
def test_a_sender_that_is_killed_ends_the_edge_and_nothing_of_the_chunk_is_used(moment: str) -> None:
    """Its death is forced at each moment of a receiver that reads the second chunk."""
    with Ring.create(1 << 16) as ring, process(SENDER, ring) as sender:

        def kill() -> None:
            sender.kill()
            os.waitid(os.P_PID, sender.pid, os.WEXITED | os.WNOWAIT)  # a zombie

        class Block(HostBlock):
            def read(self, offset: int, nbytes: int) -> memoryview:
                copy = super().read(offset, nbytes)
                if moment == "in the copy" and reads:
                    kill()
                    copy[:] = bytes(nbytes)
                reads.append(offset)
                return copy

        class Memory(SmallMemory):
            def open(self, pid: int, handle: bytes, size: int) -> HostBlock:
                fd = os.open(f"/proc/{pid}/fd/{int(handle)}", os.O_RDWR)
                try:
                    return Block(fd, size)
                finally:
                    os.close(fd)

        reads: list[int] = []
        assert line(sender) == "sent"
        edge = Edge()
        edge.into.close()
        far = Ring.attach([os.dup(fd) for fd in ring.fds], generation=0)
        edge.into = Incoming(far, arena=Arena(Memory, pytest.fail))
        if moment == "before it is opened":
            kill()
        else:
            received = edge.receive()
            assert received is not None
            assert np.array_equal(received["rows"], pattern(0))
            if moment == "before the copy":
                kill()
        assert edge.receive() is None
        assert edge.into.ended
        assert edge.into.next_frame() is None, "a chunk behind a lost one is not read"
        edge.close()


def test_a_receiver_that_is_killed_in_a_copy_frees_nothing_before_it_is_dead() -> None:
    """Then the edge closes, and the retained output goes to its successor from the same place."""
    arena, retention = arena_of(), Retention(Bounds(1 << 20, 1 << 20))
    retention.begin(1)
    with Ring.create(1 << 16) as ring:
        mine = Ring.attach([os.dup(fd) for fd in ring.fds], generation=0)
        out = Outgoing(mine, by_handle=True)
        with process(RECEIVER, ring) as receiver:
            retention.add(1, encode(header(), {"rows": pattern(7)}, kept=True, arena=arena))
            out.send(1, retention.chunks(1)[0])  # type: ignore[arg-type]
            retention.forget(1)
            retention.begin(1)
            retention.add(1, encode(header(), {"rows": pattern(7)}, kept=True, arena=arena))
            assert line(receiver) == "reads"
            out.free_passed()
            assert taken(arena) == 4 * ALIGN, "the receiver is in its copy"
            assert receiver.stdin is not None
            receiver.stdin.write("\n")
            receiver.stdin.flush()
            assert receiver.wait(WATCHDOG_S) == -signal.SIGKILL
        out.free_passed()
        assert taken(arena) == 4 * ALIGN, "its record is not released"
        ring.claim_consumer().close()  # as the supervisor does for a dead worker
        with pytest.raises(RingClosed):
            out.producer.try_send(b"")
        out.free_passed()
        assert taken(arena) == 2 * ALIGN
        out.close()
    with edges({}) as [edge]:
        edge.out.send(1, retention.chunks(1)[0])  # type: ignore[arg-type]
        received = edge.receive()
        assert received is not None
        assert np.array_equal(received["rows"], pattern(7))


def test_placed_bytes_are_read_in_parts_as_a_ring_takes_them() -> None:
    arena = arena_of()
    [tensor] = arena.place({"rows": pattern(3)}).values()
    placed = tensor.buffer
    assert isinstance(placed, Placed)
    assert isinstance(placed, Deferred)
    part = placed.part(100, 300)
    del tensor, placed
    assert taken(arena) == 2 * ALIGN, "a part refers to the place"
    assert np.array_equal(np.frombuffer(part.to_host(), np.uint8), pattern(3)[100:300])
    del part
    assert taken(arena) == 0
