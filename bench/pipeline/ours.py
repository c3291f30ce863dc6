"""Our contender: an ``OmniSystem`` with three ``echo`` stages and a trio task for each client. And what it is made of:
trio and the rings, without a system that could lose a stage and still answer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import trio

from bench.pipeline.load import Cell, Meter, running
from omni_actors import OmniSystem
from omni_actors.config import Limits, Pipeline, Stage
from omni_actors.orchestrator.pieces import Input
from omni_actors.platform.allocator import keep_freed_memory
from omni_actors.protocol import chunks
from omni_actors.supervisor.edges import InputEdge, receive_frames
from omni_actors.system.garbage import make_full_collections_rare
from ringbuf import Ring

MODALITIES = ("text",)
STAGES = 3
RING_BYTES = 64 * 1024**2
PAYLOADS_IN_A_RING = 16
"""A pipeline for large payloads has larger rings than the default, so that a stage takes several at a time."""
UNREAD_BYTES = 4 * 1024**3
"""More than any load has in flight, so that no request ends for a bound that the peers do not have."""


def pipeline(cell: Cell) -> Pipeline:
    """Return the pipeline for a load. It admits as many requests at a time as are in flight."""
    ring_bytes = max(Stage(engine="echo").ring_bytes, PAYLOADS_IN_A_RING * cell.size)
    return Pipeline(
        name="bench",
        stages={
            "first": Stage(engine="echo", accepts=("messages",), ring_bytes=ring_bytes),
            "second": Stage(engine="echo", inputs=("first",), ring_bytes=ring_bytes),
            "third": Stage(engine="echo", inputs=("second",), emits="text", ring_bytes=ring_bytes),
        },
        limits=Limits(max_requests=cell.in_flight, output_bytes=UNREAD_BYTES, unread_bytes=UNREAD_BYTES),
    )


class Ours:
    """Three ``echo`` stages. A request is answered when the client has its one output and every stage has finished."""

    name = "ours"

    def run(self, meter: Meter) -> None:
        trio.run(self._run, meter)

    async def _run(self, meter: Meter) -> None:
        payload = np.frombuffer(meter.payload, np.uint8)
        async with OmniSystem.open(pipeline(meter.cell)) as omni:
            make_full_collections_rare()  # the server calls both
            keep_freed_memory()

            async def client() -> None:
                while (number := meter.submit()) is not None:
                    piece = Input({"number": number}, {"body": payload})
                    async for output in omni.submit({"messages": [piece]}, MODALITIES):
                        answered, size = output.data["number"], output.tensors["body"].data.nbytes
                        del output  # the peers' clients drop an answer too when they have read it
                    meter.complete(answered, size)

            async with trio.open_nursery() as clients:
                for _ in range(meter.cell.in_flight):
                    clients.start_soon(client)
            with meter.idle() as idle_s:
                await trio.sleep(idle_s)


class RingsOnly:
    """Our rings, chunks and event loop, and nothing else: what no design of the rest can be faster than.

    The parent sends a chunk to the first of three processes and awaits the one that the third sends, with a trio task
    for each client. There is no ``Start``, admission, deadline, statistics or account; no death is noticed.
    """

    name = "our rings and trio alone"

    def run(self, meter: Meter) -> None:
        rings = [Ring.create(RING_BYTES) for _ in range(STAGES + 1)]
        with running(_repeat, pairwise(rings)):
            trio.run(self._run, meter, rings[0], rings[-1])

    async def _run(self, meter: Meter, there: Ring, back: Ring) -> None:
        edge, payload = InputEdge(there.claim_producer(), kill=print), np.frombuffer(meter.payload, np.uint8)
        turn = trio.Lock()  # of the clients that wait for room
        answers: dict[int, tuple[trio.Event, list[int]]] = {}

        async def receive() -> None:
            async for frame in receive_frames(back.claim_consumer()):
                with frame:
                    header, tensors = chunks.decode(memoryview(bytearray(frame.data)))
                event, sizes = answers.pop(header.request)
                sizes.append(tensors["body"].data.nbytes)
                event.set()

        async def client() -> None:
            while (number := meter.submit()) is not None:
                answers[number] = answer = trio.Event(), list[int]()
                chunk = chunks.encode(_header(number, "client"), {"body": payload})
                if turn.locked() or edge.try_send(chunk) is None:
                    async with turn:
                        await edge.send(chunk)
                await answer[0].wait()
                meter.complete(number, *answer[1])

        async with trio.open_nursery() as receiving:
            receiving.start_soon(receive)
            async with trio.open_nursery() as clients:
                for _ in range(meter.cell.in_flight):
                    clients.start_soon(client)
            with meter.idle() as idle_s:
                await trio.sleep(idle_s)
            receiving.cancel_scope.cancel()


def _header(number: int, source: str) -> chunks.ChunkHeader:
    return chunks.ChunkHeader(request=number, source=source, seq=0, last=True, data={"number": number})


def _repeat(source: Ring, target: Ring) -> None:
    consumer, producer = source.claim_consumer(), target.claim_producer()
    while True:
        with consumer.recv() as frame:
            header, tensors = chunks.decode(frame.data)
            producer.send(*chunks.encode(_header(header.request, "stage"), tensors))
