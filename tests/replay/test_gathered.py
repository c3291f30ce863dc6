"""Replay where each stage gets its input whole (``async_chunk: off``): outputs as in a run without a death."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import trio

from omni_actors.system import OmniSystem
from tests.replay.mortal import FAN_OUT, PIECES, STAGES, ask, check_exact, dies, generations, pipeline, wait_restarted
from tests.support.echo_systems import read
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system
from tests.support.worlds import wait_for_clocks


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], markers: Path) -> Iterator[SharedSystem]:
    gathered = msgspec.structs.replace(pipeline(), async_chunk=False)
    with open_shared_system(lambda: OmniSystem.open(gathered), fixture_processes) as shared_system:
        yield shared_system


def test_a_stage_begins_when_its_input_is_complete(
    shared_system: SharedSystem, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The first stage holds its last output back until the client has all of its others.

    The clocks of other nodes are known to some milliseconds only, so there the order of two stages tells nothing that
    is closer.
    """
    margin_s = 0.0 if pytestconfig.getoption("--world") == "local" else 0.02
    held = tmp_path / "held"
    os.mkfifo(held)

    async def work(omni: OmniSystem) -> None:
        await read(ask(omni))  # an engine's first step takes longer than those to come
        await wait_for_clocks(omni, margin_s)
        generation = ask(omni, data={"held": str(held)})
        outputs = [await anext(generation) for _ in range(PIECES * FAN_OUT - 1)]
        await trio.Path(held).write_bytes(b"")
        outputs += await read(generation)
        check_exact(generation, outputs)
        assert outputs[-1].metrics is not None
        stages = [outputs[-1].metrics.stages[stage] for stage in STAGES]
        for above, below in itertools.pairwise(stages):
            assert below.first_output_s is not None
            assert below.first_output_s > above.finished_s - margin_s

    shared_system.run(work)


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage == "second" else pytest.mark.slow) for stage in STAGES]
)
def test_a_death_at_any_point_changes_no_output(shared_system: SharedSystem, stage: str) -> None:
    async def work(omni: OmniSystem) -> None:
        before = generations(omni)
        for deaths, (at, where) in enumerate([(0, "feed"), (2, "after"), (PIECES - 1, "end")], 1):
            generation = ask(omni, dies(at, stage, where))
            check_exact(generation, await read(generation), None if where == "end" else 1)
            await wait_restarted(omni, {stage: before[stage] + deaths})

    shared_system.run(work)


@pytest.mark.slow
@with_shared_system
async def test_a_source_that_dies_while_its_output_is_gathered(omni: OmniSystem) -> None:
    """The consumer keeps what it has gathered, and takes the rest from the new incarnation."""
    for where in ("before", "after"):
        generation = ask(omni, dies(PIECES - 1, "first", where), dies(PIECES - 1, "second", where))
        check_exact(generation, await read(generation))
