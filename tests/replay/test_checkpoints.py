"""Checkpoints that survive their worker: real processes, killed at every place of every step.

The pipeline is encoder, sampler, decoder; the sampler makes checkpoints.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.generation import Output
from omni_actors.orchestrator.pieces import Input
from omni_actors.system import OmniSystem
from tests.replay.mortal import record_of
from tests.support.checkpointing_engine import Row, after, first_state, steps_done
from tests.support.echo_systems import pid_of, read, wait_for
from tests.support.open_descriptors import open_descriptors

STEPS, PREVIEWS, SIZE = 6, 2, 1000
STAGES = ("encoder", "sampler", "decoder")
PLACES = ("begin", "output", "checkpoint", "end")
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


def ask(omni: OmniSystem, *kills: tuple[int, str, int, Path], pieces: int = 1, **arguments: Any) -> Any:
    """kills: the step, the place in it, the process (0: the sampler), the marker file."""
    encoded = [[step, where, pid, str(marker)] for step, where, pid, marker in kills]
    data = [{"kills": encoded if number == 0 else []} for number in range(pieces)]
    return omni.submit({"script": [Input(each) for each in data]}, ("image",), **arguments)


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


def check_work(log: Path, generation: Any, *, repeated: int) -> None:
    """At most so many steps of the request were made twice, and none was left out."""
    done = Counter(step for number, step in steps_done(log) if number == record_of(generation).number)
    assert sorted(done) == list(range(1, STEPS + 1))
    assert done.total() - len(done) <= repeated, done


async def settled(omni: OmniSystem) -> None:
    await wait_for(omni, lambda: omni.health().ready)


@pytest.mark.parametrize("victim", STAGES)
async def test_a_death_at_every_place_of_every_step(victim: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with OmniSystem.open(pipeline(log)) as omni:
        await read(ask(omni))
        for step, where in itertools.product(range(1, STEPS + 1), PLACES):
            await settled(omni)
            before = len(open_descriptors())
            pid = 0 if victim == "sampler" else pid_of(omni, victim)
            generation = ask(omni, (step, where, pid, tmp_path / f"{step} {where}"))
            check_answer(await read(generation))
            check_work(log, generation, repeated=1 if victim == "sampler" else 0)
            await settled(omni)
            assert len(open_descriptors()) == before
