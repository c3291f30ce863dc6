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

from contextlib import AbstractContextManager, nullcontext

from omni_actors.protocol.messages import Bounds, CheckpointMemory, Start
from omni_actors.stages.base import StageCheckpoint
from omni_actors.worker.control import AttachCheckpoint, Control
from ringbuf import BundleCorrupted, Frame, RingCorrupted, Snapshot, decode_bundle, encode_bundle

HEADROOM = 1024
"""Bytes by which a later checkpoint may exceed the first one: numbers in its data take more bytes as they grow."""
_NO_FRAME = nullcontext()


class Checkpoints:
    """The checkpoint memory of each request that is active in a worker.

    control: takes the messages for the parent.
    """

    def __init__(self, control: Control, bounds: Bounds) -> None:
        self._control, self._bounds = control, bounds
        self._memories: dict[int, Snapshot] = {}
        self._kept: dict[int, bool] = {}
        """Whether the checkpoints of each active request are kept."""
        self._reported = False

    def attach(self, command: AttachCheckpoint) -> None:
        """Take over the memory of an earlier incarnation, for the ``Start`` that follows."""
        memory_fd = command.take()
        assert memory_fd is not None, "a command is handled once"
        try:
            self._memories[command.request] = Snapshot.attach(memory_fd)
        except (RingCorrupted, OSError) as error:
            self._report(command.request, error)

    def last(self, start: Start) -> tuple[AbstractContextManager[object], StageCheckpoint | None]:
        """Begin a request, and return its last checkpoint, whose arrays are valid until the end of the context.

        The context raises FrameBorrowed at its end if a view of them is alive.
        """
        request = start.request
        self._kept[request] = start.checkpointed
        if (memory := self._memories.get(request)) is None:
            return _NO_FRAME, None
        frame = None
        try:
            frame = memory.read()
            return (_NO_FRAME, None) if frame is None else (frame, _decoded(request, frame))
        except (RingCorrupted, BundleCorrupted) as error:
            self._report(request, error)
        if frame is not None:
            frame.release()
        self._drop_memory(request)
        return _NO_FRAME, None

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
        if not self._kept[request]:
            return None
        others = sum(memory.nbytes for number, memory in self._memories.items() if number != request)
        limit = min(self._bounds.request_bytes, self._bounds.worker_bytes - others)
        needed = Snapshot.needed_bytes(size + HEADROOM)
        if needed > limit:
            setting = "retain_bytes" if limit == self._bounds.request_bytes else "worker_retain_bytes"
            self._report(request, f"it needs {needed} bytes, and {max(0, limit)} are left (limits.{setting})")
            return None
        try:
            return Snapshot.create(size + HEADROOM)
        except OSError as error:
            self._report(request, error)
            return None

    def forget(self, request: int) -> None:
        """Drop what is kept here of a request that is not active any more. The parent may have its memory, too."""
        self._kept.pop(request, None)
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
