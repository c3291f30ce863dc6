"""The checkpoints of the requests in one worker, in memory that outlives it.

Rules
1. The first checkpoint of a request creates its memory, and the parent gets the descriptor with the messages of the
   same turn. A later checkpoint replaces the one before it there, and costs no message. One that no longer fits gets
   new memory in the same way.
2. The next incarnation continues in the memory that it was given.
3. A checkpoint whose memory would exceed a bound is not kept; nor is one for which there is no memory. Then the one
   before it stays or, without one, a new incarnation starts over from the journal.
4. Memory that contains no valid checkpoint is dropped, whatever it contains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omni_actors.protocol.messages import CheckpointMemory, Start
from omni_actors.stages.base import StageCheckpoint
from omni_actors.worker.control import AttachCheckpoint, Control
from ringbuf import BundleCorrupted, Frame, RingCorrupted, Snapshot, decode_bundle, encode_bundle

HEADROOM = 1024
"""Bytes by which a later checkpoint may exceed the first one: numbers in its data take more bytes as they grow."""


class Checkpoints:
    """The checkpoint memory of each request that is active in a worker.

    control: takes the messages for the parent.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._memories: dict[int, Snapshot] = {}
        self._limits: dict[int, int] = {}
        """The most bytes of memory for each active request."""
        self._worker_limit = 0
        self._reported = False

    def attach(self, command: AttachCheckpoint) -> None:
        """Take over the memory of an earlier incarnation, for the ``Start`` that follows."""
        memory_fd = command.take()
        assert memory_fd is not None, "a command is handled once"
        try:
            self._memories[command.request] = Snapshot.attach(memory_fd)
        except (RingCorrupted, OSError) as error:
            self._report(command.request, error)

    @contextmanager
    def last(self, start: Start) -> Iterator[StageCheckpoint | None]:
        """Begin a request, and give its last checkpoint. Its arrays are valid in the block.

        Raises FrameBorrowed at the end of the block if a view of them is alive.
        """
        self._limits[start.request], self._worker_limit = start.checkpoint_bytes, start.worker_retain_bytes
        frame = None
        try:
            if (memory := self._memories.get(start.request)) is not None:
                frame = memory.read()
            checkpoint = None if frame is None else _decoded(start.request, frame)
        except (RingCorrupted, BundleCorrupted) as error:
            self._report(start.request, error)
            checkpoint = None
            if frame is not None:
                frame.release()
            self._drop_memory(start.request)
            frame = None
        if frame is None:
            yield None
        else:
            with frame:
                yield checkpoint

    def write(self, checkpoint: StageCheckpoint) -> None:
        """Keep a checkpoint of an active request. Raises TypeError: a tensor or value that cannot be encoded."""
        request = checkpoint.request_id
        buffers = encode_bundle(dict(checkpoint.data), checkpoint.tensors)
        size = sum(buffer.nbytes for buffer in buffers)
        memory = self._memories.get(request)
        if memory is not None and size <= memory.capacity:
            memory.write(*buffers)
        elif (created := self._created(request, size)) is not None:
            memory, fd = created
            memory.write(*buffers)
            self._drop_memory(request)
            self._memories[request] = memory
            self._control.add(CheckpointMemory(request), (fd,))

    def _created(self, request: int, size: int) -> tuple[Snapshot, int] | None:
        """Create memory for checkpoints of ``size`` bytes, if the bounds allow it and there is some."""
        others = sum(memory.nbytes for number, memory in self._memories.items() if number != request)
        limit = min(self._limits[request], self._worker_limit - others)
        if not self._limits[request]:
            return None
        needed = Snapshot.needed_bytes(size + HEADROOM)
        if needed > limit:
            setting = "retain_bytes" if limit == self._limits[request] else "worker_retain_bytes"
            self._report(request, f"it needs {needed} bytes, and {max(0, limit)} are left (limits.{setting})")
            return None
        try:
            return Snapshot.create(size + HEADROOM)
        except OSError as error:
            self._report(request, error)
            return None

    def forget(self, request: int) -> None:
        """Drop what is kept here of a request that is not active any more. The parent may have its memory, too."""
        self._limits.pop(request, None)
        self._drop_memory(request)

    def close(self) -> None:
        """Drop everything. Idempotent."""
        for request in list(self._memories):
            self._drop_memory(request)

    def _drop_memory(self, request: int) -> None:
        if memory := self._memories.pop(request, None):
            memory.close()

    def _report(self, request: int, why: object) -> None:
        """Log once that a checkpoint is not kept, or not used."""
        if not self._reported:
            self._reported = True
            self._control.warn(f"a checkpoint of request {request} is not kept, or not used (reported once): {why}")


def _decoded(request: int, frame: Frame) -> StageCheckpoint:
    """Return the checkpoint in a frame. Raises BundleCorrupted."""
    bundle = decode_bundle(frame.data)
    if not isinstance(bundle.meta, dict):
        raise BundleCorrupted(f"its data is {type(bundle.meta).__name__}")
    return StageCheckpoint(request, bundle.tensors, bundle.meta)
