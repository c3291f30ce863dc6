"""Tensors that pass between two workers by handle: the sender's arena, and the arena of a sender as a receiver sees it.

Rules
1. An arena is one block of a memory that both workers reach: that of a CUDA device, or the host's. A sender has one. It
   makes it for its first edge to a worker with the same memory, and the block is freed by the end of its process.
2. An output's tensors are copied into the arena before the record that names them is published.
3. Their place there is free again when no ``Placed`` refers to it. Those that refer to it: an edge, until its consumer
   has released the record or closed; chunks that wait for room; the outputs that are retained for a replay.
4. The receiver copies the bytes into memory of its own. Then it looks whether the sender has begun to end: if so, the
   copy may be wrong. The receiver drops the chunk and reads no more from this ring. The parent has it all sent again,
   as it does whenever a worker dies before its chunks were received.
5. What does not fit goes through the ring as bytes: where the arena is full, a tensor is small, the record would be
   sent in fragments, or the sender is not resumable (receivers compare the bytes of other stages' chunks).
6. The engine's thread alone uses an arena.
"""

from __future__ import annotations

import bisect
import collections
import functools
import os
from collections.abc import Callable, Mapping
from typing import Protocol

from omni_actors.platform.beginning_end import start_of
from omni_actors.protocol.chunks import ArenaName, ChunkCorrupted, InArena
from omni_actors.stages.base import TensorLike
from ringbuf import Deferred, RingError, SendBuffer, Tensor

ALIGN = 256


class Block(Protocol):
    """A block of memory, made here or opened by its handle. Copies are complete when ``write`` and ``read`` return."""

    @property
    def handle(self) -> bytes:
        """What another process opens the block by, beside the pid of its maker."""
        ...

    def takes(self, buffer: SendBuffer) -> bool:
        """Whether bytes are where ``write`` takes them from."""
        ...

    def write(self, offset: int, buffer: SendBuffer) -> None:
        """Copy bytes to ``offset``."""
        ...

    def read(self, offset: int, nbytes: int) -> SendBuffer:
        """Return a copy of ``nbytes`` bytes in memory of its own, where an engine takes them from."""
        ...

    def close(self) -> None:
        """Undo ``SharedMemory.open``. Not called for a block that was made here."""
        ...


class SharedMemory(Protocol):
    """A memory that other processes reach: makes and opens blocks. Both raise OSError, RingError or RuntimeError."""

    block_bytes: int
    """The size of an arena."""
    smallest: int
    """The bytes from which on a tensor is passed by handle."""

    def make(self) -> Block:
        """Make a block of ``block_bytes``."""
        ...

    def open(self, pid: int, handle: bytes, size: int) -> Block:
        """Open the block of ``size`` bytes that process ``pid`` made."""
        ...


class Placed(Deferred):
    """Bytes in this worker's arena, which stay there as long as an object like this refers to them (rule 3)."""

    def __init__(self, block: Block, place: Place, offset: int, nbytes: int) -> None:
        self._block, self._place = block, place
        self.offset, self.nbytes = offset, nbytes

    def copy_into(self, view: memoryview) -> None:
        copy = self._block.read(self.offset, self.nbytes)
        if isinstance(copy, Deferred):
            copy.copy_into(view)
        else:
            view[:] = copy

    def part(self, start: int, stop: int) -> Placed:
        return Placed(self._block, self._place, self.offset + start, stop - start)


class Place:
    """A range of an arena. It is given back with the last reference to this object."""

    def __init__(self, ranges: FreeRanges, start: int, stop: int) -> None:
        self._ranges, self.start, self.stop = ranges, start, stop

    def __del__(self) -> None:
        self._ranges.give_back(self.start, self.stop)


class FreeRanges:
    """The free ranges of ``size`` bytes, in order. None is empty, and no two touch."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]
        self._given_back = collections.deque[tuple[int, int]]()
        """What finalizers have given back, which may run in the middle of any other call, and in any thread."""

    @property
    def free(self) -> list[tuple[int, int]]:
        """All of them."""
        while self._given_back:
            self._join(*self._given_back.popleft())
        return self._free

    def take(self, nbytes: int) -> Place | None:
        """Take the first free range that has ``nbytes``, rounded up to ``ALIGN``; None: there is none."""
        need = -(-nbytes // ALIGN) * ALIGN
        free = self.free
        for i, (start, stop) in enumerate(free):
            if stop - start >= need:
                free[i : i + 1] = [(start + need, stop)] if stop - start > need else []
                return Place(self, start, start + need)
        return None

    def give_back(self, start: int, stop: int) -> None:
        """Make a range free. May be called in any thread, and by finalizers."""
        self._given_back.append((start, stop))

    def _join(self, start: int, stop: int) -> None:
        bisect.insort(self._free, (start, stop))
        joined: list[tuple[int, int]] = []
        for each in self._free:
            if joined and joined[-1][1] == each[0]:
                joined[-1] = joined[-1][0], each[1]
            else:
                joined.append(each)
        self._free = joined


class Arena:
    """The arena of this worker.

    load_memory: returns what its block is made of; called when it is first used, as it imports the engine's library.
    warn: writes a line to the worker's log.
    """

    def __init__(self, load_memory: Callable[[], SharedMemory], warn: Callable[[str], None]) -> None:
        self._load_memory, self.warn = load_memory, warn
        self.ranges = FreeRanges(0)
        self._block: Block | None = None
        self._name = ArenaName(0, 0, 0, b"")
        self._failed = False

    @functools.cached_property
    def memory(self) -> SharedMemory:
        """Raises what loading it raises."""
        return self._load_memory()

    def place(self, tensors: Mapping[str, TensorLike]) -> dict[str, Tensor]:
        """Copy into the arena what belongs there and fits, and return it: tensors whose bytes are ``Placed``."""
        if (block := self._made()) is None:
            return {}
        placed: dict[str, Tensor] = {}
        for name, each in tensors.items():
            tensor = each if isinstance(each, Tensor) else Tensor.of_numpy(each)
            size, buffer = tensor.nbytes, tensor.buffer
            if size < self.memory.smallest or not block.takes(buffer) or (place := self.ranges.take(size)) is None:
                continue
            block.write(place.start, buffer)
            placed[name] = Tensor(tensor.dtype, tensor.shape, Placed(block, place, place.start, size))
        return placed

    def in_arena(self, placed: Mapping[str, Tensor]) -> InArena:
        """Return what a chunk says of tensors that ``place`` has returned."""
        entries = {}
        for name, tensor in placed.items():
            buffer = tensor.buffer
            assert isinstance(buffer, Placed), "place has returned it"
            entries[name] = tensor.dtype, tensor.shape, buffer.offset, buffer.nbytes
        return InArena(self._name, entries)

    def _made(self) -> Block | None:
        """Return the block, made the first time; None if there is no memory for it, which is logged once."""
        if self._block is None and not self._failed:
            try:
                self._block = block = self.memory.make()
                pid, size = os.getpid(), self.memory.block_bytes
                self._name, self.ranges = ArenaName(pid, start_of(pid) or 0, size, block.handle), FreeRanges(size)
            except (OSError, RingError, RuntimeError) as error:
                self._failed = True
                self.warn(f"tensors of this worker travel as bytes, not by handle: {error}")
        return self._block


class SenderArena:
    """The arena of the worker at the other end of an edge. own: that of this worker, whose memory opens it."""

    def __init__(self, own: Arena) -> None:
        self._own = own
        self._block: Block | None = None

    def copies(self, named: InArena) -> dict[str, Tensor] | None:
        """Return copies of a chunk's tensors in memory of this worker; None: the sender has begun to end (rule 4).

        Raises ChunkCorrupted; OSError, RingError or RuntimeError if the arena cannot be opened though the sender lives.
        """
        name = named.arena
        try:
            block = self._block = self._block or self._own.memory.open(name.pid, name.handle, name.size)
            copies = {key: _copy(block, name.size, *entry) for key, entry in named.tensors.items()}
        except (OSError, RingError, RuntimeError):
            if start_of(name.pid) == name.started:
                raise
            return None
        return copies if start_of(name.pid) == name.started else None

    def close(self) -> None:
        """Close the arena if it was opened. A failure, as after the sender's death, is written to the log."""
        block, self._block = self._block, None
        if block is not None:
            try:
                block.close()
            except (OSError, RingError, RuntimeError) as error:
                self._own.warn(f"the arena of another worker could not be closed: {error}")


def _copy(block: Block, size: int, dtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> Tensor:
    if not 0 <= offset <= offset + nbytes <= size:
        raise ChunkCorrupted(f"a tensor of {nbytes} bytes at {offset} lies outside the arena of {size} bytes")
    try:
        return Tensor(dtype, shape, block.read(offset, nbytes))
    except ValueError as error:
        raise ChunkCorrupted(f"a tensor in an arena: {error}") from error
