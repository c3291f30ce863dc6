"""Requests that are not replayed: each ends with a typed error, and the system stays usable."""

from __future__ import annotations

import pytest
import trio

from omni_actors.errors import InvalidRequest, StageCrashed, StageUnavailable
from omni_actors.orchestrator.pieces import Input
from omni_actors.system import OmniSystem
from tests.replay.mortal import (
    OF_A_PIECE,
    PIECES,
    WATCHDOG_S,
    all_ready,
    ask,
    check_exact,
    dies,
    generations,
    held_back,
    pipeline,
)
from tests.support.echo_systems import read
from tests.support.shared_system import with_shared_system


@with_shared_system
async def test_on_failure_fail_ends_the_request_at_the_death(omni: OmniSystem) -> None:
    with pytest.raises(StageCrashed, match=r"'second'.*SIGKILL") as caught:
        await read(ask(omni, dies(1, "second", "after"), on_failure="fail"))
    assert caught.value.not_replayed is None
    assert not omni.health().ready, "the request ended before the stage was ready again"
    with pytest.raises(InvalidRequest) as refused:
        ask(omni, on_failure="ignore")
    assert refused.value.param == "on_failure"


@with_shared_system
async def test_a_request_whose_chunks_were_evicted_is_not_replayed(omni: OmniSystem) -> None:
    too_large = 300_000
    with pytest.raises(StageCrashed, match=r"stage 'first'.*2000000 bytes.*limits\.retain_bytes") as caught:
        await read(ask(omni, dies(PIECES - 1, "second", "after"), size=too_large))
    assert caught.value.stage == "second"
    assert "retain_bytes" in (caught.value.not_replayed or "")
    await all_ready(omni)
    entry_stage = ask(omni, dies(1, "first", "after"), size=too_large, modalities=("text",))
    assert len(await read(entry_stage)) == PIECES * OF_A_PIECE["first"], "the client keeps its own input"


@with_shared_system
async def test_a_request_that_kills_its_workers_ends_and_the_stage_survives(omni: OmniSystem) -> None:
    before = generations(omni)["second"]
    poison = {"n": 0, "echo": {"stage": "second", "raise": "step"}}
    with pytest.raises(StageCrashed, match="exited with code 1") as caught:
        await read(omni.submit({"script": [Input(poison)]}, ["audio"]))
    assert caught.value.not_replayed == "it was replayed 3 times already (limits.replays)"
    assert caught.value.generation == before + 3
    generation = ask(omni)
    check_exact(generation, await read(generation), 0)


@with_shared_system
async def test_replays_without_progress_use_up_the_limit(omni: OmniSystem) -> None:
    """SIGKILL, as from outside, each time before the first output that the client would get of the stage."""
    with pytest.raises(StageCrashed, match="SIGKILL") as caught:
        await read(ask(omni, *[dies(0, "second", "before") for _ in range(4)]))
    assert caught.value.not_replayed == "it was replayed 3 times already (limits.replays)"
    await all_ready(omni)


@with_shared_system
async def test_outputs_of_a_replay_that_differs_are_never_spliced(omni: OmniSystem) -> None:
    """Neither by a downstream stage nor by the client's side."""
    for stage in ("second", "third"):
        at, *death = dies(2, stage, "after")
        pieces = [Input({"n": n, "fickle": True, "dies": [death] if n == at else []}) for n in range(PIECES)]
        pids, arrived = set(), trio.Event()
        script = held_back(pieces, at, arrived)  # a death loses what has not yet left its node
        with pytest.raises(StageCrashed, match="differs between the original and the replay"):  # noqa: PT012
            with trio.fail_after(WATCHDOG_S):
                async for output in omni.submit({"script": script}, ["audio"]):
                    arrived.set()
                    pids.add(output.data["pid"])
        assert len(pids) == 1
        await all_ready(omni)


async def test_a_stage_that_is_not_deterministic_restarts_only_without_output_in_use() -> None:
    not_deterministic = {f"stages.{stage}.deterministic": False for stage in ("first", "third")}
    async with OmniSystem.open(pipeline(), **not_deterministic) as omni:
        with pytest.raises(StageCrashed, match="stage 'first' is neither deterministic nor resumable"):
            await read(ask(omni, dies(1, "first", "after")))
        await all_ready(omni)
        without_output = ask(omni, dies(0, "third", "feed"))
        check_exact(without_output, await read(without_output), 1)


async def test_a_request_that_waits_for_a_stage_ends_with_the_cause_when_the_stage_is_given_up() -> None:
    async with OmniSystem.open(pipeline(), **{"stages.second.restart.intensity": 0}) as omni:
        with pytest.raises(StageUnavailable, match=r"'second'.*SIGKILL.*intensity 0") as caught:
            await read(ask(omni, dies(0, "second", "feed")))
        assert caught.value.cause is omni.dead_error
        assert len(await read(ask(omni, modalities=("text",)))) == PIECES * OF_A_PIECE["first"]
