"""Pipelines whose stages get their input whole (``async_chunk: off``) give the answers of those that stream."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from omni_actors import OmniSystem
from omni_actors.outputs import Output
from omni_actors.stages import assets
from tests.support.closeness import assert_same_sound
from tests.support.shared_system import open_shared_system
from tests.support.spoken_answers import SPOKEN, STORY, read, sound_of, text_of
from tiny_models import qwen3 as tiny

pytestmark = pytest.mark.slow  # make test has test_gathering.py and replay/test_gathered.py


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("omni"), text_eos=0.0, codec_eos=0.0)


@pytest.fixture(
    params=[pytest.param("omni", marks=pytest.mark.exhaustive), pytest.param("voice", marks=pytest.mark.voice)]
)
def pipeline(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A pipeline's name, overrides of it, and the arguments of a request."""
    if request.param == "voice":
        for name in assets.NAMES:
            assets.prepare(name, print)
        overrides: dict[str, Any] = {"stages.llm.threads": 1}
        return "voice", overrides, {"modalities": ("text", "audio"), "max_tokens": 16}
    overrides = {f"stages.{stage}.threads": 1 for stage in ("thinker", "talker", "code2wav")}
    overrides |= {f"stages.{stage}.options.context": 2048 for stage in ("thinker", "talker")}
    return str(request.getfixturevalue("model")), overrides, {**SPOKEN, "talker_max_tokens": 30}


@pytest.fixture
def answers(pipeline: tuple[str, dict[str, Any], dict[str, Any]], fixture_processes: set[int]) -> Any:
    """(async_chunk) -> the outputs of one question."""
    name, overrides, arguments = pipeline

    def ask(*, async_chunk: bool) -> list[Output]:
        found: list[Output] = []

        async def work(omni: OmniSystem) -> None:
            found.extend(await read(omni.generate(STORY, **arguments)))

        def opening() -> Any:
            return OmniSystem.open(name, overrides={**overrides, "async_chunk": async_chunk})

        with open_shared_system(opening, fixture_processes, clear_choices=True) as shared_system:
            shared_system.run(work)
        return found

    return ask


def test_the_answers_are_the_same_and_no_stage_begins_early(answers: Any) -> None:
    streamed, gathered = answers(async_chunk=True), answers(async_chunk=False)
    assert text_of(gathered) == text_of(streamed)
    assert_same_sound(sound_of(gathered), sound_of(streamed))
    metrics = gathered[-1].metrics
    assert metrics is not None
    stages = sorted(metrics.stages.values(), key=lambda stage: stage.finished_s)
    for above, below in itertools.pairwise(stages):
        assert below.first_output_s is not None
        assert below.first_output_s > above.finished_s
