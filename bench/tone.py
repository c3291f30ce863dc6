"""A speech engine without a model, for benchmarks.

It speaks each word of ``text`` as a tone of 0.1 s and 440 Hz, at 24 kHz.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from omni_actors.stages.base import Chunk, StageContext, StageOutput, StageRequest
from omni_actors.stages.engine import PausableEngine

SAMPLE_RATE = 24_000
WORD = 0.3 * np.sin(2 * np.pi * 440 * np.arange(SAMPLE_RATE // 10) / SAMPLE_RATE).astype(np.float32)

CONFIG = """\
name: tone
stages:
  voice: {engine: "bench.tone:ToneEngine", accepts: [script], emits: audio}
"""


class _Request:
    def __init__(self) -> None:
        self.words: deque[str] = deque()
        self.complete = self.paused = False

    @property
    def ready(self) -> bool:
        return not self.paused and (bool(self.words) or self.complete)


class ToneEngine(PausableEngine[_Request]):
    """Emits the sound of one word per request in each step."""

    def __init__(self, context: StageContext) -> None:
        super().__init__()

    def _new_request(self, request: StageRequest) -> _Request:
        return _Request()

    def _take(self, request: _Request, chunk: Chunk) -> None:
        request.words += chunk.data.get("text", "").split()
        request.complete = chunk.last

    def step(self) -> Iterator[StageOutput]:
        for request_id, request in list(self._requests.items()):
            if request.ready:
                audio = WORD.copy() if request.words else np.zeros(0, np.float32)
                if request.words:
                    request.words.popleft()
                last = request.complete and not request.words
                if last:
                    del self._requests[request_id]
                yield StageOutput(request_id, {"audio": audio}, {"sample_rate": SAMPLE_RATE}, last)
