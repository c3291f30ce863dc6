"""SIGKILL of each stage at every tenth output, with real processes: the client gets one continuous answer.

``killed_stages`` says what is asked of an answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_actors import OmniSystem
from tests.support.killed_omni import CODES, MARGINS, OF_MEAN, REFERENCES, TOKENS, Omni, SplitOmni, checkpoint
from tests.support.killed_stages import DTYPES, EVERY, IN_TURN, Killed, kill_at_every_tenth_output
from tests.support.killed_voice import Voice
from tests.support.rounding import OwnDecisions, deviations
from tests.support.shared_system import SharedSystem

pytestmark = [pytest.mark.voice, pytest.mark.timeout(900)]

SPLIT = {f"{family}_split": family for family in REFERENCES}
"""The pipelines with prefill apart from decode, by name, and their families."""
STAGES = {
    **dict.fromkeys(REFERENCES, Omni.stages),
    **dict.fromkeys(SPLIT, SplitOmni.stages),
    "voice": Voice.stages,
}


@pytest.fixture(scope="module")
def opened(
    request: pytest.FixtureRequest, fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Killed, SharedSystem]]:
    """A running pipeline in one configuration."""
    name, configuration = request.param
    if name == "voice":
        killed: Killed = Voice(configuration)
    else:
        root = tmp_path_factory.getbasetemp() / "killed_stages"
        root.mkdir(exist_ok=True)
        family = SPLIT.get(name, name)
        killed = (SplitOmni if name in SPLIT else Omni)(configuration, family, checkpoint(family, root))
    with killed.running(fixture_processes) as shared_system:
        yield killed, shared_system


IN_CI = {("voice", "noisy", IN_TURN)}
CASES = [
    pytest.param(
        (name, configuration),
        stage,
        id=f"{name}-{configuration}-{stage}",
        marks=pytest.mark.slow if (name, configuration, stage) in IN_CI else pytest.mark.exhaustive,
    )
    for name, stages in STAGES.items()
    for configuration in DTYPES
    for stage in (*stages, IN_TURN)
]


@pytest.mark.skipif("OMNI_ACTORS_TEST_NOISE" in os.environ, reason="this test adds its own, larger noise")
@pytest.mark.parametrize(("opened", "stage"), CASES, indirect=["opened"])
def test_a_stage_killed_at_every_tenth_output(
    opened: tuple[Killed, SharedSystem], stage: str, record_property: Callable[[str, object], None]
) -> None:
    kill_at_every_tenth_output(*opened, stage, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("opened", [pytest.param(("qwen3", "noisy"), id="qwen3-noisy")], indirect=True)
def test_all_stages_killed_at_once(opened: tuple[Killed, SharedSystem]) -> None:
    killed, shared_system = opened

    async def work(omni: OmniSystem) -> None:
        replays = 0
        while not replays:  # the stages may have finished before their deaths
            heard = await killed.hear(omni, killed.greedy, *killed.stages, at=20)
            assert heard.killed
            killed.check(heard, killed.greedy)
            replays = heard.replays

    shared_system.run(work)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", REFERENCES)
def test_the_margins_of_bfloat16_have_room_for_rounding(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The logits of resumed incarnations deviate from those of one that has decided step by step, by less than them."""
    asked = Omni("bfloat16", family, checkpoint(family, tmp_path))
    question = asked.question._replace(max_tokens=TOKENS[family], max_frames=CODES[family])
    tokens, codes = REFERENCES[family](asked.model, torch.bfloat16).own(question)
    with closing(OwnDecisions(asked.engines(), asked.model, question, tokens, codes)) as own:
        whole = own.logits()
        found: dict[str, list[float]] = {part: [] for part in whole}
        for cut in (1, *range(EVERY, TOKENS[family], EVERY)):
            for part, logits in own.logits(cut).items():
                found[part] += deviations(logits, whole[part])
    for part, each in found.items():
        if each:
            record_property(part, max(each))
            assert max(each) < MARGINS["bfloat16", part] / 1.5
            assert np.mean(each) < OF_MEAN * MARGINS["bfloat16", part] / 1.5


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each == "qwen3" else pytest.mark.slow) for each in REFERENCES]
)
def test_forced_decoding_finds_what_is_missing_or_there_twice(family: str, tmp_path: Path) -> None:
    """The lags of such an answer are above all margins, and those of the reference's own answer are 0."""
    asked = Omni("noisy", family, checkpoint(family, tmp_path))
    follower = REFERENCES[family](asked.model, torch.float32)
    question = asked.question._replace(max_tokens=14, max_frames=14)
    tokens, codes = follower.own(question)
    assert max(map(max, follower.follow(question, tokens, codes, asked.greedy).lags.values())) < 1e-5
    lags = follower.follow(question, tokens[:8] + tokens[9:], codes[:8] + codes[7:], asked.greedy).lags
    for part in ("thinker", "talker"):
        assert max(lags[part]) > MARGINS["bfloat16", part]
        assert np.mean(lags[part]) > OF_MEAN * MARGINS["bfloat16", part]
