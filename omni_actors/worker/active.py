"""A request that is active in an engine loop: its inputs, the targets of its outputs, and its statistics."""

from __future__ import annotations

import time

from omni_actors.protocol.chunks import ChunkSequence
from omni_actors.protocol.messages import CLIENT, Address, StageStats, Start
from omni_actors.stages.base import Chunk


class ActiveRequest:
    """A request that has started in this worker and has not ended."""

    def __init__(self, start: Start) -> None:
        self.request, self.targets = start.request, start.targets
        self.downstream = start.downstream
        self._sequences = {source: ChunkSequence(start.request, source) for source in start.sources}
        self.owes_first_output = not start.replayed and any(target.stage == CLIENT for target in start.targets)
        """Whether its client has no output of this stage yet. With a replay, the client may have it already."""
        self.paused = False
        self.seq = 0
        """Sequence number of the next output."""
        self.started = time.monotonic()
        self.first_input: float | None = None
        self.first_output: float | None = None
        self.step_s = 0.0
        self.sent_bytes = {str(target): 0 for target in start.targets}

    @property
    def first_output_pending(self) -> bool:
        """Whether a client waits for this worker's first output: every source has sent something."""
        received = all(sequence.started for sequence in self._sequences.values())
        return self.owes_first_output and not self.paused and received

    def accept(self, chunk: Chunk, frame: memoryview) -> bool:
        """Return whether the chunk is new. Raises as ``ChunkSequence.accept``; KeyError for an unannounced source."""
        self.first_input = self.first_input or time.monotonic()
        return self._sequences[chunk.source].accept(chunk.seq, frame, last=chunk.last)

    def add_target(self, target: Address) -> None:
        """Send outputs to ``target`` from now on, instead of to another replica of its stage."""
        self.remove_targets(target.stage)
        self.targets = (*self.targets, target)
        self.sent_bytes.setdefault(str(target), 0)

    def remove_targets(self, stage: str) -> None:
        """Send no more outputs to ``stage``."""
        self.targets = tuple(target for target in self.targets if target.stage != stage)

    def stats(self, stage: str) -> StageStats:
        """Return the request's statistics as of now, when it finishes in ``stage``."""
        return StageStats(
            stage=stage,
            started=self.started,
            first_input=self.first_input,
            first_output=self.first_output,
            finished=time.monotonic(),
            step_s=self.step_s,
            chunks=self.seq,
            sent_bytes=self.sent_bytes,
        )
