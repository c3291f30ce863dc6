"""The parent's part of a request's journals, and its questions about the rest (``protocol.journal``).

Rules
1. Before a stage starts again, each living stage downstream of it is asked for the entries that it has (``Switch``). No
   stage of the request starts again before all answers are there, because an answer may concern several of them.
2. When a worker dies meanwhile, all are asked again: they may have received more from that worker after their answers.
   Only answers to the latest question count.
3. An answer is used whole or, if the worker dies before its end, not at all. An entry thus never comes without those
   that it depends on.
4. No I/O, clock or trio here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from omni_actors.protocol.journal import Journal, slices
from omni_actors.protocol.messages import Decided


class Resumption:
    """One request's journals, and the stages that are about to start again."""

    def __init__(self) -> None:
        self._journals: defaultdict[str, Journal] = defaultdict(Journal)
        self.stages: set[str] = set()
        """The stages that start again once every answer is there."""
        self._question = 0
        """The number of the latest question."""
        self._asked: set[str] = set()
        """The stages that have not answered it."""
        self._parts: defaultdict[str, list[Decided]] = defaultdict(list)
        """What has arrived of each stage's answer."""
        self._received: dict[tuple[str, str], int] = {}
        """For a source and a consumer that has answered, how many chunks the consumer had."""

    def add(self, decided: Iterable[Decided]) -> None:
        """Add entries to journals. Raises JournalCorrupted if entries before them are missing."""
        for each in decided:
            self._journals[each.stage].add(each)

    @property
    def known(self) -> dict[str, int]:
        """The number of known entries of each stage's journal."""
        return {stage: len(journal.entries) for stage, journal in self._journals.items()}

    def entries(self, stage: str) -> Iterator[Decided]:
        """Yield a stage's journal, in parts that fit into a control message."""
        return slices(stage, 0, self._journals[stage].entries)

    def ask(self, stages: Iterable[str]) -> int:
        """Begin a question to these stages, and return its number."""
        self._question += 1
        self._asked = set(stages)
        self._received.clear()
        return self._question

    def part_arrived(self, stage: str, decided: Decided) -> None:
        """Record a part of a stage's answer."""
        self._parts[stage].append(decided)

    def answered(self, stage: str, question: int, received: Mapping[str, int]) -> None:
        """Complete a stage's answer. received: how many chunks it has of each source. Raises as ``add``."""
        self.add(self._parts.pop(stage, ()))
        if question == self._question:
            self._asked.discard(stage)
            self._received.update({(source, stage): number for source, number in received.items()})

    def forget(self, stage: str) -> None:
        """Handle that the stage's worker died: the stage does not start, and its unfinished answer is dropped."""
        self.stages.discard(stage)
        self._asked.discard(stage)
        self._parts.pop(stage, None)

    @property
    def complete(self) -> bool:
        """Whether every answer is there."""
        return not self._asked

    def received(self, source: str, consumer: str) -> int:
        """Return how many chunks of ``source`` the consumer had when it was asked; 0 if it was not asked."""
        return self._received.get((source, consumer), 0)
