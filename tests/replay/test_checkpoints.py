"""Checkpoints that survive their worker: real processes, killed at chosen places of chosen steps.

The pipeline is encoder, sampler, decoder; the sampler makes checkpoints.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.errors import Aborted, StageCrashed
from omni_actors.generation import Generation, Output
from omni_actors.orchestrator.pieces import Input
from omni_actors.system import OmniSystem
from tests.replay.mortal import record_of
from tests.support.checkpointing_engine import Row, after, first_state, steps_done
from tests.support.echo_systems import generation_of, pid_of, read, until, wait_for, wait_restarted

STEPS, PREVIEWS, SIZE = 6, 2, 1000
STAGES = ("encoder", "sampler", "decoder")
PLACES = [
    (step, where)
    for step, where in itertools.product(range(1, STEPS + 1), ("begin", "output", "checkpoint", "end"))
    if not (where == "output" and step % PREVIEWS) and not (where == "checkpoint" and step == STEPS)
]
"""The places of steps, without outputs and checkpoints that steps do not have."""
_numbers = itertools.count()


def pipeline(
    log: Path, *, limits: Limits | None = None, standby: int = 0, replicas: int = 1, **options: Any
) -> Pipeline:
    quick = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
    sampler = Stage(
        engine="tests.support.checkpointing_engine:CheckpointingEngine",
        options={"log": str(log), "steps": STEPS, "previews": PREVIEWS, "size": SIZE, **options},
        resumable=True,
        inputs=("encoder",),
        restart=quick,
        standby=standby,
        replicas=replicas,
    )
    return Pipeline(
        name="checkpointing",
        stages={
            "encoder": Stage(engine="echo", accepts=("script",), restart=quick),
            "sampler": sampler,
            "decoder": Stage(engine="echo", inputs=("sampler",), emits="image", restart=quick, resumable=True),
        },
        limits=limits or Limits(replays=10),
    )


def ask(omni: OmniSystem, *kills: tuple[int, str, int, Path], **data: Any) -> Generation:
    """kills: the step, the place in it, the process (0: the sampler), the marker file."""
    return omni.submit({"script": [piece(*kills, **data)]}, ("image",))


def piece(*kills: tuple[int, str, int, Path], **data: Any) -> Input:
    return Input({"kills": [[step, where, pid, str(marker)] for step, where, pid, marker in kills], **data})


def expected_state(**options: Any) -> Row:
    state = first_state(SIZE)
    for step in range(1, STEPS + 1):
        state = after(state, step, **options)
    return state


def check_answer(outputs: list[Output], **options: Any) -> None:
    steps = [output.data["step"] for output in outputs]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS
    assert outputs[-1].finished
    final = outputs[-1].tensors["state"].numpy()
    assert np.array_equal(final, expected_state(**options))


def check_work(log: Path, generation: Generation, *, repeated: int) -> None:
    """At most so many steps of the request were made twice, and none was left out."""
    done = Counter(step for number, step in steps_done(log) if number == record_of(generation).number)
    assert sorted(done) == list(range(1, STEPS + 1))
    assert done.total() - len(done) <= repeated, done


def descriptors() -> int:
    """Return how many descriptors are open. Not ``open_descriptors``: what it freezes, polling would not collect."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def settled(omni: OmniSystem) -> None:
    await wait_for(omni, lambda: omni.health().ready)


async def check_deaths(omni: OmniSystem, log: Path, victim: str, places: Iterable[tuple[int, str]]) -> None:
    """Kill a stage at each of these places of a request of its own."""
    await settled(omni)
    before = descriptors()
    for step, where in places:
        pid, incarnation = 0 if victim == "sampler" else pid_of(omni, victim), generation_of(omni, victim)
        generation = ask(omni, (step, where, pid, log.with_name(f"{victim} {step} {where}")))
        check_answer(await read(generation))
        check_work(log, generation, repeated=1 if victim == "sampler" else 0)
        await wait_restarted(omni, victim, incarnation + 1)
        await until(lambda: descriptors() <= before)


async def endless(omni: OmniSystem, *kills: tuple[int, str, int, Path]) -> Generation:
    """Return a request that makes steps, and whose checkpoint memory has arrived."""
    before = descriptors()
    generation = ask(omni, *kills, steps=1_000_000, previews=1_000_000)
    await until(lambda: descriptors() > before)
    return generation


async def test_a_death_repeats_one_step_at_most(tmp_path: Path) -> None:
    """The worker dies before it has passed the memory on, in the middle, and with the last output under way."""
    async with OmniSystem.open(pipeline(log := tmp_path / "log")) as omni:
        await read(ask(omni))
        await check_deaths(omni, log, "sampler", [(1, "end"), (4, "output"), (STEPS, "output")])
        before = descriptors()
        (await endless(omni)).abort()
        await until(lambda: descriptors() <= before)


@pytest.mark.slow
@pytest.mark.parametrize("victim", STAGES)
async def test_a_death_at_every_place_of_every_step(victim: str, tmp_path: Path) -> None:
    async with OmniSystem.open(pipeline(log := tmp_path / "log")) as omni:
        await read(ask(omni))
        await check_deaths(omni, log, victim, PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("others", [{"standby": 1}, {"replicas": 2}])
async def test_another_worker_goes_on_from_the_checkpoint(others: dict[str, int], tmp_path: Path) -> None:
    async with OmniSystem.open(pipeline(log := tmp_path / "log", **others)) as omni:
        for step in (2, 5):
            generation = ask(omni, (step, "checkpoint", 0, tmp_path / f"died at {step}"))
            check_answer(await read(generation))
            check_work(log, generation, repeated=0)
            await settled(omni)


@pytest.mark.slow
async def test_every_death_of_one_request(tmp_path: Path) -> None:
    """The sampler dies in each step, and with it the decoder in every other one."""
    async with OmniSystem.open(pipeline(log := tmp_path / "log")) as omni:
        kills = [(step, "checkpoint", 0, tmp_path / f"{step}") for step in range(1, STEPS)]
        decoder = pid_of(omni, "decoder")
        generation = ask(omni, (3, "output", decoder, tmp_path / "decoder"), *kills)
        check_answer(await read(generation))
        check_work(log, generation, repeated=1)  # the first worker dies before it has passed the memory on


@pytest.mark.slow
async def test_nothing_is_left_of_requests_that_end_early(tmp_path: Path) -> None:
    async with OmniSystem.open(pipeline(tmp_path / "log")) as omni:
        await read(ask(omni))
        before = descriptors()
        (await endless(omni)).abort()
        await until(lambda: descriptors() <= before)
        generation = await endless(omni)
        await omni.sleep(2)
        with pytest.raises(Aborted):
            await read(generation)
        await omni.wake_up()
        await settled(omni)
        await until(lambda: descriptors() <= before)
        check_answer(await read(ask(omni)))
        await endless(omni)
    assert descriptors() < before


@pytest.mark.slow
async def test_a_death_in_a_pause(tmp_path: Path) -> None:
    async with OmniSystem.open(pipeline(log := tmp_path / "log")) as omni:
        generation = await endless(omni)
        await omni.pause_generation("keep")
        pid, made = pid_of(omni, "sampler"), len(steps_done(log))
        os.kill(pid, signal.SIGKILL)
        await wait_restarted(omni, "sampler", 2)
        assert len(steps_done(log)) == made
        await omni.resume_generation()
        await until(lambda: len(steps_done(log)) > made)
        generation.abort()
        steps = [step for _, step in steps_done(log)]
        assert steps[made] == made + 1, "the first one after the pause"


@pytest.mark.slow
async def test_a_request_that_is_not_replayed_has_no_checkpoint(tmp_path: Path) -> None:
    async with OmniSystem.open(pipeline(log := tmp_path / "log")) as omni:
        generation = omni.submit(
            {"script": [piece((3, "checkpoint", 0, tmp_path / "died"))]}, ("image",), on_failure="fail"
        )
        with pytest.raises(StageCrashed):
            await read(generation)
        assert len(steps_done(log)) == 3


@pytest.mark.slow
async def test_live_input_and_a_checkpoint(tmp_path: Path) -> None:
    """The sampler makes two steps of each piece, and dies when the next piece has arrived."""
    pieces, more = trio.open_memory_channel[Input](10), tmp_path / "died"
    send, receive = pieces

    async def segments() -> AsyncIterator[Input]:
        async with receive:
            async for each in receive:
                yield each

    async with OmniSystem.open(pipeline(log := tmp_path / "log")) as omni:
        generation = omni.submit({"script": segments()}, ("image",))
        send.send_nowait(piece((3, "output", 0, more), (4, "begin", 0, tmp_path / "again"), live=True))
        await until(lambda: log.exists() and len(steps_done(log)) == 2)
        send.send_nowait(piece(live=True))
        await until(lambda: (3 in dict(steps_done(log)).values()) or len(steps_done(log)) > 2)
        send.close()
        check_answer(await read(generation))
        check_work(log, generation, repeated=1)
