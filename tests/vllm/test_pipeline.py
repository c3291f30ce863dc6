"""Qwen3-Omni's three stages as they run, the thinker on vLLM: processes, rings, real signals; a tiny checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Stage
from omni_actors.errors import InvalidRequest
from tests.kept import Kept, in_kept, kept_open
from tests.test_omni import SPOKEN, STORY, read, sound_of, text_of
from tests.vllm import tiny
from tests.vllm.conftest import ENGINE_ARGS

ASKED = {**SPOKEN, "max_tokens": 60, "talker_max_tokens": 61}


@pytest.fixture(scope="module")
def kept(its_own: set[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    model = str(tiny.qwen3(tmp_path_factory.mktemp("omni"), text_eos=0.0, codec_eos=0.0))
    options = {"engine_args": ENGINE_ARGS}
    accepts = ("audio", "image", "messages", "video")
    stages = {
        "thinker": Stage(
            engine="vllm_qwen3_thinker", model=model, threads=1, accepts=accepts, emits="text", options=options
        ),
        "talker": Stage(engine="qwen3_talker", model=model, threads=1, inputs=("thinker",)),
        "code2wav": Stage(engine="qwen3_code2wav", model=model, threads=1, inputs=("talker",), emits="audio"),
    }
    with kept_open(lambda: OmniSystem.open(Pipeline(name="tiny", stages=stages)), its_own) as kept:
        yield kept


def thinker_pid(omni: OmniSystem) -> int | None:
    [replica] = omni.health().stages["thinker"]
    return replica.pid


def kill(omni: OmniSystem) -> None:
    pid = thinker_pid(omni)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@in_kept
async def test_each_stage_begins_before_the_one_above_has_ended(omni: OmniSystem) -> None:
    outputs = await read(omni.generate(STORY, **ASKED))
    assert len(sound_of(outputs)) == 60 * 1920 - 555
    metrics = outputs[-1].metrics
    assert metrics is not None
    assert metrics.stages["talker"].first_output_s < metrics.stages["thinker"].finished_s
    assert metrics.stages["thinker"].sent_bytes["talker.0"] > 4 * 64 * (60 - 1 + 10), "a row for each token"


@in_kept
async def test_a_thinker_killed_while_it_decodes_changes_nothing_for_the_client(omni: OmniSystem) -> None:
    expected = await read(omni.generate(STORY, **ASKED))
    outputs = await read(omni.generate(STORY, **ASKED), lambda: kill(omni))
    assert text_of(outputs) == text_of(expected)
    np.testing.assert_array_equal(sound_of(outputs), sound_of(expected))


@in_kept
async def test_a_thinker_killed_while_it_prefills_and_while_it_loads_comes_back(omni: OmniSystem) -> None:
    """``leaves_nothing_behind`` looks for what it left: processes, shared memory."""
    before = thinker_pid(omni)
    async with trio.open_nursery() as nursery:
        answered: list[str] = []

        async def ask() -> None:
            answered.append(text_of(await read(omni.generate(STORY * 12, max_tokens=4))))

        nursery.start_soon(ask)
        while not omni.in_flight:
            await trio.lowlevel.checkpoint()
        kill(omni)
        while thinker_pid(omni) in (before, None):
            await omni.wait_changed()
        kill(omni)  # its successor, which has just begun to load
    assert answered == [text_of(await read(omni.generate(STORY * 12, max_tokens=4)))]


@in_kept
async def test_a_prompt_beyond_the_context_is_refused(omni: OmniSystem) -> None:
    with pytest.raises(InvalidRequest, match="1023") as refused:
        await read(omni.generate("word " * 2000, max_tokens=4))
    assert refused.value.code == "context_length_exceeded"
