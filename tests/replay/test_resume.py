"""Resumable stages with real processes and signals: the client gets one continuous answer, whichever workers die.

The engine decides at random, so an answer with a repeated decision in it is not the same as the undisturbed one.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import StageCrashed
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.system import OmniSystem
from tests.replay.mortal import generations, read_and_kill, wait_restarted
from tests.support.echo_systems import read

PIECES, FAN_OUT = 6, 2
STAGES = ("first", "second", "third")


def pipeline(dies: dict[str, dict[str, Any]], replicas: int = 1) -> Pipeline:
    quick = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)

    def stage(name: str, **wiring: Any) -> Stage:
        return Stage(
            engine="tests.support.deciding_engine:DecidingEngine",
            options={"fan_out": FAN_OUT, "step_s": 0.002, **dies.get(name, {})},
            resumable=True,
            restart=quick,
            replicas=replicas,
            **wiring,
        )

    return Pipeline(
        name="deciding",
        stages={
            "first": stage("first", accepts=("script",), emits="text"),
            "second": stage("second", inputs=("first",)),
            "third": stage("third", inputs=("second",), emits="audio"),
        },
    )


def check_continuous(outputs: list[Output]) -> None:
    """Every output is there once, in order, and all follow from the same decisions."""
    firsts = [output.data["trail"] for output in outputs if output.stage == "first"]
    thirds = [output.data["trail"] for output in outputs if output.stage == "third"]
    assert [number for [[number, _]] in firsts] == list(range(PIECES * FAN_OUT))
    assert [last for _, _, [last, _] in thirds] == list(range(PIECES * FAN_OUT**3))
    seconds: dict[int, int] = {}
    for index, (first, second, _) in enumerate(thirds):
        assert first == firsts[index // FAN_OUT**2][0]
        assert second[0] == index // FAN_OUT
        assert seconds.setdefault(second[0], second[1]) == second[1]
    assert outputs[-1].metrics is not None


def submit(omni: OmniSystem) -> Any:
    return omni.submit({"script": [Input({"n": n}) for n in range(PIECES)]}, ("text", "audio"))


DEATHS = [(stage, at) for at in (0, 3, PIECES * FAN_OUT - 1) for stage in STAGES]


@pytest.mark.parametrize(
    ("stage", "at"),
    # Each stage and each output once in `make test`.
    [pytest.param(*death, marks=() if number % 4 == 0 else pytest.mark.slow) for number, death in enumerate(DEATHS)],
)
async def test_a_death_at_any_output(stage: str, at: int, tmp_path: Path) -> None:
    dies = {stage: {"dies_at": at, "marker": str(tmp_path / "died")}}
    async with OmniSystem.open(pipeline(dies)) as omni:
        check_continuous(await read(submit(omni)))
        await wait_restarted(omni, {stage: 2})
        assert generations(omni) == {**dict.fromkeys(STAGES, 1), stage: 2}


def deterministic_behind_resumable(**options: Any) -> Pipeline:
    """options: of the resumable stage. The deterministic one repeats its outputs."""
    quick = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
    first = Stage(
        engine="tests.support.deciding_engine:DecidingEngine",
        options={"fan_out": 20, "step_s": 0.002, **options},
        resumable=True,
        accepts=("script",),
        restart=quick,
    )
    second = Stage(engine="echo", inputs=("first",), emits="audio", restart=quick)
    return Pipeline(name="repeating", stages={"first": first, "second": second})


def submit_repeating(omni: OmniSystem) -> Any:
    return omni.submit({"script": [Input({"n": n}) for n in range(PIECES)]}, ("audio",))


@pytest.mark.parametrize("killed", [("first",), ("second",), ("first", "second")], ids="-".join)
@pytest.mark.slow
async def test_a_deterministic_stage_repeats_what_a_journal_repeats(killed: tuple[str, ...]) -> None:
    async with OmniSystem.open(deterministic_behind_resumable()) as omni:
        outputs = await read_and_kill(omni, submit_repeating(omni), *killed)
    assert [output.data["trail"][0][0] for output in outputs] == list(range(PIECES * 20))


@pytest.mark.parametrize("killed", ["first", "second"])
async def test_a_deterministic_stage_behind_rounded_chunks_survives_one_death(killed: str) -> None:
    """A living consumer gets only the chunks that it lacks, and a living producer sends its own again."""
    async with OmniSystem.open(deterministic_behind_resumable(rounds=True)) as omni:
        outputs = await read_and_kill(omni, submit_repeating(omni), killed)
    assert [output.data["trail"][0][0] for output in outputs] == list(range(PIECES * 20))


async def test_a_deterministic_stage_that_repeats_rounded_chunks_otherwise_ends_the_request() -> None:
    """Both have died: the journal has no floats, and two different outputs are not joined."""
    async with OmniSystem.open(deterministic_behind_resumable(rounds=True)) as omni:

        async def pieces() -> AsyncIterator[Input]:
            """The last one comes after the deaths, so that no worker has finished before."""
            for n in range(PIECES - 1):
                yield Input({"n": n})
            await wait_restarted(omni, {"first": 2, "second": 2})
            yield Input({"n": PIECES - 1})

        with pytest.raises(StageCrashed, match="differs between the original and the replay"):
            await read_and_kill(omni, omni.submit({"script": pieces()}, ("audio",)), "first", "second")


@pytest.mark.parametrize(
    ("stages", "replicas"),
    [
        (STAGES, 2),
        *(pytest.param(pair, 2, marks=pytest.mark.slow) for pair in itertools.combinations(STAGES, 2)),
        *(pytest.param(stages, 1, marks=pytest.mark.slow) for stages in (*itertools.combinations(STAGES, 2), STAGES)),
    ],
)
async def test_several_stages_that_die_at_once(stages: tuple[str, ...], replicas: int) -> None:
    async with OmniSystem.open(pipeline({}, replicas)) as omni:
        for _ in range(3):
            check_continuous(await read_and_kill(omni, submit(omni), *stages))


@pytest.mark.slow
async def test_deaths_again_and_again(tmp_path: Path) -> None:
    dies = {name: {"dies_at": at, "marker": str(tmp_path / name)} for at, name in zip((2, 9, 20), STAGES, strict=True)}
    async with OmniSystem.open(pipeline(dies)) as omni:
        check_continuous(await read(submit(omni)))
        await wait_restarted(omni, dict.fromkeys(STAGES, 2))
        assert set(generations(omni).values()) == {2}


async def test_many_requests_beside_each_other() -> None:
    async with OmniSystem.open(pipeline({})) as omni, trio.open_nursery() as nursery:

        async def one(stages: tuple[str, ...]) -> None:
            check_continuous(await read_and_kill(omni, submit(omni), *stages))

        for number in range(6):
            nursery.start_soon(one, ("second",) if number == 3 else ())
