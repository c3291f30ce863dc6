"""When one request, alone in the system, passes each point of its path through all processes.

The workers' points are the statistics that every stage reports anyway. The parent's are taken by wrapping the calls
that post a message, write a packet, send input and receive output. All are CLOCK_MONOTONIC, so they compare across
processes.
"""

from __future__ import annotations

import functools
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import trio
from rich.table import Table

from bench.pipeline.load import Cell
from bench.pipeline.ours import MODALITIES, pipeline
from omni_actors import OmniSystem
from omni_actors.orchestrator.pieces import Input, Piece
from omni_actors.orchestrator.readers import Readers
from omni_actors.orchestrator.request import Request
from omni_actors.protocol import mailbox, messages
from omni_actors.supervisor.edges import InputEdge
from omni_actors.supervisor.replica import Replica

PAYLOAD = np.zeros(1024, np.uint8)
WARM_UP = 20
PAUSE_S = 0.005
"""Between two requests, so that each meets a system at rest."""


async def measure(requests: int) -> dict[str, list[float]]:
    """Trace this many requests, one after the other. Returns, by point, the seconds since each was submitted."""
    points: dict[str, list[float]] = {}
    async with OmniSystem.open(pipeline(Cell(1, PAYLOAD.nbytes))) as omni:
        for number in range(requests + WARM_UP):
            passed = await _trace(omni)
            if number >= WARM_UP:
                for point, seconds in passed.items():
                    points.setdefault(point, []).append(seconds)
            await trio.sleep(PAUSE_S)
    return points


def table(points: dict[str, list[float]]) -> Table:
    """Return the points in the order of their medians."""
    drawn = Table("point", "p50", "since the point before", "p90", title="a request through three stages, µs")
    medians = sorted((statistics.median(seconds), point) for point, seconds in points.items())
    before = 0.0
    for median, point in medians:
        p90 = statistics.quantiles(points[point], n=10)[-1]
        drawn.add_row(point, f"{median * 1e6:,.0f}", f"{(median - before) * 1e6:,.0f}", f"{p90 * 1e6:,.0f}")
        before = median
    return drawn


async def _trace(omni: OmniSystem) -> dict[str, float]:
    passed: dict[str, float] = {}
    with _watching_parent(passed):
        began = time.monotonic()
        generation = omni.submit({"messages": [Input({}, {"body": PAYLOAD})]}, MODALITIES)
        passed["submit has returned"] = time.monotonic()
        async for output in generation:
            metrics = output.metrics
        passed["the client has the output"] = time.monotonic()
    assert metrics is not None
    request = generation.stream.request
    passed["the request has ended"] = request.submitted + metrics.total_s
    for stage, times in metrics.stages.items():
        for point, seconds in (
            ("Start handled", times.started_s),
            ("chunk received", times.first_input_s),
            ("output made", times.first_output_s),
            ("finished", times.finished_s),
        ):
            passed[f"{stage}: {point}"] = request.submitted + (seconds or 0.0)
    return {point: at - began for point, at in passed.items()}


@contextmanager
def _watching_parent(passed: dict[str, float]) -> Iterator[None]:
    """Record in ``passed`` when the parent posts and writes each ``Start``, sends the input and receives the output."""
    post, send_fds, send, arrive = Replica.post, socket.send_fds, InputEdge.send, Readers.arrive

    def posting(replica: Replica, message: messages.ControlMessage, *rest: Any, **options: Any) -> None:
        post(replica, message, *rest, **options)
        if isinstance(message, messages.Start):
            passed[f"{replica.address.stage}: Start posted"] = time.monotonic()

    def writing(sock: socket.socket, packets: list[bytes], *rest: Any) -> int:
        began = time.monotonic()
        written = send_fds(sock, packets, *rest)
        for message in messages.unpack(packets[0]):
            if isinstance(message, messages.Start):
                passed["first: Start is being written"] = began  # those of the other stages are written when posted
                passed["first: Start written"] = time.monotonic()
        return written

    @functools.wraps(send)
    async def sending(edge: InputEdge, *rest: Any) -> None:
        await send(edge, *rest)
        passed["the input is in the ring"] = time.monotonic()

    def arriving(readers: Readers, request: Request, piece: Piece) -> None:
        passed.setdefault("the output has arrived in the parent", piece.arrived)
        arrive(readers, request, piece)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Replica, "post", posting))
        stack.enter_context(mock.patch.object(mailbox.socket, "send_fds", writing))
        stack.enter_context(mock.patch.object(InputEdge, "send", sending))
        stack.enter_context(mock.patch.object(Readers, "arrive", arriving))
        yield
