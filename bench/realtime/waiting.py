"""A language model that waits where another one computes, as one with a device of its own. Workers import it by name.

It says ``ANSWER``, whatever is asked. A step takes ``STEP_S`` and gives each request one word. It is resumable: a new
incarnation puts the words of the journal out at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from omni_actors.stages.base import Chunk, StageContext, StageOutput, StageRequest
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.sources import OpenSources

ANSWER = (
    "The honey bee lives in a large colony with one queen. In the summer it flies from flower to flower and drinks"
    " nectar. The bees in the hive turn the nectar into honey, and they keep it in cells of wax for the winter."
)
WORDS = ANSWER.split()
STEP_S = 0.05
"""About the median time between two tokens of SmolLM2 135M while two answers are read (``docs/benchmarks.md``)."""


class _Asked(msgspec.Struct):
    open: OpenSources
    known: int
    """How many words are in the journal."""
    said: int = 0
    paused: bool = False

    @property
    def ready(self) -> bool:
        return not (self.paused or self.open)


class WaitingModel(PausableEngine[_Asked]):
    """The engine. It has no options of its own."""

    def __init__(self, context: StageContext) -> None:
        super().__init__()

    def _new_request(self, request: StageRequest) -> _Asked:
        return _Asked(OpenSources(request.sources), len(request.journal))

    def _take(self, request: _Asked, chunk: Chunk) -> None:
        request.open.update(chunk)

    def step(self) -> Iterator[StageOutput]:
        time.sleep(STEP_S)
        for number, asked in list(self._requests.items()):
            if not asked.ready:
                continue
            for word in WORDS[asked.said : max(asked.known, asked.said + 1)]:
                asked.said += 1
                last = asked.said == len(WORDS)
                if last:
                    del self._requests[number]
                yield StageOutput(number, {}, {"text": f" {word}"}, last, decisions=(asked.said,))
