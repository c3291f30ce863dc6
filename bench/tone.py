"""A speech engine without a model, for benchmarks.

It speaks each word of ``text`` as a tone of 0.1 s and 440 Hz, at 24 kHz.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from omni_actors.stages.base import Chunk, RequestId, StageContext, StageOutput, StageRequest
from omni_actors.stages.pausing import FlaggedPausing

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


class ToneEngine(FlaggedPausing):
    """Emits the sound of one word per request in each step."""

    def __init__(self, context: StageContext) -> None:
        self._requests: dict[RequestId, _Request] = {}

    @property
    def busy(self) -> bool:
        return any(request.ready for request in self._requests.values())

    def start(self, request: StageRequest) -> None:
        self._requests[request.request_id] = _Request()

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        request = self._requests[request_id]
        request.words += chunk.data.get("text", "").split()
        request.complete = chunk.last

    def abort(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

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

    def close(self) -> None:
        self._requests.clear()
