"""Our contender: an ``OmniSystem`` with three ``echo`` stages and a trio task for each client."""

from __future__ import annotations

import numpy as np
import trio

from bench.pipeline.load import Meter
from omni_actors import OmniSystem
from omni_actors.config import Limits, Pipeline, Stage
from omni_actors.orchestrator.pieces import Input

MODALITIES = ("text",)
UNREAD_BYTES = 4 * 1024**3
"""More than any load has in flight, so that no request ends for a bound that the peers do not have."""


def pipeline(requests: int) -> Pipeline:
    """Return the pipeline. requests: how many it admits at a time."""
    return Pipeline(
        name="bench",
        stages={
            "first": Stage(engine="echo", accepts=("messages",)),
            "second": Stage(engine="echo", inputs=("first",)),
            "third": Stage(engine="echo", inputs=("second",), emits="text"),
        },
        limits=Limits(max_requests=requests, output_bytes=UNREAD_BYTES, unread_bytes=UNREAD_BYTES),
    )


class Ours:
    """Three ``echo`` stages. A request is answered when the client has its one output and every stage has finished."""

    name = "ours"

    def run(self, meter: Meter) -> None:
        trio.run(self._run, meter)

    async def _run(self, meter: Meter) -> None:
        payload = np.frombuffer(meter.payload, np.uint8)
        async with OmniSystem.open(pipeline(meter.cell.in_flight)) as omni:

            async def client() -> None:
                while (number := meter.submit()) is not None:
                    piece = Input({"number": number}, {"body": payload})
                    async for output in omni.submit({"messages": [piece]}, MODALITIES):
                        answered, size = output.data["number"], output.tensors["body"].data.nbytes
                    meter.complete(answered, size)

            async with trio.open_nursery() as clients:
                for _ in range(meter.cell.in_flight):
                    clients.start_soon(client)
            with meter.idle() as idle_s:
                await trio.sleep(idle_s)
