"""Companions on stages of their own: a stage expands a request, two compute its companions, and a fourth gathers them.

It is one request with one outcome and one deadline: both companions end, or both go on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import DeadlineExceeded, InvalidRequest, StageCrashed
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.system import OmniSystem
from tests.replay.mortal import all_ready, generations, record_of, wait_restarted
from tests.support.companion_engines import PREDICTIONS, guided
from tests.support.echo_systems import WATCHDOG_S, pid_of, read, until
from tests.support.frozen import freeze
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

POSITIONS = 8
WANTED, UNWANTED = PREDICTIONS
STAGES = ("expand", WANTED, UNWANTED, "gather")


def pipeline() -> Pipeline:
    quick: dict[str, Any] = {
        "deterministic": True,
        "restart": Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01),
    }
    engines = "tests.support.companion_engines"

    def companion(step_s: float) -> Stage:
        return Stage(engine=f"{engines}:Predict", inputs=("expand",), options={"step_s": step_s}, **quick)

    return Pipeline(
        name="companions",
        stages={
            "expand": Stage(engine="echo", accepts=("script",), **quick),
            WANTED: companion(0.0),
            UNWANTED: companion(0.01),  # so that a death finds them at different positions
            "gather": Stage(engine=f"{engines}:Gather", inputs=(WANTED, UNWANTED), emits="audio", **quick),
        },
    )


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(pipeline()), fixture_processes) as shared_system:
        yield shared_system


def ask(omni: OmniSystem, refused: str | None = None, **terms: Any) -> Generation:
    pieces = [Input({"position": n, "refused": refused if n == POSITIONS // 2 else None}) for n in range(POSITIONS)]
    return omni.submit({"script": pieces}, ("audio",), **terms)


def check(outputs: list[Output]) -> None:
    found = [(output.data["position"], output.data["value"]) for output in outputs]
    assert found == [(n, guided(n)) for n in range(POSITIONS)]


async def read_and_kill(omni: OmniSystem, generation: Generation, at: int, stages: tuple[str, ...]) -> list[Output]:
    """Kill the workers of these stages when ``at`` outputs have arrived; read the rest. All are ready again then."""
    outputs, before = list[Output](), generations(omni)
    with trio.fail_after(WATCHDOG_S):
        if not at:
            _kill(omni, stages)
        async for output in generation:
            outputs.append(output)
            if len(outputs) == at:
                _kill(omni, stages)
    await wait_restarted(omni, {stage: before[stage] + 1 for stage in stages})
    return outputs


def _kill(omni: OmniSystem, stages: tuple[str, ...]) -> None:
    for stage in stages:
        os.kill(pid_of(omni, stage), signal.SIGKILL)


@pytest.mark.parametrize(
    "stages", [(WANTED,), *(pytest.param(each, marks=pytest.mark.slow) for each in ((UNWANTED,), STAGES[1:3], STAGES))]
)
def test_a_companion_killed_at_any_output_is_replayed_and_the_other_goes_on(
    shared_system: SharedSystem, stages: tuple[str, ...]
) -> None:
    async def work(omni: OmniSystem) -> None:
        for at in range(0, POSITIONS, 3):
            check(await read_and_kill(omni, ask(omni), at, stages))

    shared_system.run(work)


@with_shared_system
async def test_without_replay_the_death_of_one_companion_ends_both(omni: OmniSystem) -> None:
    victim = pid_of(omni, UNWANTED)
    freeze(victim)  # so that it dies before it has sent anything
    generation = ask(omni, on_failure="fail")
    await until(lambda: record_of(generation).number is not None)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(StageCrashed) as crashed:
        await read(generation)
    assert crashed.value.stage == UNWANTED
    await all_ready(omni)
    check(await read(ask(omni)))


@with_shared_system
async def test_the_refusal_of_one_companion_ends_both(omni: OmniSystem) -> None:
    for stage in (WANTED, UNWANTED):
        beside = ask(omni)
        with pytest.raises(InvalidRequest) as refused:
            await read(ask(omni, stage))
        assert refused.value.param == "refused"
        check(await read(beside))


@with_shared_system
async def test_one_deadline_ends_both_while_one_companion_stands_still(omni: OmniSystem) -> None:
    stopped = pid_of(omni, UNWANTED)
    freeze(stopped)
    try:
        with pytest.raises(DeadlineExceeded):
            await read(ask(omni, deadline_s=0.3))
        ask(omni).abort()
    finally:
        os.kill(stopped, signal.SIGCONT)
    check(await read(ask(omni)))
