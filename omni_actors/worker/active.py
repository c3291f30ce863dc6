"""A request as an engine loop knows it: what came of it, where its outputs go, and its statistics."""

from __future__ import annotations

import time

from omni_actors.protocol.chunks import ChunkSequence
from omni_actors.protocol.messages import CLIENT, Address, StageStats, Start
from omni_actors.stages.base import Chunk


class Active:
    """A request that has started here and not ended."""

    def __init__(self, start: Start) -> None:
        self.request, self.targets = start.request, start.targets
        self.downstream = start.downstream
        self._sequences = {source: ChunkSequence(start.request, source) for source in start.sources}
        self.unheard = not start.replayed and any(target.stage == CLIENT for target in start.targets)
        """Whether a client waits for its first output: of one that is replayed it may have that."""
        self.paused = False
        self.seq = 0
        self.started = time.monotonic()
        self.first_input: float | None = None
        self.first_output: float | None = None
        self.step_s = 0.0
        self.sent_bytes = {str(target): 0 for target in start.targets}

    @property
    def awaited(self) -> bool:
        """Whether it is for this worker that a client waits: something came from each source."""
        return self.unheard and not self.paused and all(sequence.started for sequence in self._sequences.values())

    def take_in(self, chunk: Chunk, frame: memoryview) -> bool:
        """Whether it is news. Raises as ``ChunkSequence.accept``, and KeyError for a source that was not announced."""
        self.first_input = self.first_input or time.monotonic()
        return self._sequences[chunk.source].accept(chunk.seq, frame, last=chunk.last)

    def send_to(self, target: Address) -> None:
        """From now on; instead of to another replica of that stage."""
        self.cut_off(target.stage)
        self.targets = (*self.targets, target)
        self.sent_bytes.setdefault(str(target), 0)

    def cut_off(self, stage: str) -> None:
        self.targets = tuple(target for target in self.targets if target.stage != stage)

    def stats(self, stage: str) -> StageStats:
        return StageStats(
            stage,
            self.started,
            self.first_input,
            self.first_output,
            time.monotonic(),
            self.step_s,
            self.seq,
            self.sent_bytes,
        )
