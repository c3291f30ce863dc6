"""Input of many requests that waits for room in the ring of one worker."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from omni_actors.config import Limits
from omni_actors.errors import Aborted, InvalidRequest
from omni_actors.generation import Generation
from omni_actors.orchestrator.inputs import QUEUE_BYTES_A_TURN, InputMover
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.routes import Node, plan
from omni_actors.protocol import chunks
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.edges import InputEdge
from omni_actors.system import OmniSystem
from ringbuf import Ring
from tests.orchestrator.census import WATCHDOG_S, in_flight
from tests.support.echo_systems import one_stage, read, until

RING_BYTES = 8192
REQUESTS = 60
FILLED = 10
"""More requests than the ring has room for, and fewer than ``REQUESTS``."""


class StoppedWorker:
    """A system of one echo stage, whose worker is stopped, so that no input leaves its ring."""

    def __init__(self, omni: OmniSystem) -> None:
        self.omni = omni
        pid = omni.health().stages["only"][0].pid
        assert pid is not None
        self.pid = pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # all its threads stand still

    def submit(self, *numbers: int, **data: Any) -> Generation:
        """Submit a request with a piece of 1 KiB for each number."""
        payload = {"body": np.zeros(1024, np.uint8)}
        pieces = [Input({"n": number, **data}, payload) for number in numbers]
        return self.omni.submit({"script": pieces}, ["audio"])

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@asynccontextmanager
async def stopped_worker() -> AsyncIterator[StoppedWorker]:
    async with OmniSystem.open(one_stage(ring_bytes=RING_BYTES), **{"limits.max_requests": 2 * REQUESTS}) as omni:
        worker = StoppedWorker(omni)
        try:
            yield worker
        finally:
            worker.resume()


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def numbers(generation: Generation) -> list[int]:
    return [output.data["n"] for output in await read(generation)]


async def test_one_task_sends_the_input_of_all_requests_that_wait() -> None:
    async with stopped_worker() as worker:
        before = tasks()
        running = [worker.submit(number) for number in range(REQUESTS)]
        await trio.testing.wait_all_tasks_blocked()
        assert tasks() == before + 1
        worker.resume()
        for number, generation in enumerate(running):
            assert await numbers(generation) == [number]
        await until(lambda: tasks() == before)


async def test_input_of_several_pieces_that_fits_is_sent_at_once() -> None:
    async with stopped_worker() as worker:
        before = tasks()
        running = [worker.submit(1, 2), worker.submit(3)]
        assert tasks() == before
        worker.resume()
        assert [await numbers(generation) for generation in running] == [[1, 2], [3]]


async def test_a_request_that_is_aborted_while_it_waits_is_forgotten_and_the_others_are_sent() -> None:
    async with stopped_worker() as worker:
        before = tasks()
        running = [worker.submit(number) for number in range(REQUESTS)]
        await trio.testing.wait_all_tasks_blocked()
        aborted = [generation for number, generation in enumerate(running) if number % 3]
        for generation in aborted:  # the one whose piece is being sent, too
            generation.abort()
        assert in_flight(worker.omni) == REQUESTS - len(aborted)
        worker.resume()
        for number, generation in enumerate(running):
            if generation not in aborted:
                assert await numbers(generation) == [number]
            else:
                with pytest.raises(Aborted):
                    await read(generation)
        await until(lambda: tasks() == before)


async def test_the_task_ends_when_all_that_wait_are_aborted() -> None:
    async with stopped_worker() as worker:
        before = tasks()
        running = [worker.submit(number) for number in range(REQUESTS)]
        await trio.testing.wait_all_tasks_blocked()
        for generation in running:
            generation.abort()
        await until(lambda: tasks() == before)


async def test_invalid_input_that_waits_ends_its_own_request_only() -> None:
    async with stopped_worker() as worker:
        running = [worker.submit(number) for number in range(FILLED)]
        invalid = worker.submit(0, unknown=object())
        running += [worker.submit(number) for number in range(FILLED, REQUESTS)]
        await trio.testing.wait_all_tasks_blocked()
        worker.resume()
        for number, generation in enumerate(running):
            assert await numbers(generation) == [number]
        with pytest.raises(InvalidRequest, match="the input cannot be encoded"):
            await read(invalid)


async def test_a_long_input_does_not_keep_a_short_one_waiting_until_its_end() -> None:
    async with stopped_worker() as worker:
        running = [worker.submit(number) for number in range(FILLED)]
        long, short = worker.submit(*range(REQUESTS)), worker.submit(7)
        await trio.testing.wait_all_tasks_blocked()
        ended: list[str] = []

        async def wait_for(name: str, generation: Generation, expected: list[int]) -> None:
            assert await numbers(generation) == expected
            ended.append(name)

        with trio.fail_after(WATCHDOG_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for, "long", long, list(range(REQUESTS)))
                nursery.start_soon(wait_for, "short", short, [7])
                worker.resume()
        assert ended == ["short", "long"]
        for generation in running:
            await read(generation)


async def test_what_waits_for_a_worker_that_dies_goes_to_its_successor() -> None:
    async with stopped_worker() as worker:
        before = tasks()
        running = [worker.submit(number, -number) for number in range(REQUESTS)]
        await trio.testing.wait_all_tasks_blocked()
        os.kill(worker.pid, signal.SIGKILL)
        for number, generation in enumerate(running):
            assert await numbers(generation) == [number, -number]
        await until(lambda: tasks() == before)
        worker.pid = os.getpid()  # nothing is left to resume


ROUTE = plan({"only": Node(accepts=("script",), emits="audio")}, ["script"], ["audio"])
ONLY = Address("only", 0)


def dispatched(number: int, pieces: int, size: int) -> Request:
    """A request that a replica has started, and that lacks all of its input. size: bytes of each piece."""
    script = [Input({"n": each}, {"body": np.zeros(size, np.uint8)}) for each in range(pieces)]
    request = Request(
        name=str(number),
        route=ROUTE,
        inputs={"script": script},
        params={},
        deadline_s=1.0,
        submitted=0.0,
        number=number,
    )
    request.replay_state.dispatched({"only": ONLY})
    request.input.make_due(["only"])
    return request


def start_again(request: Request) -> None:
    """Let a replica that lives start the request again, as after its outputs were evicted."""
    request.replay_state.lost("only")
    request.replay_state.wait_for(["only"])
    request.replay_state.restarted({"only": ONLY})
    request.replay_state.started("only")
    request.input.restart("only")


async def test_other_tasks_run_between_the_large_pieces_of_an_input() -> None:
    piece_bytes, pieces = QUEUE_BYTES_A_TURN // 4, 20
    ring = Ring.create(2 * pieces * piece_bytes)
    edges: Any = SimpleNamespace(inputs={ONLY: InputEdge(ring.claim_producer(), kill=pytest.fail)})
    mover = InputMover(edges, Limits(), end=lambda *_: pytest.fail("it ended"), require_admissible=lambda _: None)
    consumer, sent = ring.claim_consumer(), [0]
    with trio.fail_after(WATCHDOG_S):
        async with trio.open_nursery() as nursery:
            mover.nursery = nursery
            mover.send(dispatched(1, pieces, piece_bytes))
            while sum(sent) < pieces:
                await trio.lowlevel.checkpoint()
                sent.append(0)
                while (frame := consumer.try_recv()) is not None:
                    frame.release()
                    sent[-1] += 1
    assert 4 <= max(sent) <= 8, "between two checkpoints of this task, the other one has a turn or two"


@pytest.mark.parametrize("size", [900, 6000], ids=["whole", "in fragments"])
@pytest.mark.parametrize("seed", range(30))
async def test_a_stage_that_starts_again_is_sent_its_input_from_the_first_piece_on(size: int, seed: int) -> None:
    draw = random.Random(seed)
    ring = Ring.create(RING_BYTES)
    edge, consumer = InputEdge(ring.claim_producer(), kill=pytest.fail), ring.claim_consumer()
    edges: Any = SimpleNamespace(inputs={ONLY: edge})
    mover = InputMover(
        edges, Limits(), end=lambda *_: pytest.fail("a request ended"), require_admissible=lambda _: None
    )
    requests = [dispatched(number, draw.randint(1, 12), size) for number in range(1, 5)]
    restarts = dict.fromkeys(requests, 2)
    received: dict[int, list[int]] = {request.dispatched_number: [] for request in requests}
    with trio.fail_after(WATCHDOG_S):
        async with trio.open_nursery() as nursery:
            mover.nursery = nursery
            for request in requests:
                mover.send(request)
            arrived = True
            while arrived or any(restarts.values()) or not all(request.input.all_sent for request in requests):
                for request in requests:
                    if restarts[request] and draw.random() < 0.3:
                        restarts[request] -= 1
                        start_again(request)
                        mover.send(request)
                await trio.testing.wait_all_tasks_blocked()
                arrived = False
                for _ in range(draw.randint(1, 3)):
                    if (frame := consumer.try_recv()) is not None:
                        arrived = True
                        with frame:
                            header, _ = chunks.decode(frame.data)
                        received[header.request].append(header.seq)
    for request in requests:
        seqs = received[request.dispatched_number]
        latest = len(seqs) - 1 - seqs[::-1].index(0)
        assert seqs[latest:] == list(range(len(request.input.fixed["script"])))
