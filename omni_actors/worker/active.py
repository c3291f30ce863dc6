"""A request that is active in an engine loop: its inputs, the targets of its outputs, and its statistics."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from omni_actors.protocol.chunks import ChunkHeader, ChunkSequence, ReplayDiverged
from omni_actors.protocol.journal import Journal, slices
from omni_actors.protocol.messages import (
    CLIENT,
    NODE_VARIABLE,
    Address,
    Decided,
    JournalPart,
    StageStats,
    Start,
    Switch,
    Switched,
)
from omni_actors.stages.base import Chunk, StageCheckpoint, StageRequest
from ringbuf import Tensor

_NODE: Final = os.environ.get(NODE_VARIABLE)


class ActiveRequest:
    """A request that has started in this worker and has not ended.

    step_s: the seconds of all steps that the worker has made before.
    """

    def __init__(self, start: Start, step_s: float) -> None:
        self.request, self.targets = start.request, start.targets
        self.downstream = start.downstream
        self._sequences = {source: ChunkSequence(start.request, source) for source in start.sources}
        self.replayed = start.replayed
        self._diverged = False
        """Whether a source sent something else the second time. What comes later belongs to another answer."""
        self._producers: dict[str, Address | None] = {}
        """The only replica that a source's chunks are taken from, once the parent has named it."""
        self._journals: defaultdict[str, Journal] = defaultdict(Journal)
        """The journal of each resumable stage upstream, as far as it was received."""
        self._not_passed_on: list[Decided] = []
        """The entries of ``_journals`` that no output has carried yet."""
        self.needed_from = dict(zip(start.targets, start.needed_from, strict=bool(start.needed_from)))
        """The first output that a target needs; missing: 0."""
        self.computed_from = start.computed_from
        self.gathered: list[Chunk] = []
        """Input that the engine gets when it is complete, where input is gathered (``worker.gathering``)."""
        self.gathered_bytes = 0
        self.seq = 0
        """Sequence number of the next output."""
        self.started = time.monotonic()
        self.first_input: float | None = None
        self.first_output: float | None = None
        self._step_s_before = step_s
        self.sent_bytes = dict.fromkeys(start.targets, 0)

    def awaits(self, source: str) -> bool:
        """Whether chunks of a source are still to come."""
        sequence = self._sequences.get(source)
        return sequence is not None and not sequence.complete

    @property
    def first_needed(self) -> int:
        """The number of the first output that a target lacks."""
        return min((self.needed_from.get(target, 0) for target in self.targets), default=0) if self.needed_from else 0

    @property
    def input_complete(self) -> bool:
        """Whether every source has sent its last chunk."""
        return all(sequence.complete for sequence in self._sequences.values())

    @property
    def has_journals(self) -> bool:
        """Whether it has decisions of stages upstream."""
        return bool(self._journals)

    def accept(self, header: ChunkHeader, tensors: Mapping[str, Tensor], producer: Address) -> bool:
        """Return whether the chunk is new. None is new after a divergence.

        Raises as ``ChunkSequence.accept``; KeyError for an unannounced source.
        """
        if self._diverged:
            return False
        if self._producers.get(header.source, producer) != producer:
            return False
        if self.replayed and header.seq and not self._sequences[header.source].received:
            return False  # sent to a start of the request that was aborted here; all chunks come again from the first
        self.first_input = self.first_input or time.monotonic()
        for each in header.all_decided:
            if new := self._journals[each.stage].add(each):
                self._not_passed_on.append(new)
        try:
            return self._sequences[header.source].accept(header, tensors)
        except ReplayDiverged:
            self._diverged = True
            raise

    def pass_on(self) -> tuple[Decided, ...]:
        """Return the entries that the next output carries: those of ``_journals`` that no output has carried yet."""
        decided, self._not_passed_on = tuple(self._not_passed_on), []
        return decided

    def pass_on_again(self) -> tuple[Decided, ...]:
        """Return all entries of journals upstream, for the first output to a target that gets no earlier ones."""
        return tuple(Decided(stage, 0, tuple(journal.entries)) for stage, journal in self._journals.items())

    def switch(self, command: Switch) -> Iterator[JournalPart | Switched]:
        """Take chunks only from the replicas that the command names, and yield the answer."""
        self._producers = command.producers
        for stage, journal in self._journals.items():
            known = command.known.get(stage, 0)
            for part in slices(stage, known, journal.entries[known:]):
                yield JournalPart(self.request, part)
        received = {source: sequence.received for source, sequence in self._sequences.items()}
        yield Switched(self.request, command.question, received)

    def add_target(self, target: Address) -> None:
        """Send outputs to ``target`` from now on, instead of to another replica of its stage."""
        self.remove_targets(target.stage)
        self.needed_from.pop(target, None)
        self.targets = (*self.targets, target)
        self.sent_bytes.setdefault(target, 0)

    def remove_targets(self, stage: str) -> None:
        """Send no more outputs to ``stage``."""
        self.targets = tuple(target for target in self.targets if target.stage != stage)

    def stats(self, stage: str, finished: float, step_s: float) -> StageStats:
        """Return the statistics of a request that has finished in ``stage``.

        finished: when its last output was made, before it was sent; a stage below takes it later.
        step_s: the seconds of all steps that the worker has made.
        """
        return StageStats(
            stage=stage,
            started=self.started,
            first_input=self.first_input,
            first_output=self.first_output,
            finished=finished,
            step_s=step_s - self._step_s_before,
            chunks=self.seq,
            sent_bytes={str(target): size for target, size in self.sent_bytes.items()},
            node=_NODE,
        )


class ActiveRequests(dict[int, ActiveRequest]):
    """The active requests of a worker by number, which of them wait for their client, and what they have gathered.

    A turn asks for these, and takes equally long with any number of requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.awaiting_client = set[int]()
        """The requests with input from the client still to come."""
        self.gathered_bytes = 0
        """Bytes of input that all of them have gathered."""

    def note(self, active: ActiveRequest) -> None:
        """Note anew whether a request waits for its client."""
        (self.awaiting_client.add if active.awaits(CLIENT) else self.awaiting_client.discard)(active.request)

    def gather(self, active: ActiveRequest, chunk: Chunk, size: int) -> None:
        """Keep a chunk of ``size`` bytes of a request's input."""
        active.gathered.append(chunk)
        active.gathered_bytes += size
        self.gathered_bytes += size

    def take_gathered(self, active: ActiveRequest) -> list[Chunk]:
        """Return the chunks of a request that were gathered, and keep them no longer."""
        gathered, active.gathered = active.gathered, []
        self.gathered_bytes -= active.gathered_bytes
        active.gathered_bytes = 0
        return gathered

    def remove(self, request: int) -> None:
        """Forget a request."""
        self.take_gathered(self.pop(request))
        self.awaiting_client.discard(request)


def stage_request(start: Start, journal: Journal | None, checkpoint: StageCheckpoint | None) -> StageRequest:
    """Return a request as its engine sees it. journal, checkpoint: what earlier incarnations left of it."""
    return StageRequest(
        request_id=start.request,
        sources=start.sources,
        params=msgspec.msgpack.decode(start.params),
        downstream=start.downstream,
        journal=tuple(journal.entries) if journal else (),
        needed_from=start.computed_from,
        replayed=start.replayed,
        checkpoint=checkpoint,
    )
