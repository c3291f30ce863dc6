"""Omni models whose thinkers prefill apart from decode, in real workers: speech, replicas, deaths, sleep.

``test_killed_stages`` kills each stage at every tenth output. In ``make test``, ``stages/omni/test_roles.py`` compares
text and rows of the two stages with those of one, in one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.errors import StageAsleep
from tests.support.closeness import assert_same_sound
from tests.support.echo_systems import generation_of, pid_of, wait_restarted
from tests.support.killed_omni import TOKENS, SplitOmni, checkpoint
from tests.support.killed_stages import Heard
from tests.support.shared_system import SharedSystem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

THINKERS = "prefill", "thinker"
SEEDS = range(4)


@pytest.fixture(scope="module", params=["qwen3", pytest.param("qwen2_5", marks=pytest.mark.exhaustive)])
def opened(
    request: pytest.FixtureRequest, fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SplitOmni, SharedSystem]]:
    omni = SplitOmni("exact", request.param, checkpoint(request.param, tmp_path_factory.mktemp("split")))
    with omni.running(fixture_processes) as shared_system:
        yield omni, shared_system


def sampled(omni: SplitOmni, seed: int) -> dict[str, Any]:
    return {**omni.sampled, "seed": seed}


def assert_same(found: Heard, expected: Heard) -> None:
    assert (found.texts, found.journals) == (expected.texts, expected.journals)
    assert_same_sound(found.sound, expected.sound)


def test_text_and_speech_are_those_of_the_reference(opened: tuple[SplitOmni, SharedSystem]) -> None:
    omni, shared_system = opened

    async def work(system: OmniSystem) -> None:
        omni.check(await omni.undisturbed(system, omni.greedy), omni.greedy)

    shared_system.run(work)


def test_replicas_give_the_same_answers_also_when_one_of_each_dies(opened: tuple[SplitOmni, SharedSystem]) -> None:
    omni, shared_system = opened

    async def work(system: OmniSystem) -> None:
        expected = {seed: await omni.undisturbed(system, sampled(omni, seed)) for seed in SEEDS}
        for stage in THINKERS:
            await system.scale(stage, 2)

        async def ask_all(*, kills: bool) -> int:
            """Ask for all answers at once. Return how often they were replayed."""
            found: dict[int, Heard] = {}

            async def ask(seed: int) -> None:
                found[seed] = await omni.hear(system, sampled(omni, seed))

            async with trio.open_nursery() as nursery:
                for seed in SEEDS:
                    nursery.start_soon(ask, seed)
                if kills:
                    await kill_replicas_in_mid_answer(omni, system)
            for seed, heard in found.items():
                assert_same(heard, expected[seed])
            return sum(heard.replays for heard in found.values())

        await ask_all(kills=False)
        while not await ask_all(kills=True):  # the replicas may have finished before their deaths
            pass
        for stage in THINKERS:
            await system.scale(stage, 1)

    shared_system.run(work)


async def kill_replicas_in_mid_answer(omni: SplitOmni, system: OmniSystem) -> None:
    """Ask one more question, and kill the first replica of each thinker stage when the answer has begun.

    Each of the two replicas holds some of the requests. Returns when the killed ones are ready again.
    """
    outputs, question = 0, {"prompt": omni.question.messages, "modalities": ("text",)}
    before = {stage: generation_of(system, stage) for stage in THINKERS}
    async for _ in system.generate(**question, max_tokens=TOKENS[omni.family]):
        outputs += 1
        if outputs == 3:
            for stage in THINKERS:
                os.kill(pid_of(system, stage), signal.SIGKILL)
    assert outputs > 3
    for stage, generation in before.items():
        await wait_restarted(system, stage, generation + 1)


@pytest.mark.parametrize("asleep", [("prefill",), ("thinker",), THINKERS], ids="-".join)
def test_a_stage_that_has_slept_answers_as_before(
    opened: tuple[SplitOmni, SharedSystem], asleep: tuple[str, ...]
) -> None:
    omni, shared_system = opened

    async def work(system: OmniSystem) -> None:
        expected = await omni.undisturbed(system, omni.greedy)
        await system.sleep(2, stages=asleep)
        with pytest.raises(StageAsleep):
            await omni.hear(system, omni.greedy)
        await system.wake_up()
        assert_same(await omni.hear(system, omni.greedy), expected)

    shared_system.run(work)
