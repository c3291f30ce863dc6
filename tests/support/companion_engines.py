"""Engines that compute the companions of a request apart, and gather them: positions in, guided numbers out."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

from omni_actors.stages.base import Chunk, InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.engine import Engine

SCALE = 3
PREDICTIONS = {"wanted": 7, "unwanted": 2}
"""What each companion's stage multiplies a position by."""


def guided(position: int) -> int:
    """Return the number that the stages compute of a position."""
    wanted, unwanted = (factor * position for factor in PREDICTIONS.values())
    return unwanted + SCALE * (wanted - unwanted)


class _Request:
    def __init__(self, sources: tuple[str, ...]) -> None:
        self.open = set(sources)
        self.found: defaultdict[int, dict[str, int]] = defaultdict(dict)
        """The predictions of a position, by the stage that made them."""
        self.due: deque[tuple[Mapping[str, Any], bool]] = deque()


class Predict(Engine[_Request]):
    """Computes the companion that has the stage's name. A chunk may name a stage that refuses it."""

    def __init__(self, context: StageContext) -> None:
        super().__init__()
        self.stage, self.step_s = context.stage, float(context.options.get("step_s", 0))

    @property
    def busy(self) -> bool:
        return any(request.due for request in self._requests.values())

    def _new_request(self, request: StageRequest) -> _Request:
        return _Request(request.sources)

    def _take(self, request: _Request, chunk: Chunk) -> None:
        if chunk.data.get("refused") == self.stage:
            raise InvalidRequest("the chunk asked to be refused", param="refused")
        position = chunk.data["position"]
        request.due.append(({"position": position, "value": PREDICTIONS[self.stage] * position}, chunk.last))

    def step(self) -> Iterator[StageOutput]:
        time.sleep(self.step_s)
        for number, request in list(self._requests.items()):
            if request.due:
                data, last = request.due.popleft()
                if last:
                    del self._requests[number]
                yield StageOutput(number, data=data, last=last)


class Gather(Predict):
    """Gathers the predictions of both companions for each position, in the order of the positions."""

    def _take(self, request: _Request, chunk: Chunk) -> None:
        position = chunk.data["position"]
        request.found[position][chunk.source] = chunk.data["value"]
        if chunk.last:
            request.open.remove(chunk.source)
        if len(found := request.found[position]) == len(PREDICTIONS):
            del request.found[position]
            value = found["unwanted"] + SCALE * (found["wanted"] - found["unwanted"])
            request.due.append(({"position": position, "value": value}, not request.open))
