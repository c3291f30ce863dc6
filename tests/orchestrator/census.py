"""Pipelines of engines that count their requests or repeat their input, and requests to them."""

from __future__ import annotations

import os
import signal
from typing import Any

from omni_actors.config import Pipeline, Stage
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.system import OmniSystem
from tests.support.echo_systems import read, until

WATCHDOG_S = 60.0
MAX_REQUESTS = 3
CENSUS = """
    from collections import deque
    from omni_actors.stages.base import StageOutput

    class Census:
        '''Answers with the number of other requests that it holds. A request with ``hold`` gets no answer.'''

        def __init__(self, context):
            self.stage, self.held, self.answers = context.stage, set(), deque()

        @property
        def busy(self):
            return bool(self.answers)

        def start(self, request):
            self.held.add(request.request_id)

        def feed(self, request_id, chunk):
            if chunk.last and chunk.data.get("hold") != self.stage:
                self.answers.append((request_id, chunk.data))

        def abort(self, request_id):
            self.held.discard(request_id)
            self.answers = deque(each for each in self.answers if each[0] != request_id)

        def step(self):
            while self.answers:
                request_id, data = self.answers.popleft()
                self.held.remove(request_id)
                census = {**data.get("census", {}), self.stage: len(self.held)}
                yield StageOutput(request_id, {}, {**data, "census": census}, last=True)

        def close(self):
            pass
"""


ONE = Pipeline(name="one", stages={"only": Stage(engine="echo", accepts=("script",), emits="audio")})


def ask(omni: OmniSystem, *, modalities: tuple[str, ...] = ("audio",), **data: Any) -> Generation:
    return omni.submit({"script": [Input({"text": "x", **data})]}, modalities)


def in_flight(omni: OmniSystem) -> float:
    value = omni.metrics.registry.get_sample_value("omni_requests_in_flight")
    assert value is not None
    return value


async def is_free_everywhere(omni: OmniSystem) -> bool:
    """Whether no engine holds a request. Aborts reach every engine before the request that asks."""
    assert in_flight(omni) == 0
    (final,) = await read(ask(omni))
    return bool(final.data["census"] == {"top": 0, "bottom": 0})


async def lose_bottom(omni: OmniSystem) -> None:
    """Kill the worker of the last stage: requests wait until it has restarted."""
    pid = omni.health().stages["bottom"][0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: omni.health().stages["bottom"][0].state != "ready")
