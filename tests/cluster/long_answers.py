"""A pipeline whose answers last long enough for something to fail, and what must hold for them and their workers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import trio
from msgspec import structs

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Stage
from omni_actors.errors import StageCrashed
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.stages.echo.engine import payload
from tests.cluster.writing_engine import LOG
from tests.support.echo_systems import OFTEN, WATCHDOG_S, read

OUTPUTS, PAYLOAD_BYTES = 60, 20_000
FRAIL = 8
"""How many requests are lost at a time."""


def long_answers(writers: Path | None = None, *, step_s: float = 0.01) -> Pipeline:
    """Each request has ``OUTPUTS`` outputs, one every ``step_s``. writers: where workers log their lives."""
    engine = "echo" if writers is None else "tests.cluster.writing_engine:Writing"
    environment = {} if writers is None else {LOG: str(writers)}
    options = {"step_s": step_s, "fan_out": OUTPUTS, "payload_bytes": PAYLOAD_BYTES}
    both = {"restart": OFTEN, "ring_bytes": 65536, "deterministic": True, "load_timeout_s": 60.0, "env": environment}
    first = Stage(engine=engine, accepts=("script",), emits="text", options=options, **both)
    second = Stage(engine=engine, inputs=("first",), emits="audio", options={"payload_bytes": PAYLOAD_BYTES}, **both)
    return Pipeline(name="nodes", stages={"first": first, "second": second})


def with_frail(pipeline: Pipeline) -> Pipeline:
    """Add a stage "frail", which can neither be replayed nor resumed. Its answers do not end by themselves."""
    options = {"step_s": 0.05, "fan_out": 1_000_000}
    frail = structs.replace(pipeline.stages["first"], emits="image", options=options, deterministic=False)
    return structs.replace(pipeline, stages={**pipeline.stages, "frail": frail})


def assert_one_writer_at_a_time(log: Path) -> int:
    """Check that no two processes of a stage lived in the same time. Return how many there were."""
    times: dict[tuple[str, int], list[int]] = {}
    for line in log.read_text().splitlines():
        stage, pid, at = line.split()
        times.setdefault((stage, int(pid)), []).append(int(at))
    for stage in {stage for stage, _ in times}:
        spans = sorted((min(each), max(each)) for (name, _), each in times.items() if name == stage)
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(spans)), (stage, spans)
    return len(times)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. Its parent has ended, too, so it may wait for long to be reaped."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def wait_ended(*pids: int) -> None:
    """Wait until processes have ended. Another process may reap them."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            with trio.fail_after(WATCHDOG_S):
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)


def ask_long(omni: OmniSystem) -> Generation:
    return omni.submit({"script": [Input({"text": "x"})]}, ("text", "audio"))


def check_exact(generation: Generation, outputs: list[Output], count: int = OUTPUTS) -> None:
    """The client got each output of each stage once, whole and in order."""
    number = generation.stream.request.number
    assert number is not None
    for stage in ("first", "second"):
        mine = [output for output in outputs if output.stage == stage]
        assert [output.finished for output in mine] == [False] * (count - 1) + [True]
        for seq, output in enumerate(mine):
            assert np.array_equal(output.tensors["payload"].numpy(), payload(number, seq, PAYLOAD_BYTES))


async def read_until_first(generation: Generation, then: Callable[[], None]) -> list[Output]:
    """Read all outputs, and call ``then`` when the first has arrived."""
    outputs: list[Output] = []
    with trio.fail_after(WATCHDOG_S):
        async for output in generation:
            if not outputs:
                then()
            outputs.append(output)
    return outputs


async def begin_frail(omni: OmniSystem) -> Generation:
    """Submit a request to the stage "frail", and read its first output: so the stage has begun, and is not replayed."""
    generation = omni.submit({"script": [Input({"text": "x"})]}, ("image",))
    with trio.fail_after(WATCHDOG_S):
        assert not (await anext(generation)).finished
    return generation


async def lose_in_flight(omni: OmniSystem, node: str, lose: Callable[[], None]) -> None:
    """Call ``lose``, which loses the node of the stage "frail", while requests are in flight. One goes on, or begins
    again, and its answer is exact. Those of "frail" end with the facts.
    """
    frail = [await begin_frail(omni) for _ in range(FRAIL)]
    ended = list[StageCrashed]()

    async def read_to_its_end(generation: Generation) -> None:
        with pytest.raises(StageCrashed) as caught:
            await read(generation)
        ended.append(caught.value)

    async with trio.open_nursery() as nursery:
        for each in frail:
            nursery.start_soon(read_to_its_end, each)
        check_exact(generation := ask_long(omni), await read_until_first(generation, lose))
    assert len(ended) == FRAIL
    for error in ended:
        assert error.stage == "frail"
        assert error.exit.node == node  # it names no "NodeLost" if the worker ended before its agent
        assert (
            error.not_replayed
            == "stage 'frail' is neither deterministic nor resumable, and its earlier output is in use"
        )


async def check_served(omni: OmniSystem) -> None:
    """All stages serve new requests."""
    check_exact(generation := ask_long(omni), await read(generation))
    (await begin_frail(omni)).abort()
