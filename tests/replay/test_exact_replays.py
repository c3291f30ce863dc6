"""Replay with real processes and signals: a client gets the outputs of a run without a death."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import Aborted, DeadlineExceeded
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.system import OmniSystem
from tests.replay.mortal import (
    NEVER_S,
    OF_A_PIECE,
    PIECES,
    STAGES,
    ask,
    check_exact,
    dies,
    generations,
    pipeline,
    read_and_kill,
    record_of,
    wait_restarted,
)
from tests.support.echo_systems import pid_of, read, until
from tests.support.frozen import freeze
from tests.support.shared_system import SharedSystem, with_shared_system


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage == "second" else pytest.mark.slow) for stage in STAGES]
)
def test_a_death_at_any_point_changes_no_output(shared_system: SharedSystem, stage: str) -> None:
    """Before the first chunk is fed, between two outputs, and after the last output but before ``Finished``."""

    async def work(omni: OmniSystem) -> None:
        before = generations(omni)
        for deaths, (at, where) in enumerate([(0, "feed"), (2, "after"), (PIECES - 1, "end")], 1):
            generation = ask(omni, dies(at, stage, where))
            # The last of these deaths costs nothing if the consumers have all its output.
            check_exact(generation, await read(generation), None if where == "end" else 1)
            await wait_restarted(omni, {stage: before[stage] + deaths})
            assert generations(omni) == {**before, stage: before[stage] + deaths}, "no other stage was restarted"

    shared_system.run(work)


@with_shared_system
async def test_several_stages_that_die_at_once(omni: OmniSystem) -> None:
    for stages in (("second", "third"), STAGES):
        generation = ask(omni)
        check_exact(generation, await read_and_kill(omni, generation, *stages))


@with_shared_system
async def test_replays_that_bring_new_outputs_do_not_use_up_the_limit(omni: OmniSystem) -> None:
    assert omni.pipeline.limits.replays < PIECES
    deaths = [dies(at, "second", "after") for at in range(PIECES - 1)] + [dies(PIECES - 1, "second", "before")]
    generation = ask(omni, *deaths)
    check_exact(generation, await read(generation), PIECES)


@with_shared_system
async def test_a_stage_that_dies_twice(omni: OmniSystem) -> None:
    generation = ask(omni, dies(1, "second", "before"), dies(3, "second", "after"))
    check_exact(generation, await read(generation), 2)


@with_shared_system
async def test_all_requests_in_flight_are_exact_and_others_are_not_replayed(omni: OmniSystem) -> None:
    asked = [ask(omni, dies(n, stage, "before")) for n, stage in enumerate(("second", "third", "second"))]
    asked += [ask(omni) for _ in range(5)]
    text_only = ask(omni, modalities=("text",))
    results: dict[str, list[Output]] = {}

    async def reader(generation: Generation) -> None:
        results[generation.request_id] = await read(generation)

    async with trio.open_nursery() as nursery:
        for generation in [*asked, text_only]:
            nursery.start_soon(reader, generation)
    for generation in asked:
        check_exact(generation, results[generation.request_id])
    final = results[text_only.request_id][-1].metrics
    assert final is not None
    assert final.replays == 0
    assert len(results[text_only.request_id]) == PIECES * OF_A_PIECE["first"]


async def test_a_stage_with_all_its_input_does_not_wait_for_dead_sources() -> None:
    """The dead stages do not restart and the request may not be replayed: it needs none of their output."""
    dead = ("first", "second")
    never = {f"stages.{stage}.restart.{name}": NEVER_S for stage in dead for name in ("backoff_s", "backoff_max_s")}
    async with OmniSystem.open(pipeline(), **never, **{"stages.third.options.step_s": 0.01}) as omni:
        generation = ask(omni, on_failure="fail")
        await until(lambda: "second" in record_of(generation).replay_state.stages["third"].inputs_complete)
        for stage in dead:
            os.kill(pid_of(omni, stage), signal.SIGKILL)
        check_exact(generation, await read(generation), 0)


@pytest.mark.slow
async def test_a_request_completes_without_a_restarted_stage_that_is_not_needed() -> None:
    """The second stage dies while all its output lies in the ring of the stopped third stage, and starts again. Then
    the third stage continues, and the first, which would feed the second once more, stays stopped."""
    async with OmniSystem.open(pipeline(), **{"stages.second.replicas": 2}) as omni:
        first, third = pid_of(omni, "first"), pid_of(omni, "third")
        freeze(third)
        generation = ask(omni)
        record = record_of(generation)
        await until(lambda: {"first", "second"} <= record.stats.keys())
        freeze(first)
        second = omni.health().stages["second"][record.replay_state.placement["second"].replica].pid
        assert second is not None
        os.kill(second, signal.SIGKILL)
        await until(lambda: record.replay_state.stages["second"].restarted)
        os.kill(third, signal.SIGCONT)
        check_exact(generation, await read(generation), 1)
        os.kill(first, signal.SIGCONT)


@pytest.mark.slow
async def test_another_replica_takes_over_and_without_one_the_request_waits_until_its_deadline() -> None:
    never = {"stages.second.restart.backoff_s": NEVER_S, "stages.second.restart.backoff_max_s": NEVER_S}
    async with OmniSystem.open(pipeline(), **never, **{"stages.second.replicas": 2}) as omni:
        generation = ask(omni, dies(1, "second", "after"))
        check_exact(generation, await read(generation), 1)
        late, aborted = ask(omni, dies(1, "second", "after")), ask(omni)
        await until(lambda: omni._orchestrator.queued == 2)
        aborted.abort()
        with pytest.raises(Aborted):
            await read(aborted)
        record_of(late).expires = now = trio.current_time()
        omni._orchestrator._deadlines.set(record_of(late), now)
        with pytest.raises(DeadlineExceeded):
            await read(late)
        assert omni.in_flight == 0


@pytest.mark.slow
async def test_a_join_is_replayed_after_the_death_of_any_of_its_sources() -> None:
    """script -> left -> join -> audio; words -> right -> join; words -> join."""

    def stage(**wiring: Any) -> Stage:
        restart = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
        return Stage(engine="echo", options={"fan_out": 2, "step_s": 0.002}, restart=restart, **wiring)

    joined = Pipeline(
        name="join",
        stages={
            "left": stage(accepts=("script",)),
            "right": stage(accepts=("words",)),
            "join": stage(accepts=("words",), inputs=("left", "right"), emits="audio"),
        },
    )
    inputs = {kind: [Input({"text": f"{kind} {n}"}) for n in range(5)] for kind in ("script", "words")}
    async with OmniSystem.open(joined) as omni:
        undisturbed = [output.data for output in await read(omni.submit(inputs, ["audio"]))]
        assert len(undisturbed) == 2 * (5 + 2 * 5 + 2 * 5)
        for stages in (("left",), ("right", "join")):
            outputs = await read_and_kill(omni, omni.submit(inputs, ["audio"]), *stages)
            assert [output.data for output in outputs] == undisturbed
