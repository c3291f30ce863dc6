"""A stage whose chunks were evicted computes them again, where a downstream stage starts again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

from omni_actors.errors import StageCrashed
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.system import OmniSystem
from tests.replay.mortal import PIECES, WATCHDOG_S, all_ready, ask, check_exact, dies
from tests.support.echo_systems import read
from tests.support.shared_system import SharedSystem, with_shared_system

SIZE = 300_000
"""Bytes of each chunk. A stage evicts after a few of them, in the middle of the request."""


async def check(omni: OmniSystem, *generations: Generation) -> None:
    with trio.fail_after(WATCHDOG_S):
        for generation in generations:
            check_exact(generation, await read(generation), stages=("third",))
    await all_ready(omni)


def spoken(omni: OmniSystem, *deaths: tuple[int, str, str, str], size: int = SIZE, **arguments: Any) -> Generation:
    """Ask for the output of the last stage alone: so each stage feeds one other only."""
    return ask(omni, *deaths, size=size, modalities=("audio",), **arguments)


@pytest.mark.parametrize("stage", ["second", "third"])
@pytest.mark.parametrize("where", ["feed", "before", "after", "end"])
@pytest.mark.slow
def test_a_death_in_any_moment_repeats_and_loses_nothing(shared_system: SharedSystem, stage: str, where: str) -> None:
    async def work(omni: OmniSystem) -> None:
        for at in (0, 2, PIECES - 1) if where != "end" else (PIECES - 1,):
            await check(omni, spoken(omni, dies(at, stage, where)))

    shared_system.run(work)


@with_shared_system
async def test_stages_that_die_while_others_compute_again(omni: OmniSystem) -> None:
    deaths = [dies(PIECES - 1, "third", "after"), dies(1, "second", "after"), dies(PIECES - 1, "first", "after")]
    await check(omni, spoken(omni, *deaths))


@with_shared_system
async def test_other_requests_of_the_same_workers_go_on(omni: OmniSystem) -> None:
    small = [spoken(omni, size=0) for _ in range(3)]
    dying = spoken(omni, dies(PIECES - 1, "second", "after"))
    await check(omni, *small, dying, *(spoken(omni) for _ in range(2)))


@with_shared_system
async def test_on_failure_fail_computes_nothing_again(omni: OmniSystem) -> None:
    with pytest.raises(StageCrashed):
        await read(spoken(omni, dies(PIECES - 1, "second", "after"), on_failure="fail"))
    await all_ready(omni)


@with_shared_system
@pytest.mark.slow
async def test_a_request_that_kills_its_workers_ends_and_the_others_go_on(omni: OmniSystem) -> None:
    """Also where its chunks, and those of the others, are computed again for each of its replays."""
    poison = [Input({"n": n, "dies": [], "echo": {}}, {"x": np.zeros(SIZE, np.uint8)}) for n in range(PIECES - 1)]
    poison.append(Input({"n": PIECES - 1, "echo": {"stage": "second", "raise": "step"}}))
    culprit = omni.submit({"script": poison}, ["audio"])
    others = [spoken(omni) for _ in range(3)]
    with trio.fail_after(WATCHDOG_S), pytest.raises(StageCrashed, match="exited with code 1"):
        await read(culprit)
    await check(omni, *others)
